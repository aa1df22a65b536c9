"""Scores of responses, by data source: which rule judges a sample, and what a sample is worth whose scoring failed.

Here: the choice of the rule and the errors. Not here: the rules (gsm8k.py, math.py, reasoning_gym.py, user_function.py)
and the processes (pool.py, worker.py). Rewards are numbers on the host; advantages are made of them in algorithms/.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from rlhf_megatron.rewards import gsm8k, math, reasoning_gym, worker
from rlhf_megatron.rewards.errors import RewardError
from rlhf_megatron.rewards.pool import DIED, TIMED_OUT, Outcome, WorkerPool
from rlhf_megatron.rewards.user_function import RewardFunction

__all__ = ["RewardError", "RewardFunction", "ScoreItem", "Scorer", "rule_of"]

GSM8K = "gsm8k"
GSM8K_SOURCES = ("openai/gsm8k", "gsm8k")
# Sources of verl's default_compute_score and of the usual test sets, compared in lower case.
MATH_SOURCES = (
    "math",
    "math_dapo",
    "math_dapo_reasoning",
    "math500",
    "math-500",
    "lighteval/math",
    "digitallearninggmbh/math-lighteval",
    "huggingfaceh4/math-500",
    "hendrycks/competition_math",
    "dapo-math-17k",
    "olympiadbench",
    "minerva_math",
)
# ... and these, with or without an owner before the slash.
MATH_PREFIXES = ("aime", "amc", "numina_", "hmmt")

# SymPy on hostile text takes all memory that it gets long before the time limit.
MEMORY_LIMIT_BYTES = 4 * 2**30
# A user's function that has timed out this often and never once returned does not work.
HOPELESS_TIMEOUTS = 8


class RewardSettings(Protocol):
    """What is read of the recipe's reward section."""

    @property
    def function(self) -> str | None:
        """None: chosen by data_source; else "path.py:function"."""

    @property
    def timeout_seconds(self) -> float:
        """Time limit of one sample."""

    @property
    def workers(self) -> int:
        """Worker processes of this rank."""


@dataclass(frozen=True)
class ScoreItem:
    """One response to be scored.

    Attributes:
        data_source: chooses the rule.
        solution: the response as text, without control tokens.
        ground_truth: the right answer, from the prompt.
        extra_info: whatever the prompt's row carries.
        row_id: names the sample in errors.
    """

    data_source: str
    solution: str
    ground_truth: str
    extra_info: dict[str, Any]
    row_id: int


def rule_of(data_source: str) -> str | None:
    """Return the rule for a data source: "gsm8k", "math" or "reasoning_gym"; None where there is none."""
    name = data_source.lower()
    if name in GSM8K_SOURCES:
        return GSM8K
    if data_source.startswith(reasoning_gym.PREFIX) and reasoning_gym.task_of(data_source):
        return worker.REASONING_GYM
    if name in MATH_SOURCES or name.rpartition("/")[2].startswith(MATH_PREFIXES):
        return worker.MATH
    return None


