"""The batch of each step: rounds of generating and scoring until there are enough informative groups.

It is collected as the loop asks for it, or ahead of it by ranks that only generate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter
from torch import Tensor

from rlhf_megatron.algorithms.filters import informative_rows, overlong_penalty
from rlhf_megatron.data.rollout_batch import RolloutBatch, no_rows
from rlhf_megatron.data.row_numbers import RowNumbers, SpreadRows, joined
from rlhf_megatron.data.stream import PromptStream
from rlhf_megatron.errors import UserError
from rlhf_megatron.generation.generated_groups import GeneratedGroups
from rlhf_megatron.generation.generation_metrics import TOKEN_VERSION
from rlhf_megatron.generation.prompt_groups import Group, groups_state
from rlhf_megatron.generation.rollout_worker import RolloutWorker
from rlhf_megatron.generation.score_notes import ScoreNotes
from rlhf_megatron.generation.waiting_rows import OwnTensors, RowsReader, held_tensors, rows_state
from rlhf_megatron.generation.weight_sync import WeightSync
from rlhf_megatron.recipe import RLRecipe
from rlhf_megatron.rollout.engine import Sampling
from rlhf_megatron.runtime.run_context import RunContext
from rlhf_megatron.topology.exchange import from_rank

_METRICS = TypeAdapter(dict[str, float])


class Collected(NamedTuple):
    """A step's rows, and the metrics and tokens (prompts and responses) of all that was generated for it."""

    rows: SpreadRows
    metrics: dict[str, float]
    tokens: int


