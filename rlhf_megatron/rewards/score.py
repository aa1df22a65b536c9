"""Rewards of responses: the weighted sum of what the recipe's judges say, and what a sample is worth that they cannot
score.

Not here: how a judge finds its score (sample_judges.py, service.py) and the rules (rules.py). Rewards are numbers on
the host; advantages are made of them in algorithms/.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType

from rlhf_megatron.errors import RewardError, TransientRewardError
from rlhf_megatron.recipe import RewardPartSection, RewardSection, RewardSource
from rlhf_megatron.rewards import worker
from rlhf_megatron.rewards.answers import Outcome
from rlhf_megatron.rewards.pool import WorkerPool, bytes_of
from rlhf_megatron.rewards.rules import ScoreItem, rule_of
from rlhf_megatron.rewards.sample_judges import FunctionJudge, Judge, RuleJudge
from rlhf_megatron.rewards.service import ServiceJudge
from rlhf_megatron.rewards.user_function import LARGEST_SCORE, RewardFunction
from rlhf_megatron.rewards.worker_process import DIED

__all__ = [
    "Pending",
    "RewardError",
    "RewardFunction",
    "Score",
    "ScoreItem",
    "Scorer",
    "reward_metrics",
    "reward_totals",
    "rule_of",
]

# SymPy on hostile text takes all memory that it gets long before the time limit.
RULES_ADDRESS_SPACE_BYTES = 4 * 2**30
# A function or service that has failed this often and never once given a score does not work.
HOPELESS_FAILURES = 8


@dataclass(frozen=True)
class Score:
    """The score of one response.

    Attributes:
        value: the reward, the weighted sum of the parts; NaN for a sample that must be left out of the loss.
        parts: each part's own score, before its weight, in the recipe's order (one where there is a single reward);
            NaN where it failed and the sample is left out.
        timed_out: a part ran out of time.
        failed: a part could not be scored for another reason.
    """

    value: float
    parts: tuple[float, ...]
    timed_out: bool = False
    failed: bool = False


class _Part:
    """One judge with its weight, and how it has done so far."""

    def __init__(self, judge: Judge, weight: float) -> None:
        self.judge, self.weight = judge, weight
        self.returned = self.failures = 0


class Pending:
    """Samples that are being scored."""

    def __init__(self, scorer: Scorer, items: Sequence[ScoreItem], futures: list[list[Future[Outcome]]]) -> None:
        """Set up; ``futures`` by part, then by item."""
        self._scorer, self._items, self._futures = scorer, items, futures

    def done(self) -> bool:
        """Return whether ``result`` would return at once."""
        return all(future.done() for future in itertools.chain(*self._futures))

    def result(self) -> list[Score]:
        """Wait, and return one score for each item in their order.

        Raises:
            RewardError: see ``Scorer.score``. The samples that are left are given up.
        """
        try:
            return [
                self._scorer.settle(item, [futures[index].result() for futures in self._futures])
                for index, item in enumerate(self._items)
            ]
        except BaseException:
            for future in itertools.chain(*self._futures):
                future.cancel()
            raise


class Scorer:
    """Scorer of responses, for one rank. A context manager; its processes and threads also end with the rank.

    A sample that a built-in rule cannot judge in time (or in memory) is worth 0.0, since its own text is to blame. What
    a function or service that fails costs is the recipe's choice: reward.on_failure.

    Attributes:
        timeouts: samples so far that ran out of time.
        failures: samples so far that could not be scored for other reasons.
    """

    def __init__(self, section: RewardSection) -> None:
        """Make the scorer; functions are loaded.

        Raises:
            RewardError: a function cannot be loaded, or a service's authentication is missing.
        """
        self._section = section
        self._pools: list[WorkerPool] = []
        self._resources = contextlib.ExitStack()
        self._rules = self._pool(address_space_bytes=RULES_ADDRESS_SPACE_BYTES)
        self._parts: list[_Part] = []
        self.timeouts = 0
        self.failures = 0
        try:
            sources: Sequence[RewardSource] = section.parts or ([] if section.rule == "none" else [section])
            for source in sources:
                weight = source.weight if isinstance(source, RewardPartSection) else 1.0
                self._parts.append(_Part(self._judge(source), weight))
        except BaseException:
            self.close()
            raise

    def check_sources(self, data_sources: Iterable[str]) -> None:
        """Check that every data source can be scored; for the start of a run, before anything is generated.

        Raises:
            RewardError: there is neither a rule for a data source nor a function or service.
        """
        names = list(data_sources)
        for part in self._parts:
            part.judge.check_sources(names)

    def submit(self, items: Sequence[ScoreItem]) -> Pending:
        """Begin to score samples and return at once; workers and services go on while the caller does other things.

        Raises:
            RewardError: an unknown data source.
        """
        return Pending(self, items, [part.judge.submit(items) for part in self._parts])

    def score(self, items: Sequence[ScoreItem]) -> list[float]:
        """Return one reward per item, in the same order; NaN for one that must be left out of the loss.

        Raises:
            RewardError: an unknown data source, a ground truth that its rule cannot read, a function or service that
                failed where the recipe says stop, or one that has never worked; the message names the sample.
        """
        return [score.value for score in self.submit(items).result()]

    def settle(self, item: ScoreItem, outcomes: Sequence[Outcome]) -> Score:
        """Return the score of one sample from the outcome of each part, or raise where the run must stop."""
        parts = tuple(self._value(part, item, outcome) for part, outcome in zip(self._parts, outcomes, strict=True))
        value = sum((part.weight * score for part, score in zip(self._parts, parts, strict=True)), 0.0)
        timed_out = any(outcome.state == worker.TIMED_OUT for outcome in outcomes)
        failed = any(outcome.state not in (worker.DONE, worker.TIMED_OUT) for outcome in outcomes)
        if not abs(value) <= LARGEST_SCORE and not any(map(math.isnan, parts)):
            if self._section.on_failure == "stop":
                raise RewardError(f"{_sample(item)}: its parts add up to {value:g}; a reward must be a finite float32")
            value, failed = self._worth_of_failure(), True
        self.timeouts += timed_out
        self.failures += failed
        return Score(value, parts, timed_out, failed)

    def close(self) -> None:
        """End the worker processes and threads; samples that are left become failures."""
        self._resources.close()

    def process_ids(self) -> list[int]:
        """Return the ids of the worker processes that are running."""
        return [process_id for pool in self._pools for process_id in pool.process_ids()]

    def __enter__(self) -> Scorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _pool(self, address_space_bytes: int = 0, memory_bytes: int = 0) -> WorkerPool:
        section, limits = self._section, (address_space_bytes, memory_bytes)
        self._pools.append(WorkerPool(section.workers, section.timeout_seconds, *limits))
        self._resources.callback(self._pools[-1].close)
        return self._pools[-1]

    def _judge(self, source: RewardSource) -> Judge:
        section = self._section
        if source.function is not None:
            pool = self._pool(memory_bytes=bytes_of(section.memory_limit_gb))
            return FunctionJudge(source.function, pool, section.concurrency)
        if source.service is not None:
            service = ServiceJudge(source.service, section.timeout_seconds, section.concurrency)
            self._resources.callback(service.close)
            return service
        return RuleJudge(source, self._rules, section.code)

    def _value(self, part: _Part, item: ScoreItem, outcome: Outcome) -> float:
        """Return a part's score of a sample; 0.0 or NaN where it has none."""
        if outcome.state == worker.DONE:
            part.returned += 1
            return outcome.score
        if part.judge.is_rule:
            if outcome.state == worker.UNUSABLE:
                raise RewardError(f"{_sample(item)}: {outcome.message}")
            return 0.0
        part.failures += 1
        hopeless = not part.returned and part.failures >= HOPELESS_FAILURES
        # Slow answers are what some responses bring about (code that is run, say), so they alone do not stop a run.
        stops = self._section.on_failure == "stop" and outcome.state != worker.TIMED_OUT
        if hopeless or stops or outcome.state == worker.UNUSABLE:
            kind = TransientRewardError if outcome.is_transient else RewardError
            raise kind(f"{_sample(item)}: {self._complaint(part, outcome)}")
        return self._worth_of_failure()

    def _worth_of_failure(self) -> float:
        return math.nan if self._section.on_failure == "mask" else 0.0

    def _complaint(self, part: _Part, outcome: Outcome) -> str:
        name = part.judge.name
        if outcome.state == worker.TIMED_OUT:
            return (
                f"{name} has not returned for any of {part.failures} samples within reward.timeout_seconds = "
                f"{self._section.timeout_seconds:g}; raise it, or make the function faster"
            )
        if outcome.state == DIED:
            return f"{name}: killed its worker: {outcome.message}; fix it, or have it raise an error or return a number"
        return f"{name}: {outcome.message}"


