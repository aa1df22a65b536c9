"""Learning of a step, from its rows to the optimizer's steps: shares, outputs, advantages, updates.

Every rank of the team that learns calls every function. Tokens are where they are computed, in the shares of the roles;
what is decided for all rows together follows from their numbers, or from sums over the shares.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable
from statistics import fmean

import torch
from torch import Tensor

from rlhf_megatron.algorithms.advantage import outcomes, row_advantages, token_advantages
from rlhf_megatron.algorithms.aggregation import row_weights
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
from rlhf_megatron.algorithms.returns import on_last_turns
from rlhf_megatron.algorithms.totals import Totals, count, total
from rlhf_megatron.data.rollout_batch import RolloutBatch, marked_in_rows
from rlhf_megatron.data.row_numbers import RowNumbers, SpreadRows
from rlhf_megatron.recipe import AlgorithmSection, RLRecipe
from rlhf_megatron.roles.beside import Beside
from rlhf_megatron.roles.outputs import TokenOutputs
from rlhf_megatron.roles.placed import PlacedRole
from rlhf_megatron.roles.shares import Share, carried, share_out
from rlhf_megatron.runtime.run_context import RunContext


@dataclasses.dataclass(frozen=True)
class Learners:
    """The roles that a step of reinforcement learning asks."""

    actor: PlacedRole
    reference: PlacedRole | None
    critic: PlacedRole | None
    beside: Beside | None = None  # what learns in the actor's passes


@dataclasses.dataclass(frozen=True)
class Lesson:
    """The rows of a step, as this rank has them for each role.

    Attributes:
        minibatches: [R] bool each.
        advantages: [R] of whole rows, where these are known from the numbers alone; and whether they are not 0.
        batch: the actor's share of the rows, with all that is known of their tokens so far.
        values: [T] of the critic's share.
    """

    numbers: RowNumbers
    minibatches: list[Tensor]
    advantages: Tensor | None
    has_advantage: Tensor | None
    actor: Share
    reference: Share
    critic: Share
    batch: RolloutBatch
    values: Tensor | None = None

    def with_batch(self, **fields: Tensor | None) -> Lesson:
        """Return the same with these fields of the actor's share."""
        return dataclasses.replace(self, batch=self.batch.with_fields(**fields))


def share_rows(rows: SpreadRows, recipe: RLRecipe, roles: Learners) -> Lesson:
    """Bring each row to the ranks that learn from it, from the one that sampled it; collective over the world.

    Ranks get about the same to learn of each minibatch, and of all rows.
    """
    numbers, settings = rows.numbers, recipe.algorithm
    in_reward = settings.kl_placement == "reward" and bool(settings.kl_coef)
    advantages = None if in_reward else row_advantages(outcomes(numbers), settings)
    has_advantage = None if advantages is None else (advantages != 0) & (numbers.response_lengths > 0)
    minibatches = _minibatches(numbers, recipe)
    learned = torch.zeros(numbers.rows, dtype=torch.bool)
    parts = []
    for minibatch in minibatches:
        chosen = minibatch.nonzero().squeeze(1)
        of_minibatch = None if has_advantage is None else has_advantage[chosen]
        parts.append(chosen[rows_to_learn(numbers.select(chosen), of_minibatch, settings)])
        learned[parts[-1]] = True
    if recipe.old_logprobs != "update" or roles.critic:  # else nobody asks for the others
        parts.append((~learned).nonzero().squeeze(1))
    actor = roles.actor.home, roles.actor.assign(numbers, parts)
    every = [minibatch.nonzero().squeeze(1) for minibatch in minibatches]
    homes = [actor]
    for role in (roles.reference or roles.actor, roles.critic or roles.actor):
        same = role.home.placement == roles.actor.home.placement
        homes.append(actor if same else (role.home, role.assign(numbers, every)))
    of_actor, of_reference, of_critic = share_out(rows, homes)
    return Lesson(numbers, minibatches, advantages, has_advantage, of_actor, of_reference, of_critic, of_actor.batch)


def _minibatches(numbers: RowNumbers, recipe: RLRecipe) -> list[Tensor]:
    """Return [R] bool each: rows of whole groups, which one optimizer step is for."""
    size = recipe.batch.minibatch_prompts or recipe.batch.prompts_per_step
    group = numbers.group_id
    return [(group >= first) & (group < first + size) for first in range(0, numbers.groups, size)]


