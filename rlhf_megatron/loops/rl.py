"""Reinforcement learning: the whole loop, from prompts to a better model, in one place.

Each step: generate -> score -> old and reference logprobs, values -> advantages -> update -> regather -> log ->
evaluate -> export -> save. With rollout.steps_ahead dedicated ranks generate for the next step while the others train.
"""

from __future__ import annotations

import functools

from rlhf_megatron.algorithms.kl import KLController
from rlhf_megatron.checkpoint.parts import Part, TeamOwnedState, TeamSpreadState
from rlhf_megatron.data.rollout_batch import RolloutBatch
from rlhf_megatron.data.row_numbers import RowNumbers
from rlhf_megatron.evaluation.held_out import headline_mean, held_out_metrics
from rlhf_megatron.evaluation.history import History
from rlhf_megatron.generation.batch_source import BatchSource, Collector
from rlhf_megatron.generation.draft_sync import draft_vocabulary, head_folder
from rlhf_megatron.generation.generated_groups import make_scorer
from rlhf_megatron.generation.judge_building import build_judge
from rlhf_megatron.generation.judge_verdicts import Judge
from rlhf_megatron.generation.kept_rollouts import keep_rollouts
from rlhf_megatron.generation.partners import make_partner
from rlhf_megatron.generation.replica import replica_among, replica_of
from rlhf_megatron.generation.rollout_worker import RolloutWorker
from rlhf_megatron.generation.weight_sync import WeightSync
from rlhf_megatron.loops.schedule import evaluation_is_due, export_is_due, is_last, save_is_due
from rlhf_megatron.loops.team_sync import sync_teams
from rlhf_megatron.loops.training_run import LoopResult, TrainingRun
from rlhf_megatron.models.architecture import Head
from rlhf_megatron.models.choice_shape import choice_shape
from rlhf_megatron.recipe import RLRecipe, judge_ranks
from rlhf_megatron.recipe.drafting import DRAFT
from rlhf_megatron.roles.beside import Beside
from rlhf_megatron.roles.head_learning import HeadLearning
from rlhf_megatron.roles.learning import (
    Learners,
    Lesson,
    learned_rows,
    observe_kl,
    share_rows,
    update_actor,
    update_critic,
    with_advantages,
    with_outputs,
)
from rlhf_megatron.roles.placed import PlacedRole
from rlhf_megatron.roles.prediction_learning import PredictionLearning
from rlhf_megatron.roles.reward_model import RewardModel
from rlhf_megatron.runtime.run_context import RunContext


def run_rl(run: TrainingRun[RLRecipe], worker: RolloutWorker | None = None) -> LoopResult:
    """Train the actor by the recipe's algorithm. The rollout's ``worker`` is made here unless it is given."""
    context, recipe, recorder = run.context, run.recipe, run.recorder
    draft = make_draft(run)
    roles = Learners(run.actor, make_reference(run), make_critic(run), learner_beside(recipe, run.actor, draft))
    worker = worker or make_rollout_worker(run, draft)
    weight_sync = worker.weight_sync
    batches = BatchSource(context, Collector(context, worker, run.data.train, run.architecture.vocabulary), weight_sync)
    history, kl_controller = History(), KLController(recipe.algorithm)
    run.at_end.callback(worker.close)
    generator_parts: dict[str, Part] = {"data": run.data.train, "rollouts": worker}
    checkpoints = run.start_or_resume(
        {"actor": roles.actor} | {role.name: role for role in (roles.critic, draft) if role and role.learns},
        {name: TeamOwnedState(part, context.generators) for name, part in generator_parts.items()}
        | {"history": history, "kl": TeamOwnedState(kl_controller, context.learners)},
        {"collector": TeamSpreadState(batches, context.generators)},
    )
    with context.phase("regather"):
        weight_sync.refresh()
    steps = run.steps_after(checkpoints.saved)
    if steps.start == 1 and evaluation_is_due(recipe, 0):
        with context.phase("evaluate"):
            evaluate(run, worker, history, 0)
    recorder.end_start()

    for step in steps:
        skips_data = recorder.begin_step(step)
        rows, metrics, tokens = batches.take(step, skips_data)  # generates and scores, with dynamic sampling in rounds
        with context.phase("sleep"):
            weight_sync.sleep()
        train_metrics: dict[str, float] = {}
        learned, outputs = rows.numbers, list[RolloutBatch]()
        if rows.rows:  # with dynamic sampling there may be nothing to learn
            with context.phase("exchange"):
                lesson = share_rows(rows, recipe, roles)
            if context.learners.here:
                train_metrics, learned, outputs = learn(context, roles, lesson, kl_controller, step)
        if recipe.rollout_is_ahead:
            batches.prepare(step + 1)
        metrics |= sync_teams(context, train_metrics)
        if rows.rows and recipe.monitor.rollouts.has(step):
            with context.phase("keep_rollouts"):
                table = keep_rollouts(context, run.tokenizer, rows, outputs, batches.notes, step)
                recorder.show_rollouts(step, table)
        with context.phase("regather"):
            weight_sync.refresh()
        recorder.end_step(step, metrics, tokens, learned)

        if evaluation_is_due(recipe, step):
            with context.phase("evaluate"):
                evaluate(run, worker, history, step)
            recorder.end_evaluation(step)
        with context.phase("save"):
            if export_is_due(recipe, step):
                run.exports.write_between(step)
            is_due = save_is_due(recipe, step, recorder.skipped_steps.are_going_on)
            checkpoints.after(step, is_due, is_last(recipe, step), recorder.best_metric.value(step))
            worker.forget_journal(checkpoints.saved)
        recorder.close_step(step)
    return LoopResult(history.summary(), checkpoints.saved)