def reward_totals(scores: Sequence[Score], part_names: Sequence[str]) -> dict[str, float]:
    """Return sums over samples, to be added up over ranks and given to ``reward_metrics``; the same keys on every rank.

    Args:
        scores: of one rank; may be empty.
        part_names: names of the scores' parts; none where there is one that has no name.
    """
    counted = [score for score in scores if not math.isnan(score.value)]
    return {
        "samples": float(len(scores)),
        "timeouts": float(sum(score.timed_out for score in scores)),
        "failures": float(sum(score.failed for score in scores)),
        "masked": float(len(scores) - len(counted)),
        **{name: sum(score.parts[index] for score in counted) for index, name in enumerate(part_names)},
    }


def reward_metrics(totals: Mapping[str, float]) -> dict[str, float]:
    """Return what is logged of ``reward_totals``: reward/timeouts, reward/failures, reward/masked (samples), and the
    mean score of each part, before its weight and over the samples that are not masked, as reward/NAME."""
    counts = ("samples", "timeouts", "failures", "masked")
    counted = max(totals["samples"] - totals["masked"], 1.0)
    return {f"reward/{name}": totals[name] for name in counts[1:]} | {
        f"reward/{name}": total / counted for name, total in totals.items() if name not in counts
    }


def _sample(item: ScoreItem) -> str:
    return f"sample of row {item.row_id} (data_source {item.data_source})"
