"""Reinforcement learning: the whole loop, from prompts to a better model, in one place.

Each step: generate -> score -> old and reference logprobs, values -> advantages -> update -> regather -> log ->
evaluate -> save. With rollout.steps_ahead ranks of their own generate for the next step while the others learn.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq
import torch
import torch.distributed as dist

from rlhf_megatron.algorithms.advantage import estimate_advantages
from rlhf_megatron.algorithms.aggregation import token_weights
from rlhf_megatron.algorithms.correction import with_correction
from rlhf_megatron.algorithms.diagnostics import explained_variance, mismatch_metrics
from rlhf_megatron.algorithms.kl import KLController, with_kl_penalties
from rlhf_megatron.algorithms.objective import objective_fields, policy_objective, value_objective
from rlhf_megatron.checkpoint.manager import Part, TeamOwnedState
from rlhf_megatron.data.rollout_batch import RolloutBatch
from rlhf_megatron.durable import whole_file
from rlhf_megatron.evaluation.history import History
from rlhf_megatron.evaluation.standalone import NO_STEP, gather_tables, metrics_of, sample_table
from rlhf_megatron.generation.batch_source import BatchSource
from rlhf_megatron.generation.collection import Collector
from rlhf_megatron.generation.prompt_groups import Group
from rlhf_megatron.generation.rollout_worker import Rollouts
from rlhf_megatron.loops.session import Session
from rlhf_megatron.recipe import Recipe
from rlhf_megatron.roles.outputs import TokenOutputs
from rlhf_megatron.roles.placed import PlacedRole, side_by_side
from rlhf_megatron.roles.role import Role


def run_rl(session: Session, rollouts: Rollouts | None = None) -> dict[str, float]:
    """Trains the actor by the recipe's algorithm; returns the last evaluation's metrics (with the first's as start).

    ``rollouts`` are made here unless they are given.
    """
    recipe, actor = session.recipe, session.actor
    # Without a KL term nothing reads the reference, so it is not made.
    reference = (
        session.make_role("reference", recipe.reference) if recipe.reference and recipe.algorithm.kl_coef else None
    )
    section = recipe.critic
    updates = recipe.steps * recipe.batch.updates_per_step
    critic = session.make_role("critic", section, section.optimizer, updates, "scalar") if section else None
    rollouts = rollouts or Rollouts(session)
    supply = BatchSource(session, rollouts, Collector(session, rollouts))
    history = History()
    controller = KLController(recipe.algorithm)
    session.at_end(rollouts.close)
    of_generators: dict[str, Part] = {"data": session.train, "rollouts": rollouts, "collector": supply}
    checkpoints = session.checkpoints(
        {"actor": actor} | ({"critic": critic} if critic else {}),
        {name: TeamOwnedState(part, session.generators) for name, part in of_generators.items()}
        | {"history": history, "kl": TeamOwnedState(controller, session.learners)},
    )
    with session.phase("regather"):
        rollouts.refresh()
    for step in session.steps(checkpoints, functools.partial(evaluate, session, rollouts, history)):
        batch, metrics, tokens = supply.take(step)  # generate and score, with dynamic sampling in rounds
        with session.phase("sleep"):
            rollouts.sleep()
        learnt: dict[str, float] = {}
        if batch.rows and session.learners.here:  # with dynamic sampling there may be nothing to learn
            with session.phase("logprobs"):
                batch, learnt = with_outputs(batch, recipe, actor, reference, critic)
            batch = with_advantages(batch, session, controller)
            of_critic: dict[str, float] = {}
            if critic:
                with session.phase("update_critic"):
                    of_critic = update_critic(session, critic, batch)
            if section is None or step > section.warmup_steps:
                with session.phase("update"):
                    learnt |= update(session, batch, controller)
            if critic:  # on ranks of its own it learns beside the actor
                learnt |= critic.in_team(of_critic)
        if recipe.rollout_is_ahead:
            supply.prepare(step + 1)
        metrics |= session.meet(learnt)
        with session.phase("regather"):
            rollouts.refresh()
        session.end_step(step, metrics, tokens, batch)
    return history.summary()


def with_outputs(
    batch: RolloutBatch, recipe: Recipe, actor: PlacedRole, reference: PlacedRole | None, critic: PlacedRole | None
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
    found = side_by_side(calls)
    metrics: dict[str, float] = {}
    if "old" in found:
        metrics = agreement(batch, found["old"])
        batch = batch.with_fields(old_logprobs=found["old"].logprobs)
    elif recipe.old_logprobs == "rollout":
        batch = batch.with_fields(old_logprobs=batch.rollout_logprobs)
    reference_logprobs = found["reference"].logprobs if "reference" in found else None
    return batch.with_fields(reference_logprobs=reference_logprobs, values=found.get("values")), metrics


def agreement(batch: RolloutBatch, of_actor: TokenOutputs) -> dict[str, float]:
    """How far the actor disagrees with the rollout about its own samples, and how undecided it is.

    Every rank has all tokens of the step, and one thread of a CPU takes 0.1 s for a million: a GPU reckons if there is
    one.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = (of_actor.logprobs, batch.rollout_logprobs, batch.response_mask, of_actor.entropy)
    logprobs, rollout_logprobs, sampled, entropy = (tensor.to(device) for tensor in tensors)
    metrics = mismatch_metrics(logprobs, rollout_logprobs, sampled)
    return metrics | {"train/entropy": float(entropy[sampled].mean())}


def with_advantages(batch: RolloutBatch, session: Session, controller: KLController) -> RolloutBatch:
    """Adds the advantage of each sampled token, after the KL's penalty where the recipe puts it in the reward."""
    settings = session.recipe.algorithm
    if settings.kl_placement == "reward" and batch.reference_logprobs is not None:
        batch = with_kl_penalties(batch, settings, controller.coefficient)
    return estimate_advantages(batch, settings)


def update(session: Session, batch: RolloutBatch, controller: KLController) -> dict[str, float]:
    """All of the actor's optimizer steps on one batch; the means of their metrics."""
    recipe, settings = session.recipe, session.recipe.algorithm
    assert recipe.rollout is not None
    constant = settings.loss_constant or recipe.rollout.max_response_length
    objective = functools.partial(policy_objective, settings=settings, kl_coef=controller.coefficient)
    own = recipe.old_logprobs == "update"  # then there is one minibatch, and what its forward pass says is kept
    metrics: dict[str, float] = {}
    if not own:
        batch, metrics = with_correction(batch, settings.rollout_correction)
    outputs = torch.empty(2, len(batch.tokens)) if own else None

    def learn(minibatch: RolloutBatch) -> dict[str, float]:
        fields = objective_fields(minibatch, settings, constant)
        return session.actor.update(minibatch, fields, objective, outputs=outputs)

    learnt, outputs = session.actor.in_team((in_minibatches(session, batch, learn), outputs))
    metrics |= {f"train/{name}": value for name, value in learnt.items()}
    if outputs is not None:
        of_actor = TokenOutputs(*outputs)
        metrics |= agreement(batch, of_actor)
        metrics |= with_correction(batch.with_fields(old_logprobs=of_actor.logprobs), settings.rollout_correction)[1]
    if "train/kl" in metrics:
        metrics["train/kl_coef"] = controller.coefficient
        controller.observe(metrics["train/kl"], batch.rows)
    return metrics


def update_critic(session: Session, critic: PlacedRole, batch: RolloutBatch) -> dict[str, float]:
    """All of the critic's optimizer steps on one batch, in the minibatches of the actor; the means of their metrics."""
    section = session.recipe.critic
    assert section is not None and batch.values is not None and batch.returns is not None
    objective = functools.partial(value_objective, clip=section.value_clip)

    def learn(minibatch: RolloutBatch) -> dict[str, float]:
        weights = token_weights(minibatch.response_mask, minibatch.cu_seqlens, "token_mean")
        return critic.update(minibatch, minibatch.fields(weights), objective)

    metrics = {f"critic/{name}": value for name, value in in_minibatches(session, batch, learn).items()}
    expected, came = batch.values[batch.response_mask], batch.returns[batch.response_mask]
    return metrics | {"critic/explained_variance": explained_variance(expected, came)}


def in_minibatches(
    session: Session, batch: RolloutBatch, learn: Callable[[RolloutBatch], dict[str, float]]
) -> dict[str, float]:
    """``learn`` on each minibatch of whole groups, epoch after epoch; the means of what it returns."""
    sizes = session.recipe.batch
    size = sizes.minibatch_prompts or sizes.prompts_per_step
    collected = defaultdict(list)
    for _ in range(sizes.epochs_per_step):
        for first in range(0, batch.groups, size):
            chosen = (batch.group_id >= first) & (batch.group_id < first + size)
            with session.span("minibatch"):
                found = learn(batch.select(chosen.nonzero().squeeze(1).tolist()))
            for name, value in found.items():
                collected[name].append(value)
    return {name: fmean(values) for name, values in collected.items()}


def evaluate(session: Session, rollouts: Rollouts, history: History, step: int) -> None:
    """Logs what the answers to held-out prompts are worth, per data source and over all replicas.

    The first answers go to samples/step-N.parquet, for people to read.
    """
    recipe, prompts = session.recipe, session.validation
    if prompts is None:
        return
    settings = recipe.evaluation
    sampling = dataclasses.replace(rollouts.sampling, temperature=settings.temperature, top_p=settings.top_p, top_k=-1)
    groups = [Group(prompt) for prompt in prompts]
    rolled = rollouts.generate(groups, settings.samples_per_prompt, sampling, NO_STEP)  # the same seeds every time
    rollouts.gather(rolled)
    rollouts.reset_prefix_cache()  # a run that is resumed here has none either
    table = gather_tables(
        sample_table(
            rolled.prompts, rolled.completions, rolled.scores(), recipe.reward_names, session.tokenizer, recipe
        )
    )
    metrics: dict[str, float] = {}
    told = headline_metric(recipe)
    if table is not None:  # rank 0
        for source, named in metrics_of(table, recipe.seed).items():
            mean = named.pop("score" if told == "score" else f"mean@{settings.samples_per_prompt}")
            metrics |= {
                f"eval/{source}/{told}": mean.value,
                f"eval/{source}/{told}_low": mean.low,
                f"eval/{source}/{told}_high": mean.high,
            }
            if told == "accuracy":
                metrics |= {f"eval/{source}/{name}": estimate.value for name, estimate in named.items()}
        try:
            with whole_file(session.run.sample_file(step)) as partial:
                pq.write_table(table.slice(0, recipe.monitor.sample_rows), partial)
        except OSError as error:  # a full disk costs what people read, not the run
            session.say(f"warning: no answers of step {step} were written: {error.strerror or error}")
    session.log(step, metrics)
    means = [value for name, value in metrics.items() if name.endswith(f"/{told}")]
    overall = torch.tensor([fmean(means) if means else 0.0], dtype=torch.float64)
    dist.broadcast(overall, 0)
    history.add(step, float(overall))


def headline_metric(recipe: Recipe) -> str:
    """Which number of an evaluation a run is told by: to a reward model alone, no answer is right or wrong."""
    return "score" if recipe.reward.rule == "none" else "accuracy"