def with_outputs(lesson: Lesson, recipe: RLRecipe, roles: Learners) -> tuple[Lesson, dict[str, float]]:
    """Add what the objectives compare with, and measure how far trainer and rollout disagree, on the actor's ranks.

    No old logprobs are added where they are those of the update's own forward pass. Roles without a rank in common
    compute at the same time: nothing is exchanged before all are done.
    """
    actor, reference, critic = (role.local if role else None for role in (roles.actor, roles.reference, roles.critic))
    batch, old, base = lesson.batch, None, None
    if recipe.old_logprobs == "recompute" and actor:
        old = actor.logprobs(batch)
    if reference:
        base = reference.logprobs(lesson.reference.batch).logprobs
    elif recipe.reference_is_base and actor:
        base = actor.base_logprobs(batch).logprobs
    values = critic.values(lesson.critic.batch) if critic else None
    if roles.reference:
        base = carried(base, lesson.reference, lesson.actor)
    metrics: dict[str, float] = {}
    if old and actor:
        metrics = agreement(batch, old, actor.totals)
    old_logprobs = batch.rollout_logprobs if recipe.old_logprobs == "rollout" else old.logprobs if old else None
    at_actor = carried(values, lesson.critic, lesson.actor) if roles.critic else None
    lesson = lesson.with_batch(old_logprobs=old_logprobs, reference_logprobs=base, values=at_actor)
    return dataclasses.replace(lesson, values=values), metrics


def agreement(batch: RolloutBatch, actor: TokenOutputs, totals: Totals) -> dict[str, float]:
    """Measure how far the actor disagrees with the rollout about its own samples, and how undecided it is.

    One thread of a CPU takes 0.1 s for a million tokens: a GPU does it if there is one.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = (actor.logprobs, batch.rollout_logprobs, batch.response_mask, actor.entropy)
    logprobs, rollout_logprobs, sampled, entropy = (tensor.to(device) for tensor in tensors)
    metrics = mismatch_metrics(logprobs, rollout_logprobs, sampled, totals)
    of_sampled = entropy[sampled].double()
    return metrics | {"train/entropy": float(total(of_sampled, totals)) / max(1, count(of_sampled, totals))}


def with_advantages(lesson: Lesson, settings: AlgorithmSection, controller: KLController, actor: PlacedRole) -> Lesson:
    """Add the advantage of each sampled token, after the KL's penalty where the recipe puts it in the reward; on the
    actor's ranks."""
    if actor.local is None:
        return lesson
    share, totals = lesson.actor, actor.local.totals
    batch, advantages = lesson.batch, lesson.advantages
    if settings.kl_placement == "reward" and batch.reference_logprobs is not None:
        batch = with_kl_penalties(batch, settings, controller.coefficient)
        of_rows_here = batch.penalties.double().split(batch.lengths.tolist()) if batch.penalties is not None else ()
        penalties = _of_all_rows(share, torch.tensor([float(row.sum()) for row in of_rows_here]).double(), totals)
        advantages = row_advantages(outcomes(lesson.numbers, penalties), settings)
    if advantages is not None:
        batch = batch.with_fields(advantages=batch.spread(advantages[share.rows]))
        has_advantage = (advantages != 0) & (lesson.numbers.response_lengths > 0)
    else:
        batch = token_advantages(batch, settings, totals)
        assert batch.advantages is not None
        marked = marked_in_rows((batch.advantages != 0) & batch.response_mask, batch.cu_seqlens)
        has_advantage = _of_all_rows(share, marked, totals) > 0
    if settings.credited_turns == "last" and batch.advantages is not None:
        batch = batch.with_fields(advantages=on_last_turns(batch.advantages, batch))
    return dataclasses.replace(lesson, batch=batch, has_advantage=has_advantage)


def _of_all_rows(share: Share, values: Tensor, totals: Totals) -> Tensor:
    """Map [n] of this share's rows -> [R] of all."""
    return totals.sum(values.new_zeros(share.numbers.rows).index_copy(0, share.rows, values))


