"""Reinforcement learning: the whole loop, from prompts to a better model, in one place.

Each step: generate -> score -> old and reference logprobs, values -> advantages -> update -> regather -> log ->
evaluate -> export -> save. With rollout.steps_ahead dedicated ranks generate for the next step while the others train.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch

from rlhf_megatron.algorithms.advantage import estimate_advantages
from rlhf_megatron.algorithms.aggregation import token_weights
from rlhf_megatron.algorithms.correction import with_correction
from rlhf_megatron.algorithms.diagnostics import explained_variance, mismatch_metrics
from rlhf_megatron.algorithms.kl import KLController, with_kl_penalties
from rlhf_megatron.algorithms.objective import (
    objective_fields,
    of_rows,
    policy_objective,
    rows_to_learn,
    value_objective,
)
from rlhf_megatron.checkpoint.manager import Part, TeamOwnedState
from rlhf_megatron.data.rollout_batch import RolloutBatch
from rlhf_megatron.evaluation.held_out import headline_mean, held_out_metrics
from rlhf_megatron.evaluation.history import History
from rlhf_megatron.generation.batch_source import BatchSource, Collector
from rlhf_megatron.generation.conversations import make_turn_function
from rlhf_megatron.generation.generated_groups import make_scorer
from rlhf_megatron.generation.replica import replica_of
from rlhf_megatron.generation.rollout_worker import RolloutWorker
from rlhf_megatron.generation.weight_sync import WeightSync
from rlhf_megatron.loops.schedule import evaluation_is_due, export_is_due, is_last, save_is_due
from rlhf_megatron.loops.teams import sync_teams
from rlhf_megatron.loops.training_run import LoopResult, TrainingRun
from rlhf_megatron.models.choice_shape import choice_shape
from rlhf_megatron.recipe import AlgorithmSection, RLRecipe
from rlhf_megatron.roles.outputs import TokenOutputs
from rlhf_megatron.roles.placed import PlacedRole, compute_concurrently
from rlhf_megatron.roles.role import Role
from rlhf_megatron.runtime.run_context import RunContext


def run_rl(run: TrainingRun[RLRecipe], worker: RolloutWorker | None = None) -> LoopResult:
    """Trains the actor by the recipe's algorithm. The rollout's ``worker`` is made here unless it is given."""
    context, recipe, actor, recorder = run.context, run.recipe, run.actor, run.recorder
    reference, critic = make_reference(run), make_critic(run)
    worker = worker or make_rollout_worker(run)
    weight_sync = worker.weight_sync
    batches = BatchSource(context, Collector(context, worker, run.data.train, run.architecture.vocabulary), weight_sync)
    history, kl_controller = History(), KLController(recipe.algorithm)
    run.at_end.callback(worker.close)
    generator_parts: dict[str, Part] = {"data": run.data.train, "rollouts": worker, "collector": batches}
    checkpoints = run.start_or_resume(
        {"actor": actor} | ({"critic": critic} if critic else {}),
        {name: TeamOwnedState(part, context.generators) for name, part in generator_parts.items()}
        | {"history": history, "kl": TeamOwnedState(kl_controller, context.learners)},
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
        batch, metrics, tokens = batches.take(step, skips_data)  # generates and scores, with dynamic sampling in rounds
        with context.phase("sleep"):
            weight_sync.sleep()
        train_metrics: dict[str, float] = {}
        if batch.rows and context.learners.here:  # with dynamic sampling there may be nothing to learn
            with context.phase("logprobs"):
                batch, train_metrics = with_outputs(batch, recipe, actor, reference, critic)
            batch = with_advantages(batch, recipe.algorithm, kl_controller)
            critic_metrics: dict[str, float] = {}
            if critic:
                with context.phase("update_critic"):
                    critic_metrics = update_critic(context, critic, batch)
            if recipe.critic is None or step > recipe.critic.warmup_steps:
                with context.phase("update"):
                    train_metrics |= update_actor(context, actor, batch, kl_controller)
            if critic:  # on ranks of its own it learns beside the actor
                train_metrics |= critic.broadcast_in_team(critic_metrics)
        if recipe.rollout_is_ahead:
            batches.prepare(step + 1)
        metrics |= sync_teams(context, train_metrics)
        with context.phase("regather"):
            weight_sync.refresh()
        recorder.end_step(step, metrics, tokens, batch.select(rows_to_learn(batch, recipe.algorithm)))

        if evaluation_is_due(recipe, step):
            with context.phase("evaluate"):
                evaluate(run, worker, history, step)
            recorder.end_evaluation(step)
        with context.phase("save"):
            if export_is_due(recipe, step):
                run.exports.write_between(step)
            is_due = save_is_due(recipe, step, recorder.skipped_steps.are_going_on)
            checkpoints.after(step, is_due, is_last(recipe, step), recorder.best_metric.value(step))
        recorder.close_step(step)
    return LoopResult(history.summary(), checkpoints.saved)


def make_reference(run: TrainingRun[RLRecipe]) -> PlacedRole | None:
    """Builds the reference policy; None without a KL term."""
    section = run.recipe.reference
    return run.roles.build("reference", section) if section and run.recipe.algorithm.kl_coef else None


def make_critic(run: TrainingRun[RLRecipe]) -> PlacedRole | None:
    """Builds the critic, if the recipe has one."""
    section, updates = run.recipe.critic, run.recipe.steps * run.recipe.batch.updates_per_step
    return run.roles.build("critic", section, section.optimizer, updates, "scalar") if section else None


def make_rollout_worker(run: TrainingRun[RLRecipe]) -> RolloutWorker:
    """Builds this rank's part of the rollout, from rewards to engine; collective over the world."""
    context, recipe = run.context, run.recipe
    replica = replica_of(recipe, context.rank, context.world_size)
    scorer = make_scorer(recipe, replica, run.data)
    turn_function = make_turn_function(recipe, replica.leads)
    judge = recipe.reward_model
    reward_model = run.roles.build_reward_model(judge, run.tokenizer) if judge else None
    weight_sync = WeightSync(context, replica, run.actor, run.architecture)
    choices = choice_shape(run.architecture) if recipe.algorithm.replays_experts else None
    return RolloutWorker(context, replica, run.tokenizer, weight_sync, scorer, turn_function, reward_model, choices)