class Scorer:
    """Scores batches of responses, for one rank. A context manager; its processes also end with the rank.

    A built-in rule costs a sample that cannot be judged in time (or in memory) its reward, 0.0, and nothing else. A
    user's function that raises stops the run, because its rewards would be wrong; if it is late, that sample gets 0.0.

    Attributes:
        timeouts: samples so far that got 0.0 at the time limit.
        failures: samples so far that got 0.0 because a built-in rule failed on their text, or its process was killed.
    """

    def __init__(self, reward_section: RewardSettings) -> None:
        """Make the scorer, and load the user's function if there is one.

        Raises:
            RewardError: the function cannot be loaded.
        """
        self._function = reward_section.function
        self._timeout_seconds = reward_section.timeout_seconds
        self._pool = WorkerPool(
            reward_section.workers,
            reward_section.timeout_seconds,
            memory_limit_bytes=0 if self._function else MEMORY_LIMIT_BYTES,
        )
        self.timeouts = 0
        self.failures = 0
        self._returned = 0
        if self._function:
            [outcome] = self._pool.run([self._job(worker.USER_FUNCTION, None)])
            if outcome.state != worker.DONE:
                reason = outcome.message or "loading it took too long"
                self.close()
                raise RewardError(f"reward.function: {reason}")

    def check_sources(self, data_sources: Iterable[str]) -> None:
        """Check that every data source can be scored; for the start of a run, before anything is generated.

        Raises:
            RewardError: there is neither a rule for a data source nor a function.
        """
        if self._function:
            return
        for data_source in data_sources:
            if rule_of(data_source) is None:
                raise RewardError(_unknown_source(data_source))

    def score(self, items: Sequence[ScoreItem]) -> list[float]:
        """Return one reward per item, in the same order.

        Raises:
            RewardError: an unknown data source, a ground truth that its rule cannot read, or a user's function that
                raised or returned no number; the message names the sample.
        """
        self.check_sources(dict.fromkeys(item.data_source for item in items))
        scores = [0.0] * len(items)
        places: list[int] = []
        jobs: list[dict[str, Any]] = []
        for place, item in enumerate(items):
            rule = worker.USER_FUNCTION if self._function else str(rule_of(item.data_source))
            quick = self._quick_score(rule, item)
            if quick is None:
                places.append(place)
                jobs.append(self._job(rule, item))
            else:
                scores[place] = quick
        outcomes = self._pool.run(jobs, lambda index, outcome: self._judge(items[places[index]], outcome))
        for place, outcome in zip(places, outcomes, strict=True):
            scores[place] = outcome.score
        return scores

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _job(self, rule: str, item: ScoreItem | None) -> dict[str, Any]:
        """Return what worker.py is told; without an item, it only loads the function."""
        if item is None:
            return {"kind": rule, "function": self._function, "load_only": True}
        return {
            "kind": rule,
            "function": self._function,
            "data_source": item.data_source,
            "solution": item.solution,
            "ground_truth": item.ground_truth,
            "extra_info": item.extra_info,
        }

    def _quick_score(self, rule: str, item: ScoreItem) -> float | None:
        """Return the score where no worker is needed for it."""
        if rule == worker.MATH:
            return math.quick_score(item.solution, item.ground_truth)
        if rule != GSM8K:
            return None
        try:
            return gsm8k.score(item.solution, item.ground_truth)
        except ValueError as error:
            raise RewardError(f"{_sample(item)}: {error}; correct the row, or set reward.function") from error

    def _judge(self, item: ScoreItem, outcome: Outcome) -> None:
        """Count an outcome, or raise where the run must stop."""
        if outcome.state == worker.DONE:
            self._returned += 1
        elif outcome.state == TIMED_OUT:
            self.timeouts += 1
            if self._function and not self._returned and self.timeouts >= HOPELESS_TIMEOUTS:
                raise RewardError(
                    f"{_sample(item)}: {self._function} has not returned for any of {self.timeouts} samples within "
                    f"reward.timeout_seconds = {self._timeout_seconds:g}; raise it, or make the function faster"
                )
        elif outcome.state == worker.UNUSABLE or self._function:
            by = f"reward.function {self._function}: " if self._function else ""
            reason = outcome.message
            if outcome.state == DIED:
                reason = f"killed its worker: {outcome.message}; mend it, or have it raise an error or return a number"
            raise RewardError(f"{_sample(item)}: {by}{reason}")
        else:
            self.failures += 1


def _sample(item: ScoreItem) -> str:
    return f"sample of row {item.row_id} (data_source {item.data_source})"


def _unknown_source(data_source: str) -> str:
    known = [*GSM8K_SOURCES, f"{reasoning_gym.PREFIX}TASK", *MATH_SOURCES, *(f"{prefix}*" for prefix in MATH_PREFIXES)]
    return (
        f"no reward is known for data_source {data_source!r}; known: {', '.join(known)}; for others set "
        "reward.function: path/to/file.py:compute_score (data_source, solution_str, ground_truth, extra_info)"
    )