class Collector:
    """Prompts drawn, answered and scored, their results shaped and filtered as the recipe says."""

    def __init__(
        self, context: RunContext[RLRecipe], worker: RolloutWorker, train: PromptStream, vocabulary: int
    ) -> None:
        """Hold what waits for the next step: surplus groups, and aborted groups; and notes of what was scored.

        ``vocabulary``: how many tokens the actor has, by which a checkpoint's are checked.
        """
        self._context, self._worker, self._train, self._vocabulary = context, worker, train, vocabulary
        self._surplus: SpreadRows | None = None
        self._waiting: list[Group] = []
        self._drawn = 0  # prompts of the run so far
        recipe = context.recipe
        in_a_step = recipe.batch.prompts_per_step * recipe.batch.responses_per_prompt
        most = 4 * in_a_step * (1 + recipe.rollout.updates_in_flight) if recipe.monitor.rollouts.every else 0
        self.notes = ScoreNotes(most, recipe.kept_reward_names)

    def collect(self, step: int) -> Collected:
        """Return the step's rows in whole groups; collective over the team that generates.

        There are ``batch.prompts_per_step`` groups; with dynamic sampling there may be fewer, or none, where
        ``filter_groups.max_num_gen_batches`` is reached. Raises UserError there if the recipe says stop. Rows that
        could not be scored are left out.
        """
        recipe, seconds_before = self._context.recipe, self._context.seconds("generate")
        settings, wanted = recipe.algorithm.filter_groups, recipe.batch.prompts_per_step
        kept = [self._surplus] if self._surplus else []
        carried = _groups(kept)
        generated: list[SpreadRows] = []
        sampled: list[GeneratedGroups] = []
        greedy: list[GeneratedGroups] = []
        rounds = settings.max_num_gen_batches if settings.enable else 1  # 0: as many as it takes
        while _groups(kept) < wanted and not (rounds and len(generated) == rounds):
            count = settings.prompts_per_round or wanted if settings.enable else wanted
            rows = self._one_round(step, count, sum(len(each.asked) for each in sampled), sampled, greedy)
            generated.append(rows)
            kept.append(self._usable(rows))
        if settings.enable and settings.when_exhausted == "stop" and _groups(kept) < wanted:
            raise UserError(self._exhausted(step, _groups(kept)))
        rows, surplus = _cut(kept, wanted)
        self._surplus = surplus if settings.keep_surplus and surplus.rows else None
        metrics = self._metrics(generated, sampled + greedy, seconds_before) | self._worker.scoring_metrics(sampled)
        if settings.enable:
            informative = _groups(kept) - carried
            metrics |= {
                "rollout/rounds": float(len(generated)),
                "rollout/groups_carried_over": float(carried),
                "rollout/groups_dropped": float(_groups(generated) - informative),
                "rollout/groups_surplus": float(_groups([surplus])),
                "rollout/groups": float(_groups([rows])),
            }
        # Where the data stand, and how long it took, which only ranks that draw prompts know.
        metrics |= self._train.metrics() | self._train.take_wait()
        return Collected(rows, metrics, sum(each.tokens for each in sampled + greedy))

    @property
    def no_rows(self) -> RolloutBatch:
        """A batch with the fields of those of a step."""
        return no_rows(self._worker.choices, self._worker.has_turn_rewards)

    def state(self) -> dict[str, Any]:
        """Return the groups that wait for the next step, for a checkpoint, without tokens of responses."""
        self._worker.drop_paused()
        waiting = groups_state(self._waiting)
        return {
            "surplus": rows_state(self._surplus),
            "waiting": waiting | {"holders": torch.tensor(self._worker.holders)} if waiting else {},
            "drawn": self._drawn,
        }

    def own_tensors(self) -> dict[str, Tensor]:
        """Return the tokens of groups that wait, of those that this rank holds."""
        begun = self._worker.begun_tensors(self._waiting)
        return held_tensors(self._surplus, "surplus") | {f"waiting/{name}": value for name, value in begun.items()}

    def load(self, state: dict[str, Any], own: OwnTensors) -> None:
        """Resume where ``state`` and the ``own_tensors`` of the ranks of then were taken."""
        self._surplus = self.restored_rows(state["surplus"], own, "surplus")
        self._waiting = self._worker.restored_groups(state["waiting"], own, self._train.read, self._vocabulary)
        # One of before numbers were kept has given them by place.
        self._drawn = state.get("drawn", len(self._waiting))

    def restored_rows(self, state: dict[str, Any], own: OwnTensors, prefix: str) -> SpreadRows | None:
        """Return the rows of a ``rows_state``, spread over the ranks that generate; None for none, and where their
        rewards are not what the recipe asks for now."""
        if not state:
            return None
        context, settings = self._context, self._context.recipe.algorithm
        reader = RowsReader(
            context.generators.ranks,
            context.rank,
            self._vocabulary,
            self._worker.choices,
            self._worker.has_turn_rewards,
        )
        rows = reader.read(state, own, prefix)
        saved = (rows.numbers.scores is not None, rows.numbers.baseline_rewards is not None)
        if saved == (settings.overlong_buffer.enable, settings.advantage == "remax"):
            return rows
        context.say(
            f"{rows.groups} groups of the step before are dropped: their rewards are of another "
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
    ) -> SpreadRows:
        """Return ``prompts`` more groups, scored.

        ``sampled`` gets what was generated for them, ``greedy`` what ReMax compares it with.

        With over-sampling more are started, and with ``partial: resume`` as many as may be in flight; those that wait
        are the first, and what is left of them waits again.
        """
        recipe, sampling = self._context.recipe, self._worker.sampling
        responses = recipe.batch.responses_per_prompt
        started = self._started(prompts)
        groups, self._waiting = self._waiting[:started], self._waiting[started:]
        groups += self._draw(started - len(groups))
        wanted = prompts if started > prompts else None  # always, where groups may be in flight
        rows = self._answers(groups, responses, sampling, step, sampled, first_group * responses, wanted)
        self._waiting += sampled[-1].left
        if recipe.algorithm.advantage == "remax":
            sampling = sampling.greedy()
            answered, group_of_row = rows.numbers.group_id.unique(return_inverse=True)
            asked = [Group(groups[index].drawn) for index in answered.tolist()]
            baselines = self._answers(asked, 1, sampling, step, greedy).numbers.rewards
            rows = rows.with_fields(baseline_rewards=baselines[group_of_row])
        return rows

    def _started(self, prompts: int) -> int:
        """Return the number of groups that a round begins with, those that wait included, if it is to give so many."""
        section = self._context.recipe.rollout
        started = math.ceil(round(prompts * section.groups_begun, 6))  # 1.1 times 10 are 11
        return max(started, len(self._waiting)) if section.updates_in_flight else started

    def _draw(self, count: int) -> list[Group]:
        """Return new groups; where shares are fixed and groups go on after an update, each with its replica."""
        if count <= 0:
            return []
        section, first = self._context.recipe.rollout, self._drawn
        self._drawn += count
        has_home = section.updates_in_flight and section.scheduling == "static"
        replicas = self._worker.replicas if has_home else None
        return [
            Group(prompt, number=number, home=number % replicas if replicas else None)
            for number, prompt in enumerate(self._train.draw(count), start=first)
        ]

    def _answers(
        self,
        groups: Sequence[Group],
        responses: int,
        sampling: Sampling,
        step: int,
        calls: list[GeneratedGroups],
        first_row: int = 0,
        wanted: int | None = None,
    ) -> SpreadRows:
        """Return ``responses`` to each prompt, scored, less the overlong penalty; ``calls`` gets one more."""
        context, recipe = self._context, self._context.recipe
        with context.phase("generate"):
            calls.append(self._worker.generate(groups, responses, sampling, step, first_row, wanted))
        with context.phase("score"):
            rows = self._worker.gather(calls[-1])
            self.notes.add(calls[-1])
        assert rows is not None
        buffer = recipe.algorithm.overlong_buffer
        if buffer.enable:
            limit = recipe.rollout.max_response_length
            numbers = rows.numbers
            penalty = overlong_penalty(numbers.completion_lengths, limit, buffer.len, buffer.penalty_factor)
            rows = rows.with_fields(scores=numbers.rewards, rewards=numbers.rewards + penalty)
        return rows

    def _usable(self, rows: SpreadRows) -> SpreadRows:
        """Return the rows that could be scored, and with dynamic sampling of these the informative groups."""
        known = rows.numbers.rewards.isfinite()
        if rows.numbers.baseline_rewards is not None:
            known &= rows.numbers.baseline_rewards.isfinite()
        rows = rows.select(known)
        settings, numbers = self._context.recipe.algorithm.filter_groups, rows.numbers
        if not settings.enable:
            return rows
        values = numbers.rewards if settings.metric == "reward" or numbers.scores is None else numbers.scores
        return rows.select(informative_rows(values, numbers.group_id))

    def _exhausted(self, step: int, groups: int) -> str:
        recipe = self._context.recipe
        return (
            f"step {step}: {groups} of {recipe.batch.prompts_per_step} groups teach something after "
            f"algorithm.filter_groups.max_num_gen_batches={recipe.algorithm.filter_groups.max_num_gen_batches} rounds; "
            "raise it, set when_exhausted: train, or choose data that is neither too easy nor too hard"
        )

    def _metrics(
        self, generated: list[SpreadRows], calls: list[GeneratedGroups], seconds_before: float
    ) -> dict[str, float]:
        """Return metrics of all generated trajectories, also of those that are not trained on.

        ``seconds_before``: for which this step had generated for another.
        """
        if not generated:
            return {}
        batch, context = _joined(generated).numbers, self._context
        lengths = batch.response_lengths.double()
        spoken = batch.weight_version[lengths > 0].double()  # a row whose environment did not begin has none
        replicas = self._worker.generation_metrics(calls)
        tokens = replicas["rollout/sampled_tokens"]
        metrics = replicas | {
            "rollout/groups_waiting": float(len(self._waiting)),
            "rollout/throughput_tokens_per_sec": tokens / max(context.seconds("generate") - seconds_before, 1e-9),
            "rollout/response_length_mean": float(lengths.mean()),
            "rollout/response_length_max": float(lengths.max()),
            "rollout/truncated_fraction": float(batch.truncated.double().mean()),
            "rollout/weight_version": float(spoken.mean()) if len(spoken) else 0.0,
            "reward/latency_ms": context.seconds("score") * 1000.0,
        }
        scored = batch.select(batch.rewards.isfinite()).of_trajectories()
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
    """Source of each step's batch on every rank. ``prepare`` collects the next one where ranks have nothing to
    learn."""

    def __init__(self, context: RunContext[RLRecipe], collector: Collector, weight_sync: WeightSync) -> None:
        """Begin with nothing collected."""
        self._context, self._collector, self._weight_sync = context, collector, weight_sync
        self._team = context.generators
        self._ahead: Collected | None = None

    def take(self, step: int, skips_data: bool = False) -> Collected:
        """Return the step's rows, of which every rank knows the numbers; collective over the world.

        ``skips_data``: the step's data are not those that follow, so what was collected ahead is dropped.
        ``rollout/staleness``: updates of the actor since the oldest token of a row was sampled;
        ``rollout/token_staleness``: since a token was.
        """
        if skips_data:
            self._ahead = None
        if self._team.here and self._ahead is None:
            self._ahead = self._collector.collect(step)
        collected, self._ahead = self._ahead, None
        if self._team.group is not None:
            with self._context.waiting():
                collected = self._told(collected)
        assert collected is not None
        numbers = collected.rows.numbers
        metrics = dict(collected.metrics)
        of_tokens = metrics.pop(TOKEN_VERSION, None)
        if numbers.rows:
            metrics |= self._staleness(numbers)
            if of_tokens is not None:
                metrics["rollout/token_staleness_mean"] = self._weight_sync.version - of_tokens
        return collected._replace(metrics=metrics)

    def _told(self, collected: Collected | None) -> Collected:
        """Return rows that the team that generates has collected, on every rank: the tokens stay where they are."""
        rows = collected.rows if collected else None
        known = (rows.numbers, collected.metrics, collected.tokens) if rows and collected else None
        told = from_rank(known, self._team.first)
        assert told is not None
        numbers, metrics, tokens = told
        if rows is None:
            rows = SpreadRows(numbers, self._collector.no_rows, self._context.rank)
        return Collected(rows, metrics, tokens)

    @property
    def notes(self) -> ScoreNotes:
        """Numbers of the rows that this rank's replica has generated."""
        return self._collector.notes

    def prepare(self, step: int) -> None:
        """Collect the batch of a later step on the ranks that generate while others learn; collective over these."""
        if self._team.here and step <= self._context.recipe.steps:
            self._ahead = self._collector.collect(step)

    def state(self) -> dict[str, Any]:
        """Return what has been collected and what waits, for a checkpoint; see ``Collector.state``."""
        ahead, saved = self._ahead, {}
        if ahead:
            saved = {"batch": rows_state(ahead.rows), "metrics": ahead.metrics, "tokens": ahead.tokens}
        return self._collector.state() | {"ahead": saved}

    def own_tensors(self) -> dict[str, Tensor]:
        """Return the tokens that this rank holds of what ``state`` has the numbers of."""
        return self._collector.own_tensors() | held_tensors(self._ahead.rows if self._ahead else None, "ahead")

    def load(self, state: dict[str, Any], own: OwnTensors) -> None:
        """Resume where ``state`` and the ``own_tensors`` of the ranks of then were taken."""
        self._collector.load(state, own)
        ahead = state.get("ahead")
        self._ahead = None
        if not ahead:
            return
        if not self._context.recipe.rollout_is_ahead:
            self._context.say("the batch that was collected ahead is dropped: rollout.steps_ahead is 0 now")
            return
        rows = self._collector.restored_rows(ahead["batch"], own, "ahead")
        metrics = _METRICS.validate_python(ahead["metrics"])
        self._ahead = Collected(rows, metrics, int(ahead["tokens"])) if rows and self._team.here else None

    def _staleness(self, numbers: RowNumbers) -> dict[str, float]:
        updates = (self._weight_sync.version - numbers.weight_version).double()
        return {"rollout/staleness_mean": float(updates.mean()), "rollout/staleness_max": float(updates.max())}


def _groups(parts: Sequence[SpreadRows]) -> int:
    return sum(part.groups for part in parts)


def _joined(parts: Sequence[SpreadRows]) -> SpreadRows:
    """Return the rows of all parts with their groups and trajectories renumbered from 0 in their order."""
    groups, trajectories, number, begun = [], [], 0, 0
    for part in parts:
        ids = part.numbers.group_id.unique_consecutive(return_inverse=True)[1] + number
        groups.append(ids)
        number += part.groups
        trajectories.append(part.numbers.trajectories + begun)
        begun = int(trajectories[-1].max()) + 1 if part.rows else begun
    several = any(part.numbers.trajectory_id is not None for part in parts)
    whole = joined([part.with_fields(trajectory_id=None) for part in parts])
    ids = torch.cat(trajectories) if several else None
    return whole.with_fields(row_id=torch.arange(whole.rows), group_id=torch.cat(groups), trajectory_id=ids)


def _cut(parts: Sequence[SpreadRows], groups: int) -> tuple[SpreadRows, SpreadRows]:
    """Return the first ``groups`` groups of all parts, renumbered, and the rest."""
    whole = _joined(parts)
    return whole.select(whole.numbers.group_id < groups), whole.select(whole.numbers.group_id >= groups)
