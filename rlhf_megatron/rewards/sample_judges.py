"""Judges, which give a sample its score: a rule, a user's function, or a service; each behind the same few calls.

Not here: weights, and what a sample costs that could not be scored (score.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

from rlhf_megatron.errors import RewardError
from rlhf_megatron.recipe import RewardCodeSection, RewardSource
from rlhf_megatron.rewards import worker
from rlhf_megatron.rewards.answers import Outcome
from rlhf_megatron.rewards.pool import WorkerPool
from rlhf_megatron.rewards.rules import RULES, ScoreItem, rule_of, unknown_source
from rlhf_megatron.rewards.worker_process import DIED, LOAD_SECONDS


class Judge(Protocol):
    """Judge that gives scores to samples, some time after they were submitted.

    Attributes:
        name: for errors.
        is_rule: whether a failure is the fault of the text or row alone.
    """

    name: str
    is_rule: bool

    def submit(self, items: Sequence[ScoreItem]) -> list[Future[Outcome]]:
        """Return what will hold the outcomes, in the same order; return at once."""
        ...

    def check_sources(self, data_sources: Iterable[str]) -> None:
        """Raise RewardError for the first data source that cannot be scored."""
        ...


class RuleJudge:
    """A built-in rule, or the rule of each row's data source. Quick ones are settled in this process."""

    name = ""
    is_rule = True

    def __init__(self, source: RewardSource, pool: WorkerPool, code: RewardCodeSection) -> None:
        """Judge by ``source.rule``; the pool is shared with other rules."""
        self._source, self._pool, self._code = source, pool, code.model_dump()
        self._has_sandbox = False

    def check_sources(self, data_sources: Iterable[str]) -> None:
        """See Judge."""
        if "code" in {self._rule(data_source) for data_source in data_sources} and not self._has_sandbox:
            self._check_sandbox()

    def _check_sandbox(self) -> None:
        outcome = self._pool.submit({"kind": "code", "code": self._code, "load_only": True}).result()
        if outcome.state != worker.DONE:
            raise RewardError(f"rule code: {outcome.message or outcome.state}")
        self._has_sandbox = True

    def submit(self, items: Sequence[ScoreItem]) -> list[Future[Outcome]]:
        """See Judge. Raises RewardError for a data source without a rule, before anything is scored."""
        self.check_sources(dict.fromkeys(item.data_source for item in items))
        return [self._submit_one(self._rule(item.data_source), item) for item in items]

    def _rule(self, data_source: str) -> str:
        name = rule_of(data_source) if self._source.rule == "data_source" else self._source.rule
        if name is None:
            raise RewardError(unknown_source(data_source))
        return name

    def _submit_one(self, rule: str, item: ScoreItem) -> Future[Outcome]:
        quick = RULES[rule].quick
        try:
            score = quick(item, self._source) if quick else None
        except ValueError as error:
            message = f"{error}; correct the row, or set reward.function"
            return settled(Outcome(worker.UNUSABLE, message=message))
        if score is not None:
            return settled(Outcome(worker.DONE, score))
        settings = {"code": self._code} if rule == "code" else {"pattern": self._source.pattern}
        return self._pool.submit({"kind": rule, **settings, **fields_of(item)})


class FunctionJudge:
    """A user's function, in worker processes of its own."""

    is_rule = False

    def __init__(self, function: str, pool: WorkerPool, concurrency: int) -> None:
        """Load the function in a worker of the pool, which is its own; ``concurrency`` calls are awaited at a time.

        Raises:
            RewardError: it cannot be loaded.
        """
        self.name = f"reward.function {function}"
        self._function = function
        self._pool = pool
        job = {"kind": worker.USER_FUNCTION, "function": function, "load_only": True}
        outcome = self._pool.submit(job).result()
        if outcome.state != worker.DONE:
            raise RewardError(unloadable("reward.function", function, outcome))
        self._pool.jobs_at_a_time = concurrency if outcome.awaited else 1

    def check_sources(self, data_sources: Iterable[str]) -> None:
        """See Judge; it is given every row."""

    def submit(self, items: Sequence[ScoreItem]) -> list[Future[Outcome]]:
        """See Judge."""
        kind = {"kind": worker.USER_FUNCTION, "function": self._function}
        return [self._pool.submit({**kind, **fields_of(item)}) for item in items]


def unloadable(key: str, function: str, outcome: Outcome) -> str:
    """Return why a function could not be loaded, as one line that begins with the recipe's key."""
    if outcome.state == worker.TIMED_OUT:
        return f"{key}: importing {function} took longer than {LOAD_SECONDS:g} s"
    if outcome.state == DIED:
        return f"{key}: importing {function} ended its process: {outcome.message}"
    return f"{key}: {outcome.message}"


def fields_of(item: ScoreItem) -> worker.Job:
    """Return the part of a job that describes the sample."""
    return {
        "data_source": item.data_source,
        "solution": item.solution,
        "ground_truth": item.ground_truth,
        "extra_info": item.extra_info,
    }


def settled(outcome: Outcome) -> Future[Outcome]:
    """Return a future that has its outcome."""
    future: Future[Outcome] = Future()
    future.set_result(outcome)
    return future
