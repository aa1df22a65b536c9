"""The batch of each step: rounds of generating and scoring until there are enough informative groups.

It is collected as the loop asks for it, or ahead of it by ranks that only generate.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter
from torch import Tensor

from rlhf_megatron.algorithms.filters import informative_rows, overlong_penalty
from rlhf_megatron.data.rollout_batch import RolloutBatch, checked_batch, concatenate
from rlhf_megatron.data.stream import PromptStream
from rlhf_megatron.errors import UserError
from rlhf_megatron.generation.generated_groups import GeneratedGroups
from rlhf_megatron.generation.prompt_groups import Group, groups_from_state, groups_state
from rlhf_megatron.generation.rollout_worker import RolloutWorker
from rlhf_megatron.generation.weight_sync import WeightSync
from rlhf_megatron.recipe import RLRecipe
from rlhf_megatron.rollout.engine import Sampling
from rlhf_megatron.runtime.run_context import RunContext
from rlhf_megatron.topology.exchange import from_rank

_METRICS = TypeAdapter(dict[str, float])


class Collected(NamedTuple):
    """A step's batch, and the metrics and tokens (prompts and responses) of all that was generated for it."""

    batch: RolloutBatch
    metrics: dict[str, float]
    tokens: int


class Collector:
    """Draws prompts, has them answered and scored, and shapes and filters the results as the recipe says."""

    def __init__(
        self, context: RunContext[RLRecipe], worker: RolloutWorker, train: PromptStream, vocabulary: int
    ) -> None:
        """Holds what waits for the next step: surplus groups, and aborted groups.

        ``vocabulary``: how many tokens the actor has, by which a checkpoint's are checked.
        """
        self._context, self._worker, self._train, self._vocabulary = context, worker, train, vocabulary
        self._surplus: RolloutBatch | None = None
        self._waiting: list[Group] = []

    def collect(self, step: int) -> Collected:
        """Returns the step's batch in whole groups; collective over the team that generates.

        The batch has ``batch.prompts_per_step`` groups; with dynamic sampling it may have fewer, or none, where
        ``filter_groups.max_num_gen_batches`` is reached. Raises UserError there if the recipe says stop. Rows that
        could not be scored are left out.
        """
        recipe, seconds_before = self._context.recipe, self._context.seconds("generate")
        settings, wanted = recipe.algorithm.filter_groups, recipe.batch.prompts_per_step
        kept = [self._surplus] if self._surplus else []
        carried = _groups(kept)
        generated: list[RolloutBatch] = []
        sampled: list[GeneratedGroups] = []
        greedy: list[GeneratedGroups] = []
        rounds = settings.max_num_gen_batches if settings.enable else 1  # 0: as many as it takes
        while _groups(kept) < wanted and not (rounds and len(generated) == rounds):
            count = settings.prompts_per_round or wanted if settings.enable else wanted
            batch = self._one_round(step, count, sum(len(each.asked) for each in sampled), sampled, greedy)
            generated.append(batch)
            kept.append(self._usable(batch))
        if settings.enable and settings.when_exhausted == "stop" and _groups(kept) < wanted:
            raise UserError(self._exhausted(step, _groups(kept)))
        batch, surplus = _cut(kept, wanted)
        self._surplus = surplus if settings.keep_surplus and surplus.rows else None
        metrics = self._metrics(generated, sampled + greedy, seconds_before) | self._worker.scoring_metrics(sampled)
        if settings.enable:
            informative = _groups(kept) - carried
            metrics |= {
                "rollout/rounds": float(len(generated)),
                "rollout/groups_carried_over": float(carried),
                "rollout/groups_dropped": float(_groups(generated) - informative),
                "rollout/groups_surplus": float(_groups([surplus])),
                "rollout/groups": float(_groups([batch])),
            }
        metrics |= self._train.metrics()  # where the data stand, which only ranks that draw prompts know
        return Collected(batch, metrics, sum(each.tokens for each in sampled + greedy))

    def state(self) -> dict[str, Any]:
        """Returns the groups that wait for the next step, for a checkpoint."""
        return {"surplus": batch_state(self._surplus), "waiting": groups_state(self._waiting)}

    def load(self, state: dict[str, Any]) -> None:
        """Resumes where ``state`` was taken."""
        self._surplus = self.restored_batch(state["surplus"])
        responses = self._context.recipe.batch.responses_per_prompt
        self._waiting = groups_from_state(
            state["waiting"], responses, self._train.read, self._vocabulary, self._worker.choices
        )

    def restored_batch(self, state: dict[str, Any]) -> RolloutBatch | None:
        """Returns the batch of a ``batch_state``; None for none, and where its rewards are not what the recipe asks
        for now."""
        if not state:
            return None
        batch, settings = checked_batch(state, self._vocabulary, self._worker.choices), self._context.recipe.algorithm
        saved = (batch.scores is not None, batch.baseline_rewards is not None)
        if saved == (settings.overlong_buffer.enable, settings.advantage == "remax"):
            return batch
        self._context.say(
            f"{batch.groups} groups of the step before are dropped: their rewards are of another "
            "algorithm.overlong_buffer or algorithm.advantage"
        )
        return None

    def _one_round(
        self,
        step: int,
        prompts: int,
        first_group: int,
        sampled: list[GeneratedGroups],
        greedy: list[GeneratedGroups],
    ) -> RolloutBatch:
        """Returns ``prompts`` more groups, scored, the same on every rank.

        ``sampled`` gets what was generated for them, ``greedy`` what ReMax compares it with.

        With over-sampling more are started, those that wait the first, and what is left of them waits again.
        """
        recipe, sampling = self._context.recipe, self._worker.sampling
        responses = recipe.batch.responses_per_prompt
        started = math.ceil(round(prompts * recipe.rollout.oversample, 6))  # 1.1 times 10 are 11
        groups, self._waiting = self._waiting[:started], self._waiting[started:]
        if len(groups) < started:
            groups += [Group(prompt) for prompt in self._train.next(started - len(groups))]
        wanted = prompts if started > prompts else None
        batch = self._answers(groups, responses, sampling, step, sampled, first_group * responses, wanted)
        self._waiting += sampled[-1].left
        if recipe.algorithm.advantage == "remax":
            sampling = dataclasses.replace(sampling, temperature=0.0, top_p=1.0, top_k=-1)
            answered, group_of_row = batch.group_id.unique(return_inverse=True)
            asked = [Group(groups[index].prompt) for index in answered.tolist()]
            baselines = self._answers(asked, 1, sampling, step, greedy).rewards
            batch = batch.with_fields(baseline_rewards=baselines[group_of_row])
        return batch

    def _answers(
        self,
        groups: Sequence[Group],
        responses: int,
        sampling: Sampling,
        step: int,
        calls: list[GeneratedGroups],
        first_row: int = 0,
        wanted: int | None = None,
    ) -> RolloutBatch:
        """Returns ``responses`` to each prompt, scored, less the overlong penalty; ``calls`` gets one more."""
        context, recipe = self._context, self._context.recipe
        with context.phase("generate"):
            calls.append(self._worker.generate(groups, responses, sampling, step, first_row, wanted))
        with context.phase("score"):
            batch = self._worker.gather(calls[-1])
        buffer = recipe.algorithm.overlong_buffer
        if buffer.enable:
            limit = recipe.rollout.max_response_length
            penalty = overlong_penalty(batch.completion_lengths, limit, buffer.len, buffer.penalty_factor)
            batch = batch.with_fields(scores=batch.rewards, rewards=batch.rewards + penalty)
        return batch

    def _usable(self, batch: RolloutBatch) -> RolloutBatch:
        """The rows that could be scored, and with dynamic sampling of these the informative groups."""
        known = batch.rewards.isfinite()
        if batch.baseline_rewards is not None:
            known &= batch.baseline_rewards.isfinite()
        batch = _rows(batch, known)
        settings = self._context.recipe.algorithm.filter_groups
        if not settings.enable:
            return batch
        values = batch.rewards if settings.metric == "reward" or batch.scores is None else batch.scores
        return _rows(batch, informative_rows(values, batch.group_id))

    def _exhausted(self, step: int, groups: int) -> str:
        recipe = self._context.recipe
        return (
            f"step {step}: {groups} of {recipe.batch.prompts_per_step} groups teach something after "
            f"algorithm.filter_groups.max_num_gen_batches={recipe.algorithm.filter_groups.max_num_gen_batches} rounds; "
            "raise it, set when_exhausted: train, or choose data that is neither too easy nor too hard"
        )

    def _metrics(
        self, generated: list[RolloutBatch], calls: list[GeneratedGroups], seconds_before: float
    ) -> dict[str, float]:
        """Metrics of all generated trajectories, also of those that are not trained on.

        ``seconds_before``: for which this step had generated for another.
        """
        if not generated:
            return {}
        batch, context = _joined(generated), self._context
        lengths = batch.response_lengths.double()
        replicas = self._worker.generation_metrics(calls)
        tokens = replicas["rollout/sampled_tokens"]
        metrics = replicas | {
            "rollout/groups_waiting": float(len(self._waiting)),
            "rollout/throughput_tokens_per_sec": tokens / max(context.seconds("generate") - seconds_before, 1e-9),
            "rollout/response_length_mean": float(lengths.mean()),
            "rollout/response_length_max": float(lengths.max()),
            "rollout/truncated_fraction": float(batch.truncated.double().mean()),
            "rollout/weight_version": float(batch.weight_version.double().mean()),
            "reward/latency_ms": context.seconds("score") * 1000.0,
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


class BatchSource:
    """Hands a step its batch on every rank. ``prepare`` collects the next one where ranks have nothing to learn."""

    def __init__(self, context: RunContext[RLRecipe], collector: Collector, weight_sync: WeightSync) -> None:
        """Nothing is collected yet."""
        self._context, self._collector, self._weight_sync = context, collector, weight_sync
        self._team = context.generators
        self._ahead: Collected | None = None

    def take(self, step: int, skips_data: bool = False) -> Collected:
        """Returns the step's batch, the same on every rank; collective over the world.

        ``skips_data``: the step's data are not those that follow, so what was collected ahead is dropped.
        ``rollout/staleness``: updates of the actor since the tokens of a row were sampled.
        """
        if skips_data:
            self._ahead = None
        if self._team.here and self._ahead is None:
            self._ahead = self._collector.collect(step)
        collected, self._ahead = self._ahead, None
        if self._team.group is not None:
            with self._context.waiting():
                collected = from_rank(collected, self._team.first)
        assert collected is not None
        batch = collected.batch
        return collected._replace(metrics=collected.metrics | (self._staleness(batch) if batch.rows else {}))

    def prepare(self, step: int) -> None:
        """Collects the batch of a later step on the ranks that generate while others learn; collective over these."""
        if self._team.here and step <= self._context.recipe.steps:
            self._ahead = self._collector.collect(step)

    def state(self) -> dict[str, Any]:
        """Returns what has been collected and what waits, for a checkpoint; of a rank that generates."""
        ahead, saved = self._ahead, {}
        if ahead:
            saved = {"batch": batch_state(ahead.batch), "metrics": ahead.metrics, "tokens": ahead.tokens}
        return self._collector.state() | {"ahead": saved}

    def load(self, state: dict[str, Any]) -> None:
        """Resumes where ``state`` was taken."""
        self._collector.load(state)
        ahead = state.get("ahead")
        self._ahead = None
        if not ahead:
            return
        if not self._context.recipe.rollout_is_ahead:
            self._context.say("the batch that was collected ahead is dropped: rollout.steps_ahead is 0 now")
            return
        batch = self._collector.restored_batch(ahead["batch"])
        metrics = _METRICS.validate_python(ahead["metrics"])
        self._ahead = Collected(batch, metrics, int(ahead["tokens"])) if batch else None

    def _staleness(self, batch: RolloutBatch) -> dict[str, float]:
        updates = (self._weight_sync.version - batch.weight_version).double()
        return {"rollout/staleness_mean": float(updates.mean()), "rollout/staleness_max": float(updates.max())}


def batch_state(batch: RolloutBatch | None) -> dict[str, Any]:
    """Returns a batch for a checkpoint: its tensors by field; {} for none."""
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)} if batch else {}
    return {name: value for name, value in fields.items() if value is not None}


def _rows(batch: RolloutBatch, chosen: Tensor) -> RolloutBatch:
    return batch.select(chosen.nonzero().squeeze(1).tolist())


def _groups(parts: Sequence[RolloutBatch]) -> int:
    return sum(part.groups for part in parts)


def _joined(parts: Sequence[RolloutBatch]) -> RolloutBatch:
    """The rows of all parts with their groups renumbered from 0 in their order."""
    groups, number = [], 0
    for part in parts:
        ids = part.group_id.unique_consecutive(return_inverse=True)[1] + number
        groups.append(ids)
        number += part.groups
    whole = concatenate(parts)
    return whole.with_fields(row_id=torch.arange(whole.rows), group_id=torch.cat(groups))


def _cut(parts: Sequence[RolloutBatch], groups: int) -> tuple[RolloutBatch, RolloutBatch]:
    """The first ``groups`` groups of all parts, renumbered, and the rest."""
    whole = _joined(parts)
    return _rows(whole, whole.group_id < groups), _rows(whole, whole.group_id >= groups)
