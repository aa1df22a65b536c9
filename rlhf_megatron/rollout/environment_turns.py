"""Rows that wait for an environment: asked by the rank that leads the replica, answered alike on all of its ranks."""

from __future__ import annotations

import concurrent.futures
import time
from concurrent.futures import Future
from typing import Any, NamedTuple

from rlhf_megatron.rollout.engine import Completion, Environment, EnvironmentReply
from rlhf_megatron.rollout.generation_clock import GenerationClock
from rlhf_megatron.rollout.lockstep import ReplicaRanks

_SECONDS_TO_WAIT = 1.0  # for answers, at a time


class Answer(NamedTuple):
    """An environment's reply to a row so far."""

    number: int
    completion: Completion
    reply: EnvironmentReply


class EnvironmentTurns:
    """Completions that an environment is answering, by the number of their request.

    Attributes:
        is_blocked: a repeatable environment has not answered all of them, and the engine waits for that.
    """

    def __init__(self, environment: Environment | None, ranks: ReplicaRanks, clock: GenerationClock) -> None:
        """Start with none; without an ``environment`` none comes. The ``clock`` learns how long they wait."""
        self._environment, self._ranks, self._clock = environment, ranks, clock
        self._pending: dict[int, Completion] = {}
        self._futures: dict[int, Future[Any]] = {}  # on the leader
        self._replies: dict[int, EnvironmentReply] = {}  # of a repeatable environment, until all have come
        self.is_blocked = False

    def __len__(self) -> int:
        return len(self._pending)

    def take(self, number: int, completion: Completion) -> bool:
        """Ask for an answer to what a row says so far; return whether there may be one."""
        if self._environment is None or not self._environment.goes_on(completion):
            return False
        self._ask(self._environment, number, completion)
        return True

    def open(self, number: int, row_id: int) -> bool:
        """Ask how a row begins; return whether the environment has a say in that."""
        if self._environment is None or not self._environment.opens:
            return False
        self._ask(self._environment, number, Completion(row_id, [], [], "stop", []))
        return True

    def _ask(self, environment: Environment, number: int, completion: Completion) -> None:
        self._pending[number] = completion
        if self._ranks.is_leader:
            self._futures[number] = environment.ask(completion)

    @property
    def opening(self) -> int:
        """Number of rows that wait for their beginning."""
        return sum(not completion.token_ids for completion in self._pending.values())

    @property
    def tokens(self) -> list[int]:
        """Tokens of each row that waits between two turns."""
        return [len(completion.token_ids) for completion in self._pending.values() if completion.token_ids]

    def has_news(self) -> bool:
        """Return whether an answer can be taken at once: only a replica of one rank sees that without its peers."""
        if self._environment is None or self._environment.repeatable or self._ranks.group is not None:
            return False
        return any(future.done() for future in self._futures.values())

    def receive(self, wait: bool) -> list[Answer]:
        """Return the answers that have come, the same on all ranks of the replica.

        With ``wait``, since nothing else is to be done, it takes a second for the first of them. A repeatable
        environment gives all answers at once, and until then none.
        """
        replies = self._ranks.broadcast_object(self._receive(wait) if self._ranks.is_leader else None)
        self.is_blocked = replies is None
        self._clock.count_answers(len(replies or ()))
        return [Answer(number, self._pending.pop(number), EnvironmentReply(*reply)) for number, reply in replies or ()]

    def _receive(self, wait: bool) -> list[tuple[int, EnvironmentReply]] | None:
        environment, futures = self._environment, self._futures
        assert environment is not None, "nothing is pending without one"
        if environment.repeatable or wait:
            until = concurrent.futures.ALL_COMPLETED if environment.repeatable else concurrent.futures.FIRST_COMPLETED
            began = time.perf_counter()
            concurrent.futures.wait(futures.values(), _SECONDS_TO_WAIT, until)
            self._clock.count_wait(time.perf_counter() - began, len(futures))
        done = sorted(number for number, future in futures.items() if future.done())
        if environment.repeatable and len(done) < len(futures):
            return None
        for number in done:
            reply = environment.read(self._pending[number], futures.pop(number).result())
            if isinstance(reply, Future):
                futures[number] = reply
            else:
                self._replies[number] = reply
        if environment.repeatable and futures:
            return None
        replies, self._replies = self._replies, {}
        return sorted(replies.items())

    def abort(self) -> dict[int, Completion]:
        """Stop waiting; return the completions that no answer came to."""
        for future in self._futures.values():
            future.cancel()
        pending, self._pending, self._futures = self._pending, {}, {}
        return pending