def update_actor(
    context: RunContext[RLRecipe],
    actor: PlacedRole,
    lesson: Lesson,
    controller: KLController,
    beside: Beside | None = None,
) -> tuple[dict[str, float], RolloutBatch]:
    """Take all of the actor's optimizer steps on one lesson, and those of what learns ``beside`` it; return the means
    of their metrics, on its ranks, and the rows of its share whose logprobs were computed, with these."""
    recipe, settings = context.recipe, context.recipe.algorithm
    role, share, numbers = actor.local, lesson.actor, lesson.numbers
    if role is None:
        return {}, lesson.batch
    constant = settings.loss_constant or recipe.rollout.max_response_length
    objective = functools.partial(policy_objective, settings=settings, kl_coef=controller.coefficient)
    own = recipe.old_logprobs == "update"  # then there is one minibatch, and what its forward pass says is kept
    batch, metrics = lesson.batch, dict[str, float]()
    if not own:
        batch, metrics = with_correction(batch, settings.rollout_correction, role.totals)

    def take_step(minibatch: Tensor) -> dict[str, float]:
        chosen = _learned(lesson, minibatch, settings)
        here, learned = share.chosen(minibatch), share.chosen(chosen)
        whole, index_of = batch.select(here), {row: index for index, row in enumerate(here)}
        weights = _row_weights(numbers, minibatch, settings.loss_aggregation, constant)[share.rows[here]]
        fields = objective_fields(whole, settings, weights, role.totals)
        fields = of_rows(fields, whole, [index_of[row] for row in learned])
        kept.append(batch.select(learned))
        outputs = torch.empty(2, len(kept[-1].tokens)) if own else None
        step = role.update(kept[-1], fields, objective, outputs=outputs, beside=beside)
        if outputs is not None:
            kept_outputs.append(TokenOutputs(*outputs))
        return step | {"learned_fraction": int(chosen.sum()) / int(minibatch.sum())}

    kept, kept_outputs = list[RolloutBatch](), list[TokenOutputs]()
    of_steps = in_minibatches(context, lesson, take_step)
    metrics |= {f"train/{name}": value for name, value in of_steps.items()}
    if own:
        learned, old = kept[-1], kept_outputs[-1]
        metrics |= agreement(learned, old, role.totals)
        corrected = learned.with_fields(old_logprobs=old.logprobs)
        metrics |= with_correction(corrected, settings.rollout_correction, role.totals)[1]
        batch = corrected
    return metrics, batch


def observe_kl(metrics: dict[str, float], controller: KLController, lesson: Lesson) -> dict[str, float]:
    """Tell the controller of the KL's coefficient what the update's KL was; return the metrics with the coefficient
    that it had."""
    if "train/kl" not in metrics:
        return metrics
    told = metrics | {"train/kl_coef": controller.coefficient}
    controller.observe(metrics["train/kl"], lesson.numbers.rows)
    return told


def update_critic(context: RunContext[RLRecipe], roles: Learners, lesson: Lesson) -> dict[str, float]:
    """Take all of the critic's optimizer steps on one lesson, in the actor's minibatches; return the means of their
    metrics, on the critic's ranks."""
    section, critic, share = context.recipe.critic, roles.critic, lesson.critic
    assert section is not None and critic is not None
    returns, role = carried(lesson.batch.returns, lesson.actor, share), critic.local
    if role is None:
        return {}
    assert lesson.values is not None and returns is not None
    batch = share.batch.with_fields(values=lesson.values, returns=returns)
    objective = functools.partial(value_objective, clip=section.value_clip)

    def take_step(minibatch: Tensor) -> dict[str, float]:
        here = share.chosen(minibatch)
        part = batch.select(here)
        weights = _row_weights(lesson.numbers, minibatch, "token_mean")[share.rows[here]]
        return role.update(part, part.fields(part.spread(weights)), objective)

    metrics = {f"critic/{name}": value for name, value in in_minibatches(context, lesson, take_step).items()}
    values, returns = lesson.values[batch.response_mask], returns[batch.response_mask]
    return metrics | {"critic/explained_variance": explained_variance(values, returns, role.totals)}


def in_minibatches(
    context: RunContext[RLRecipe], lesson: Lesson, take_step: Callable[[Tensor], dict[str, float]]
) -> dict[str, float]:
    """Call ``take_step`` on each minibatch, epoch after epoch; return the means of its metrics."""
    by_name = defaultdict(list)
    for _ in range(context.recipe.batch.epochs_per_step):
        for minibatch in lesson.minibatches:
            with context.span("minibatch"):
                metrics = take_step(minibatch)
            for name, value in metrics.items():
                by_name[name].append(value)
    return {name: fmean(values) for name, values in by_name.items()}


def learned_rows(lesson: Lesson, settings: AlgorithmSection, actor: PlacedRole) -> RowNumbers:
    """Return the numbers of the rows that the actor learned from, on every rank of its team."""
    has_advantage = actor.broadcast_in_team((lesson.has_advantage,))[0]
    return lesson.numbers.select(rows_to_learn(lesson.numbers, has_advantage, settings))


def _learned(lesson: Lesson, minibatch: Tensor, settings: AlgorithmSection) -> Tensor:
    """Return [R] bool: the rows of a minibatch that have a gradient."""
    has_advantage = None if lesson.has_advantage is None else lesson.has_advantage[minibatch]
    chosen = rows_to_learn(lesson.numbers.select(minibatch), has_advantage, settings)
    return torch.zeros_like(minibatch).masked_scatter(minibatch, chosen)


def _row_weights(numbers: RowNumbers, minibatch: Tensor, aggregation: str, constant: float | None = None) -> Tensor:
    """Return [R]: the ``row_weights`` of a minibatch, 0 for other rows."""
    trajectories = None if numbers.trajectory_id is None else numbers.trajectory_id[minibatch]
    weights = row_weights(numbers.response_lengths[minibatch], aggregation, constant, trajectories)
    return torch.zeros(numbers.rows).masked_scatter(minibatch, weights)