def learn(
    context: RunContext[RLRecipe], roles: Learners, lesson: Lesson, kl_controller: KLController, step: int
) -> tuple[dict[str, float], RowNumbers, list[RolloutBatch]]:
    """Update the models on one lesson; return metrics and the rows that the actor has learned from, on every rank,
    and what it made of rows, on one rank for each share: of the same row the latest counts.

    Collective over the team that learns.
    """
    recipe, actor, critic = context.recipe, roles.actor, roles.critic
    with context.phase("logprobs"):
        lesson, metrics = with_outputs(lesson, recipe, roles)
    lesson = with_advantages(lesson, recipe.algorithm, kl_controller, actor)
    critic_metrics: dict[str, float] = {}
    if critic:
        with context.phase("update_critic"):
            critic_metrics = update_critic(context, roles, lesson)
    outputs = [lesson.batch]
    if recipe.critic is None or step > recipe.critic.warmup_steps:
        with context.phase("update"):
            update_metrics, learned_from = update_actor(context, actor, lesson, kl_controller, roles.beside)
        metrics |= update_metrics
        outputs.append(learned_from)
    metrics = actor.broadcast_in_team(metrics)
    if critic:  # on ranks of its own it learns beside the actor
        metrics |= critic.broadcast_in_team(critic_metrics)
    metrics = observe_kl(metrics, kl_controller, lesson)
    if recipe.old_logprobs == "rollout":  # the actor's own are not known
        outputs = [batch.with_fields(old_logprobs=None) for batch in outputs]
    own = outputs if actor.home.leads(context.rank) else []
    return metrics, learned_rows(lesson, recipe.algorithm, actor), own


def make_reference(run: TrainingRun[RLRecipe]) -> PlacedRole | None:
    """Build the reference policy; None without a KL term."""
    section = run.recipe.reference
    return run.roles.build("reference", section) if section and run.recipe.algorithm.kl_coef else None


def make_critic(run: TrainingRun[RLRecipe]) -> PlacedRole | None:
    """Build the critic, if the recipe has one."""
    section, updates = run.recipe.critic, run.recipe.steps * run.recipe.batch.updates_per_step
    return run.roles.build("critic", section, section.optimizer, updates, "scalar") if section else None


def make_draft(run: TrainingRun[RLRecipe]) -> PlacedRole | None:
    """Build the model that drafts for the rollout, if the recipe has one."""
    section, updates = run.recipe.roles.get(DRAFT), run.recipe.learning_steps * run.recipe.batch.updates_per_step
    if section is None:
        return None
    head: Head = "prediction" if run.recipe.predicts else "draft"
    draft = run.roles.build(DRAFT, section, section.learns_by, updates, head)
    run.exports.add_draft(draft, head_folder(run.context, draft.architecture))
    return draft


def learner_beside(recipe: RLRecipe, actor: PlacedRole, draft: PlacedRole | None) -> Beside | None:
    """Return what has the draft learn in the actor's passes, on the actor's ranks; None where nothing does."""
    if draft is None or not draft.learns or actor.local is None:
        return None
    if draft.architecture.head == "prediction":
        return PredictionLearning(actor.local, draft.local)
    assert draft.local is not None, "the actor has one stage"
    return HeadLearning(actor.local, draft.local, draft_vocabulary(recipe, draft.architecture))


def make_rollout_worker(run: TrainingRun[RLRecipe], draft: PlacedRole | None = None) -> RolloutWorker:
    """Build this rank's part of the rollout, from rewards to engine, for which ``draft`` drafts; collective over the
    world."""
    context, recipe = run.context, run.recipe
    replica = replica_of(recipe, context.rank, context.world_size)
    scorer = make_scorer(recipe, replica, run.data)
    partner = make_partner(recipe, replica.leads)
    scoring_models: dict[str, RewardModel | Judge] = {}
    if recipe.reward_model:
        scoring_models["reward_model"] = run.roles.build_reward_model(recipe.reward_model, run.tokenizer)
    if recipe.judge:  # before the policy's engine, which takes a share of what is left
        ranks = judge_ranks(recipe, recipe.judge, context.world_size)
        of_judge = replica_among(ranks, recipe.judge.layout.tensor, context.rank)
        progress = functools.partial(context.progress, "score")
        with context.phase("judge"):
            judge = scoring_models["judge"] = build_judge(
                recipe,
                recipe.judge,
                of_judge,
                run.tokenizer,
                context.generators,
                context.say,
                progress,
                sleeps=recipe.judge.sleep,  # once it has scored: the policy's engine first finds what it leaves
            )
        run.at_end.callback(judge.close)
    weight_sync = WeightSync(context, replica, run.actor, run.architecture, draft)
    choices = choice_shape(run.architecture) if recipe.algorithm.replays_experts else None
    return RolloutWorker(context, replica, run.tokenizer, weight_sync, scorer, partner, scoring_models, choices)


def evaluate(run: TrainingRun[RLRecipe], worker: RolloutWorker, history: History, step: int) -> None:
    """Log the metrics of held-out prompts by data source, answered by all replicas; nothing without such prompts."""
    if run.data.validation is None:
        return
    metrics = held_out_metrics(run.context, worker, run.data.validation, run.tokenizer, step)
    run.recorder.log(step, metrics)
    history.add(step, headline_mean(run.recipe, metrics))