def with_outputs(
    batch: RolloutBatch, recipe: RLRecipe, actor: PlacedRole, reference: PlacedRole | None, critic: PlacedRole | None
) -> tuple[RolloutBatch, dict[str, float]]:
    """Adds what the objectives compare with, and measures how far trainer and rollout disagree.

    No old logprobs are added where they are those of the update's own forward pass.
    """
    calls: dict[str, tuple[PlacedRole, Callable[[Role], Any]]] = {}
    if recipe.old_logprobs == "recompute":
        calls["old"] = (actor, lambda role: role.logprobs(batch))
    if reference:
        calls["reference"] = (reference, lambda role: role.logprobs(batch))
    elif recipe.reference_is_base:
        calls["reference"] = (actor, lambda role: role.base_logprobs(batch))
    if critic:
        calls["values"] = (critic, lambda role: role.values(batch))
    outputs = compute_concurrently(calls)
    metrics: dict[str, float] = {}
    if "old" in outputs:
        metrics = agreement(batch, outputs["old"])
        batch = batch.with_fields(old_logprobs=outputs["old"].logprobs)
    elif recipe.old_logprobs == "rollout":
        batch = batch.with_fields(old_logprobs=batch.rollout_logprobs)
    reference_logprobs = outputs["reference"].logprobs if "reference" in outputs else None
    return batch.with_fields(reference_logprobs=reference_logprobs, values=outputs.get("values")), metrics


def agreement(batch: RolloutBatch, actor: TokenOutputs) -> dict[str, float]:
    """Measures the mismatch of actor and rollout on the sampled tokens, and the actor's entropy.

    Every rank has all tokens of the step: on a GPU if there is one, since a CPU thread takes 0.1 s per million.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = (actor.logprobs, batch.rollout_logprobs, batch.response_mask, actor.entropy)
    logprobs, rollout_logprobs, sampled, entropy = (tensor.to(device) for tensor in tensors)
    metrics = mismatch_metrics(logprobs, rollout_logprobs, sampled)
    return metrics | {"train/entropy": float(entropy[sampled].mean())}


def with_advantages(batch: RolloutBatch, settings: AlgorithmSection, controller: KLController) -> RolloutBatch:
    """Adds the advantage of each sampled token, after the KL's penalty where the recipe puts it in the reward."""
    if settings.kl_placement == "reward" and batch.reference_logprobs is not None:
        batch = with_kl_penalties(batch, settings, controller.coefficient)
    return estimate_advantages(batch, settings)


