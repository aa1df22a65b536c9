"""The batch of each step as the loop asks for it: collected then, or ahead of it by ranks that only generate."""

from __future__ import annotations

from typing import Any

from rlhf_megatron.data.rollout_batch import RolloutBatch
from rlhf_megatron.generation.collection import Collected, Collector, batch_from_state, batch_state
from rlhf_megatron.generation.weight_sync import WeightSync
from rlhf_megatron.runtime.run_context import RunContext
from rlhf_megatron.topology.exchange import from_rank


class BatchSource:
    """Hands a step its batch on every rank. ``prepare`` collects the next one where ranks have nothing to learn."""

    def __init__(self, context: RunContext, collector: Collector, weight_sync: WeightSync) -> None:
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
        if not ahead:
            return
        if not self._context.recipe.rollout_is_ahead:
            self._context.say("the batch that was collected ahead is dropped: rollout.steps_ahead is 0 now")
            return
        batch = batch_from_state(self._context, ahead["batch"])
        self._ahead = Collected(batch, ahead["metrics"], ahead["tokens"]) if batch else None

    def _staleness(self, batch: RolloutBatch) -> dict[str, float]:
        updates = (self._weight_sync.version - batch.weight_version).double()
        return {"rollout/staleness_mean": float(updates.mean()), "rollout/staleness_max": float(updates.max())}
