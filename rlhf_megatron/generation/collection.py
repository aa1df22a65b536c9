"""What a step learns from: rounds of generating and scoring until there are enough groups that teach something."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_megatron.algorithms.filters import informative_rows, overlong_penalty
from rlhf_megatron.data.rollout_batch import RolloutBatch, checked_batch, concatenate
from rlhf_megatron.errors import UserError
from rlhf_megatron.generation.prompt_groups import Group, groups_from_state, groups_state
from rlhf_megatron.generation.rolled import Rolled
from rlhf_megatron.generation.rollout_worker import Rollouts
from rlhf_megatron.loops.session import Session
from rlhf_megatron.rollout.engine import Sampling


class Collected(NamedTuple):
    """What a step learns from, and the metrics and tokens (prompts and responses) of all that was generated for it."""

    batch: RolloutBatch
    metrics: dict[str, float]
    tokens: int


class Collector:
    """Draws prompts, has them answered and scored, and shapes and filters the results as the recipe says."""

    def __init__(self, session: Session, rollouts: Rollouts) -> None:
        """Holds what waits for the next step: groups that one had too many of, and groups that were given up."""
        self._session, self._rollouts = session, rollouts
        self._surplus: RolloutBatch | None = None
        self._waiting: list[Group] = []

    def collect(self, step: int) -> Collected:
        """The step's batch in whole groups; collective over the team that generates.

        The batch has ``batch.prompts_per_step`` groups; with dynamic sampling it may have fewer, or none, where
        ``filter_groups.max_num_gen_batches`` is reached. Raises UserError there if the recipe says stop. Rows that
        could not be scored are left out.
        """
        recipe, before = self._session.recipe, self._session.seconds("generate")
        settings, wanted = recipe.algorithm.filter_groups, recipe.batch.prompts_per_step
        kept = [self._surplus] if self._surplus else []
        carried = _groups(kept)
        generated: list[RolloutBatch] = []
        rolled: list[Rolled] = []
        greedy: list[Rolled] = []
        rounds = settings.max_num_gen_batches if settings.enable else 1  # 0: as many as it takes
        while _groups(kept) < wanted and not (rounds and len(generated) == rounds):
            count = settings.prompts_per_round or wanted if settings.enable else wanted
            batch = self._one_round(step, count, sum(len(each.asked) for each in rolled), rolled, greedy)
            generated.append(batch)
            kept.append(self._usable(batch))
        if settings.enable and settings.when_exhausted == "stop" and _groups(kept) < wanted:
            raise UserError(self._exhausted(step, _groups(kept)))
        batch, surplus = _cut(kept, wanted)
        self._surplus = surplus if settings.keep_surplus and surplus.rows else None
        metrics = self._metrics(generated, rolled + greedy, before) | self._rollouts.scoring_metrics(rolled)
        if settings.enable:
            informative = _groups(kept) - carried
            metrics |= {
                "rollout/rounds": float(len(generated)),
                "rollout/groups_carried_over": float(carried),
                "rollout/groups_dropped": float(_groups(generated) - informative),
                "rollout/groups_surplus": float(_groups([surplus])),
                "rollout/groups": float(_groups([batch])),
            }
        return Collected(batch, metrics, sum(each.tokens for each in rolled + greedy))

    def state(self) -> dict[str, Any]:
        """The groups that wait for the next step, for a checkpoint."""
        return {"surplus": batch_state(self._surplus), "waiting": groups_state(self._waiting)}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on where ``state`` was taken."""
        session = self._session
        self._surplus = batch_from_state(session, state["surplus"])
        responses = session.recipe.batch.responses_per_prompt
        vocabulary = session.architecture.vocabulary
        self._waiting = groups_from_state(state["waiting"], responses, session.train.read, vocabulary)

    def _one_round(
        self, step: int, prompts: int, first_group: int, rolled: list[Rolled], greedy: list[Rolled]
    ) -> RolloutBatch:
        """``prompts`` more groups, scored, the same on every rank.

        ``rolled`` gets what was generated for them, ``greedy`` what ReMax compares it with.

        With over-sampling more are started, those that wait the first, and what is left of them waits again.
        """
        recipe, rollouts = self._session.recipe, self._rollouts
        responses = recipe.batch.responses_per_prompt
        started = math.ceil(round(prompts * recipe.rollout.oversample, 6))  # 1.1 times 10 are 11
        groups, self._waiting = self._waiting[:started], self._waiting[started:]
        if len(groups) < started:
            groups += [Group(prompt) for prompt in self._session.train.next(started - len(groups))]
        wanted = prompts if started > prompts else None
        batch = self._answers(groups, responses, rollouts.sampling, step, rolled, first_group * responses, wanted)
        self._waiting += rolled[-1].left
        if recipe.algorithm.advantage == "remax":
            sampling = dataclasses.replace(rollouts.sampling, temperature=0.0, top_p=1.0, top_k=-1)
            answered, place = batch.group_id.unique(return_inverse=True)
            asked = [Group(groups[index].prompt) for index in answered.tolist()]
            baselines = self._answers(asked, 1, sampling, step, greedy).rewards
            batch = batch.with_fields(baseline_rewards=baselines[place])
        return batch

    def _answers(
        self,
        groups: Sequence[Group],
        responses: int,
        sampling: Sampling,
        step: int,
        rolled: list[Rolled],
        first_row: int = 0,
        wanted: int | None = None,
    ) -> RolloutBatch:
        """``responses`` to each prompt with their rewards, less the overlong penalty."""
        session, rollouts = self._session, self._rollouts
        with session.phase("generate"):
            rolled.append(rollouts.generate(groups, responses, sampling, step, first_row, wanted))
        with session.phase("score"):
            batch = rollouts.gather(rolled[-1])
        buffer = session.recipe.algorithm.overlong_buffer
        if buffer.enable and session.recipe.rollout:
            limit = session.recipe.rollout.max_response_length
            penalty = overlong_penalty(batch.completion_lengths, limit, buffer.len, buffer.penalty_factor)
            batch = batch.with_fields(scores=batch.rewards, rewards=batch.rewards + penalty)
        return batch

    def _usable(self, batch: RolloutBatch) -> RolloutBatch:
        """The rows that could be scored, and with dynamic sampling of these the groups that teach something."""
        known = batch.rewards.isfinite()
        if batch.baseline_rewards is not None:
            known &= batch.baseline_rewards.isfinite()
        batch = _rows(batch, known)
        settings = self._session.recipe.algorithm.filter_groups
        if not settings.enable:
            return batch
        values = batch.rewards if settings.metric == "reward" or batch.scores is None else batch.scores
        return _rows(batch, informative_rows(values, batch.group_id))

    def _exhausted(self, step: int, groups: int) -> str:
        recipe = self._session.recipe
        return (
            f"step {step}: {groups} of {recipe.batch.prompts_per_step} groups teach something after "
            f"algorithm.filter_groups.max_num_gen_batches={recipe.algorithm.filter_groups.max_num_gen_batches} rounds; "
            "raise it, set when_exhausted: train, or choose data that is neither too easy nor too hard"
        )

    def _metrics(self, generated: list[RolloutBatch], rolled: list[Rolled], before: float) -> dict[str, float]:
        """What all generated trajectories look like, also those that are not trained on.

        ``before``: seconds that this step had generated for another.
        """
        if not generated:
            return {}
        batch, session = _joined(generated), self._session
        lengths = batch.response_lengths.double()
        replicas = self._rollouts.generation_metrics(rolled)
        sampled = replicas["rollout/sampled_tokens"]
        metrics = replicas | {
            "rollout/groups_waiting": float(len(self._waiting)),
            "rollout/throughput_tokens_per_sec": sampled / max(session.seconds("generate") - before, 1e-9),
            "rollout/response_length_mean": float(lengths.mean()),
            "rollout/response_length_max": float(lengths.max()),
            "rollout/truncated_fraction": float(batch.truncated.double().mean()),
            "rollout/weight_version": float(batch.weight_version.double().mean()),
            "reward/latency_ms": session.seconds("score") * 1000.0,
        }
        scored = _rows(batch, batch.rewards.isfinite())
        if not scored.rows:
            return metrics
        teaching = scored.group_id[informative_rows(scored.rewards, scored.group_id)].unique()
        metrics |= {
            "reward/mean": float(scored.rewards.mean()),
            "reward/std": float(scored.rewards.std(unbiased=False)),
            "reward/informative_group_fraction": len(teaching) / batch.groups,
        }
        if scored.scores is not None:
            metrics["reward/score_mean"] = float(scored.scores.mean())
            metrics["reward/overlong_penalty_mean"] = float((scored.rewards - scored.scores).mean())
        return metrics