def update_actor(
    context: RunContext[RLRecipe], actor: PlacedRole, batch: RolloutBatch, controller: KLController
) -> dict[str, float]:
    """Takes all of the actor's optimizer steps on one batch; returns the means of their metrics."""
    recipe, settings = context.recipe, context.recipe.algorithm
    constant = settings.loss_constant or recipe.rollout.max_response_length
    objective = functools.partial(policy_objective, settings=settings, kl_coef=controller.coefficient)
    own = recipe.old_logprobs == "update"  # then there is one minibatch, and what its forward pass says is kept
    metrics: dict[str, float] = {}
    if not own:
        batch, metrics = with_correction(batch, settings.rollout_correction)
    learned = batch.select(rows_to_learn(batch, settings)) if own else batch
    outputs = torch.empty(2, len(learned.tokens)) if own else None

    def take_step(minibatch: RolloutBatch) -> dict[str, float]:
        fields, rows = objective_fields(minibatch, settings, constant), rows_to_learn(minibatch, settings)
        fields = of_rows(fields, minibatch, rows)
        return actor.update(minibatch.select(rows), fields, objective, outputs=outputs) | {
            "learned_fraction": len(rows) / minibatch.rows
        }

    actor_metrics, outputs = actor.broadcast_in_team((in_minibatches(context, batch, take_step), outputs))
    metrics |= {f"train/{name}": value for name, value in actor_metrics.items()}
    if outputs is not None:
        old = TokenOutputs(*outputs)
        metrics |= agreement(learned, old)
        metrics |= with_correction(learned.with_fields(old_logprobs=old.logprobs), settings.rollout_correction)[1]
    if "train/kl" in metrics:
        metrics["train/kl_coef"] = controller.coefficient
        controller.observe(metrics["train/kl"], batch.rows)
    return metrics


def update_critic(context: RunContext[RLRecipe], critic: PlacedRole, batch: RolloutBatch) -> dict[str, float]:
    """Takes all of the critic's optimizer steps on one batch, in the actor's minibatches; returns the means of their
    metrics."""
    section = context.recipe.critic
    assert section is not None and batch.values is not None and batch.returns is not None
    objective = functools.partial(value_objective, clip=section.value_clip)

    def take_step(minibatch: RolloutBatch) -> dict[str, float]:
        weights = token_weights(minibatch.response_mask, minibatch.cu_seqlens, "token_mean")
        return critic.update(minibatch, minibatch.fields(weights), objective)

    metrics = {f"critic/{name}": value for name, value in in_minibatches(context, batch, take_step).items()}
    values, returns = batch.values[batch.response_mask], batch.returns[batch.response_mask]
    return metrics | {"critic/explained_variance": explained_variance(values, returns)}


def in_minibatches(
    context: RunContext[RLRecipe], batch: RolloutBatch, take_step: Callable[[RolloutBatch], dict[str, float]]
) -> dict[str, float]:
    """Calls ``take_step`` on each minibatch of whole groups, epoch after epoch; returns the means of its metrics."""
    sizes = context.recipe.batch
    size = sizes.minibatch_prompts or sizes.prompts_per_step
    by_name = defaultdict(list)
    for _ in range(sizes.epochs_per_step):
        for first in range(0, batch.groups, size):
            chosen = (batch.group_id >= first) & (batch.group_id < first + size)
            with context.span("minibatch"):
                metrics = take_step(batch.select(chosen.nonzero().squeeze(1).tolist()))
            for name, value in metrics.items():
                by_name[name].append(value)
    return {name: fmean(values) for name, values in by_name.items()}


def evaluate(run: TrainingRun[RLRecipe], worker: RolloutWorker, history: History, step: int) -> None:
    """Logs the metrics of held-out prompts by data source, answered by all replicas; nothing without such prompts."""
    if run.data.validation is None:
        return
    metrics = held_out_metrics(run.context, worker, run.data.validation, run.tokenizer, step)
    run.recorder.log(step, metrics)
    history.add(step, headline_mean(run.recipe, metrics))
