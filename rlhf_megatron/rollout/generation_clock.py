"""The time of a generation by its parts, and what it says about the cache of rows that wait for their environment."""

from __future__ import annotations

_STEPS_TO_KNOW = 8  # with as many different numbers of prefilled tokens


class GenerationClock:
    """Times of one generation on this rank.

    Attributes:
        engine_seconds: in steps of the engine.
        idle_seconds: that the engine was idle until an environment answered.
        waiting_seconds: of all rows together, that they waited for their environment.
    """

    def __init__(self) -> None:
        self.engine_seconds = self.idle_seconds = self.waiting_seconds = 0.0
        self._answers = self._steps = self._prefills = 0
        self._tokens = self._tokens_squared = self._products = 0.0  # of prefilled tokens and seconds, by step

    def count_step(self, seconds: float, prefilled: int, waiting: int) -> None:
        """Count a step of the engine, in which so many tokens were prefilled and so many rows waited."""
        self.engine_seconds += seconds
        self.waiting_seconds += seconds * waiting
        self._steps, self._prefills = self._steps + 1, self._prefills + (prefilled > 0)
        self._tokens += prefilled
        self._tokens_squared += float(prefilled) ** 2
        self._products += prefilled * seconds

    def count_wait(self, seconds: float, waiting: int) -> None:
        """Count time in which the engine was idle and so many rows waited."""
        self.idle_seconds += seconds
        self.waiting_seconds += seconds * waiting

    def count_answers(self, answers: int) -> None:
        """Count rows that wait no longer."""
        self._answers += answers

    @property
    def seconds_per_prefilled_token(self) -> float | None:
        """The slope of a step's time over its prefilled tokens, by least squares; None before it is known."""
        if self._prefills < _STEPS_TO_KNOW or self._steps - self._prefills < _STEPS_TO_KNOW:
            return None
        variance = self._tokens_squared - self._tokens**2 / self._steps
        slope = (self._products - self._tokens * self.engine_seconds / self._steps) / variance
        return slope if slope > 0 else None

    def keeps_waiting(self, cache_tokens: float) -> bool:
        """Return whether rows that wait are to keep their cache, of so many tokens in all.

        Of w seconds and n tokens each, they take the share (rate x w x n / cache) of the cache from rows that could
        run. Without it, prefilling them again takes the share (rate x n x seconds per token) of the engine's time. So
        they keep it unless a row waits for longer than a whole cache takes to prefill. Before that is known, they do.
        """
        per_token = self.seconds_per_prefilled_token
        if per_token is None or not self._answers:
            return True
        return self.waiting_seconds / self._answers <= per_token * cache_tokens