def batch_state(batch: RolloutBatch | None) -> dict[str, Any]:
    """A batch for a checkpoint: its tensors by field; {} for none."""
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)} if batch else {}
    return {name: value for name, value in fields.items() if value is not None}


def batch_from_state(session: Session, state: dict[str, Any]) -> RolloutBatch | None:
    """The batch of a ``batch_state``; None for none, and where its rewards are not what the recipe asks for now."""
    if not state:
        return None
    batch, settings = checked_batch(state, session.architecture.vocabulary), session.recipe.algorithm
    found = (batch.scores is not None, batch.baseline_rewards is not None)
    if found == (settings.overlong_buffer.enable, settings.advantage == "remax"):
        return batch
    session.say(
        f"{batch.groups} groups of the step before are dropped: their rewards are of another "
        "algorithm.overlong_buffer or algorithm.advantage"
    )
    return None


def _rows(batch: RolloutBatch, chosen: Tensor) -> RolloutBatch:
    return batch.select(chosen.nonzero().squeeze(1).tolist())


def _groups(parts: Sequence[RolloutBatch]) -> int:
    return sum(part.groups for part in parts)


def _joined(parts: Sequence[RolloutBatch]) -> RolloutBatch:
    """The rows of all parts with their groups, numbered anew from 0 in their order."""
    groups, number = [], 0
    for part in parts:
        ids = part.group_id.unique_consecutive(return_inverse=True)[1] + number
        groups.append(ids)
        number += part.groups
    whole = concatenate(parts)
    return whole.with_fields(row_id=torch.arange(whole.rows), group_id=torch.cat(groups))


def _cut(parts: Sequence[RolloutBatch], groups: int) -> tuple[RolloutBatch, RolloutBatch]:
    """The first ``groups`` groups of all parts, numbered anew, and the rest."""
    whole = _joined(parts)
    return _rows(whole, whole.group_id < groups), _rows(whole, whole.group_id >= groups)
