"""A user's agent on the rank that leads a replica: its worker processes, the endpoint that they ask, and outcomes."""

from __future__ import annotations

import concurrent.futures
from concurrent.futures import Future
from typing import Any

from rlhf_megatron.agents.endpoint import Endpoint
from rlhf_megatron.agents.trajectory import AgentTrajectory, Ended, Event
from rlhf_megatron.errors import RolloutError
from rlhf_megatron.recipe import AgentSection
from rlhf_megatron.rewards import worker
from rlhf_megatron.rewards.answers import Outcome
from rlhf_megatron.rewards.pool import Session, WorkerPool, bytes_of
from rlhf_megatron.rewards.sample_judges import unloadable
from rlhf_megatron.rewards.user_agent import INTERFACE
from rlhf_megatron.rewards.worker_process import DIED
from rlhf_megatron.rollout.engine import Completion

# One that has failed this often and has never once returned does not work.
HOPELESS_FAILURES = 8
_SECONDS_TO_CLOSE = 5.0


class Play:
    """One trajectory: a program that runs in a process of its own, and its requests."""

    def __init__(
        self,
        endpoint: Endpoint,
        session: Session,
        job: worker.Job,
        trajectory: AgentTrajectory,
        closing: set[Future[None]],
    ) -> None:
        """Start the program."""
        self.trajectory, self._endpoint, self._session, self._job = trajectory, endpoint, session, job
        self._closing, self._key = closing, endpoint.open(trajectory)
        asked = {"base_url": endpoint.base_url, "api_key": self._key, "most": 0}
        session.submit(job | asked).add_done_callback(self._ended)

    def _ended(self, future: Future[Outcome]) -> None:
        error = future.exception()
        outcome = Outcome(DIED, message=f"{type(error).__name__}: {error}") if error else future.result()
        self._endpoint.call(self.trajectory.end, outcome)

    def next_event(self, completion: Completion) -> Future[Event]:
        """Deliver the last turn of a completion, if it has one; return what the program does next."""
        future: Future[Event] = Future()
        self._endpoint.call(self.trajectory.expect, completion, future)
        return future

    def close(self) -> None:
        """End it; requests from now on are refused, so that a program that goes on ends soon."""
        self._endpoint.close_trajectory(self._key)
        self._endpoint.call(self.trajectory.end, Outcome(DIED, message="the trajectory was given up"))
        closing = self._session.end(self._job | {"load_only": True})
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


class AgentProgram:
    """A user's agent, for one rank; its processes and the endpoint end with the rank.

    Attributes:
        key: of the recipe, that names it.
        specification: the file and the function.
    """

    key = INTERFACE.key

    def __init__(self, section: AgentSection, needs_reward: bool) -> None:
        """Load it and start the endpoint. ``needs_reward``: nothing else gives one.

        Raises:
            RolloutError: it cannot be loaded.
        """
        self.specification, self._needs_reward = section.function, needs_reward
        self._job: worker.Job = {"kind": worker.AGENT, "function": section.function}
        self._pool = WorkerPool(1, section.timeout_seconds, memory_bytes=bytes_of(section.memory_limit_gb))
        self._closing = set[Future[None]]()
        outcome = self._pool.submit(self._job | {"load_only": True}).result()
        if outcome.state != worker.DONE:
            self._pool.close()
            raise RolloutError(unloadable(self.key, section.function, outcome))
        self._endpoint = Endpoint()
        self._returned = self._failures = 0

    def begin(self, row: dict[str, Any], trajectory: AgentTrajectory) -> Play:
        """Start it on a row, which has prompt, data_source, ground_truth, extra_info, seed, and attempt."""
        job = self._job | {"row": row}
        return Play(self._endpoint, self._pool.session(), job, trajectory, self._closing)

    def reward_of(self, ended: Ended) -> float | str:
        """Return the reward of a trajectory that has ended, or why there is none and it is to be left out.

        A program that fails behind a refusal for want of turns or tokens has 0: the model was too long, and nothing
        broke. Raises RolloutError where it has only ever failed.
        """
        outcome = ended.outcome
        if outcome.state == worker.DONE and (outcome.ends or not self._needs_reward):
            self._returned += 1
            return outcome.score
        if outcome.state == worker.UNUSABLE:
            raise RolloutError(f"{self.key}: {outcome.message}")
        if ended.refused and outcome.state == worker.FAILED:
            return 0.0
        if outcome.state == worker.DONE:
            why = "it returned None, and reward.rule is none; return a number"
        else:
            why = outcome.message or f"it took more than rollout.agent.timeout_seconds ({outcome.state})"
        self._failures += 1
        if not self._returned and self._failures >= HOPELESS_FAILURES:
            raise RolloutError(f"{self.key}: it has failed {self._failures} times and never returned: {why}")
        return why

    def close(self) -> None:
        """End its processes and the endpoint, after a while for those that are closing."""
        concurrent.futures.wait(self._closing.copy(), _SECONDS_TO_CLOSE)
        self._pool.close()
        self._endpoint.close()
