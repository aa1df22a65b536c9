"""The batch of each step as the loop asks for it: collected then, or ahead of it by ranks that only generate."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from rlhf_megatron.data.rollout_batch import RolloutBatch
from rlhf_megatron.generation.collection import Collected, Collector, batch_from_state, batch_state
from rlhf_megatron.generation.rollout_worker import Rollouts
from rlhf_megatron.loops.session import Session
from rlhf_megatron.topology.exchange import from_rank

_METRICS = TypeAdapter(dict[str, float])


class BatchSource:
    """Hands a step its batch on every rank. ``prepare`` collects the next one where ranks have nothing to learn."""

    def __init__(self, session: Session, rollouts: Rollouts, collector: Collector) -> None:
        """Nothing is collected yet."""
        self._session, self._rollouts, self._collector = session, rollouts, collector
        self._team = session.generators
        self._ahead: Collected | None = None

    def take(self, step: int) -> Collected:
        """The step's batch, the same on every rank; collective over the world.

        ``rollout/staleness``: updates of the actor since the tokens of a row were sampled.
        """
        if self._session.passes_over_data:  # as what was collected ahead has to be, too
            self._ahead = None
        if self._team.here and self._ahead is None:
            self._ahead = self._collected(step)
        found, self._ahead = self._ahead, None
        if self._team.group is not None:
            with self._session.waiting():
                found = from_rank(found, self._team.first)
        assert found is not None
        batch = found.batch
        return found._replace(metrics=found.metrics | (self._staleness(batch) if batch.rows else {}))

    def prepare(self, step: int) -> None:
        """Collects the batch of a later step on the ranks that generate while others learn; collective over these."""
        if self._team.here and step <= self._session.recipe.steps:
            self._ahead = self._collected(step)

    def state(self) -> dict[str, Any]:
        """What has been collected and what waits, for a checkpoint; of a rank that generates."""
        ahead = self._ahead
        of_ahead = (
            {"batch": batch_state(ahead.batch), "metrics": ahead.metrics, "tokens": ahead.tokens} if ahead else {}
        )
        return self._collector.state() | {"ahead": of_ahead}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on where ``state`` was taken."""
        self._collector.load(state)
        ahead = state.get("ahead")
        self._ahead = None
        if not ahead:
            return
        if not self._session.recipe.rollout_is_ahead:
            self._session.say("the batch that was collected ahead is dropped: rollout.steps_ahead is 0 now")
            return
        batch = batch_from_state(self._session, ahead["batch"])
        metrics = _METRICS.validate_python(ahead["metrics"])
        self._ahead = Collected(batch, metrics, int(ahead["tokens"])) if batch else None

    def _collected(self, step: int) -> Collected:
        """With where the data stand, which only ranks that draw prompts know."""
        found = self._collector.collect(step)
        return found._replace(metrics=found.metrics | self._session.train.metrics())

    def _staleness(self, batch: RolloutBatch) -> dict[str, float]:
        updates = (self._rollouts.version - batch.weight_version).double()
        return {"rollout/staleness_mean": float(updates.mean()), "rollout/staleness_max": float(updates.max())}
