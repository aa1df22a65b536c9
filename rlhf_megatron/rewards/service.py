"""A reward service: samples are posted as JSON over HTTP and come back as scores, with retries.

A request is {"samples": [{"data_source", "solution_str", "ground_truth", "extra_info"}, ...]}, the answer {"scores":
[number, ...]} with one number for each, or null for a sample that the service cannot score.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import numbers
import random
import re
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from rlhf_megatron.errors import RewardError, is_transient
from rlhf_megatron.http_client import Answer, ExchangeError, HttpClient, NoConnectionError
from rlhf_megatron.recipe import RewardServiceSection
from rlhf_megatron.redaction import hide_secrets, read_secret
from rlhf_megatron.rewards.answers import Outcome
from rlhf_megatron.rewards.rules import ScoreItem
from rlhf_megatron.rewards.threads import DaemonThreads
from rlhf_megatron.rewards.worker import DONE, FAILED
from rlhf_megatron.untrusted import parse_json, shown

LONGEST_BACKOFF_SECONDS = 30.0
LONGEST_ANSWER_BYTES = 64 * 2**20
# Of what a service says, for secrets: far more than is shown, and little enough that a long answer costs no time.
_MOST_SEARCHED = 1000
# Timeout, conflict with an earlier request, too early, too many requests; and all of 5xx.
RETRIED_STATUSES = (408, 425, 429)


class _TemporaryError(Exception):
    """A request that may succeed when it is sent again; ``after`` is the server's wish in seconds, if it has one."""

    is_transient = True

    def __init__(self, message: str, after: float = 0.0) -> None:
        super().__init__(message)
        self.after = after


class ServiceJudge:
    """A Judge that asks a service; ``concurrency`` requests are on their way at a time, each in a thread."""

    is_rule = False

    def __init__(self, section: RewardServiceSection, timeout_seconds: float, concurrency: int) -> None:
        """Read the authentication header's value; nothing is sent yet.

        Raises:
            RewardError: the environment variable that should hold the value is missing or cannot be a header, or the
                URL or its proxy cannot be used.
        """
        self.name = f"reward.service {section.url}"
        self._section, self._timeout_seconds = section, timeout_seconds
        try:
            self._client = HttpClient(section.url, _authentication(section))
        except ValueError as error:
            raise RewardError(f"reward.service.url: {error}; correct it") from error
        self._random = random.Random()  # of its own: the trainer's random numbers must not depend on failures here
        self._closing = threading.Event()
        self._threads = DaemonThreads(concurrency, "reward request")

    def check_sources(self, data_sources: Iterable[str]) -> None:
        """See Judge; it is sent every row."""

    def submit(self, items: Sequence[ScoreItem]) -> list[Future[Outcome]]:
        """See Judge."""
        futures: list[Future[Outcome]] = [Future() for _ in items]
        size = self._section.samples_per_request
        for start in range(0, len(items), size):
            self._threads.submit(self._settle, items[start : start + size], futures[start : start + size])
        return futures

    def close(self) -> None:
        """Wait for no retries any more, and end the threads."""
        self._closing.set()
        self._threads.close()

    def _settle(self, items: Sequence[ScoreItem], futures: Sequence[Future[Outcome]]) -> None:
        """Get the outcomes of one request."""
        wanted = [future.set_running_or_notify_cancel() for future in futures]
        if not any(wanted):
            return
        try:
            outcomes = self._ask(items)
        except RewardError as error:
            outcomes = [Outcome(FAILED, message=str(error), is_transient=is_transient(error))] * len(items)
        except BaseException as error:  # raised where the outcome is asked for
            for future in itertools.compress(futures, wanted):
                future.set_exception(error)
            return
        for future, outcome in itertools.compress(zip(futures, outcomes, strict=True), wanted):
            future.set_result(outcome)

    def _ask(self, items: Sequence[ScoreItem]) -> list[Outcome]:
        """Return one outcome for each item, after as many tries as are allowed; raises RewardError after the last."""
        samples = [
            {
                "data_source": item.data_source,
                "solution_str": item.solution,
                "ground_truth": item.ground_truth,
                "extra_info": item.extra_info,
            }
            for item in items
        ]
        body = json.dumps({"samples": _without_nan(samples)}, default=str, allow_nan=False).encode()
        for attempt in range(self._section.max_retries + 1):
            try:
                return _outcomes(self._post(body), len(items))
            except _TemporaryError as error:
                last = error
            if attempt < self._section.max_retries:
                # "Full jitter": requests that failed together do not come back together.
                limit = min(self._section.backoff_seconds * 2.0**attempt, LONGEST_BACKOFF_SECONDS)
                wait = max(self._random.uniform(0.0, limit), min(last.after, LONGEST_BACKOFF_SECONDS))
                if self._closing.wait(wait):
                    break
        raise RewardError(f"{last}, at the last of {attempt + 1} tries") from last

    def _post(self, body: bytes) -> bytes:
        """Return the answer to one request.

        Raises:
            _TemporaryError: no connection, no answer in time, or a status that asks to come again.
            RewardError: any other status than one of success, or a body that is too long.
        """
        try:
            answer = self._client.post(body, self._timeout_seconds, LONGEST_ANSWER_BYTES + 1)
        except ExchangeError as error:
            what = "no connection: " if isinstance(error, NoConnectionError) else ""
            raise _TemporaryError(what + hide_secrets(str(error))) from error
        if not answer.is_success:
            if answer.status in RETRIED_STATUSES or answer.status >= 500:
                raise _TemporaryError(_error_text(answer), _seconds(answer.headers.get("Retry-After")))
            raise RewardError(_error_text(answer))
        if len(answer.body) > LONGEST_ANSWER_BYTES:
            raise RewardError(f"the service answers with more than {LONGEST_ANSWER_BYTES} bytes")
        return answer.body


def _authentication(section: RewardServiceSection) -> dict[str, str]:
    """Return the header that authenticates, if there is one."""
    variable = section.header_environment
    if variable is None:
        return {}
    value = read_secret(variable)
    if not value:
        raise RewardError(
            f"reward.service.header_environment: the environment variable {variable} is not set; "
            "export it with the header's value on every node"
        )
    if not (value.isascii() and value.isprintable()):
        raise RewardError(f"reward.service.header_environment: {variable} holds more than one line of plain text")
    return {section.header: value}


def _error_text(answer: Answer) -> str:
    """Return what an error says of itself, without the secrets that some servers repeat."""
    text = " ".join(f"{answer.status} {answer.reason}".split())
    said = " ".join(answer.body.decode(errors="replace").split())
    return f"the service answers with status {_shown(text)}" + (f": {_shown(said)}" if said else "")


def _shown(value: object, most: int = 200) -> str:
    """Return the beginning of what a service has said; a secret in it is hidden before the cut parts it."""
    some = value[:_MOST_SEARCHED] if isinstance(value, str | list) else value
    return shown(hide_secrets(str(some)[:_MOST_SEARCHED])[:most], most)


def _without_nan(value: Any) -> Any:
    """Turn NaN and infinities, which are not JSON and which most readers refuse, into null."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _outcomes(answer: bytes, count: int) -> list[Outcome]:
    """Return the outcomes in an answer; raises RewardError where it is not what the module's first lines say."""
    try:
        scores = parse_json(answer, "the answer", RewardError, finite=False, unique_keys=True)["scores"]
    except (RewardError, KeyError, TypeError) as error:
        text = hide_secrets(answer[:_MOST_SEARCHED].decode(errors="replace"))[:80]
        raise RewardError(f'the service answers {text!r} instead of {{"scores": [number, ...]}}') from error
    if not isinstance(scores, list) or len(scores) != count:
        raise RewardError(f"the service answers {_shown(scores, 80)} instead of a list of {count} scores")
    return [_outcome(score) for score in scores]


def _outcome(score: Any) -> Outcome:
    with contextlib.suppress(OverflowError):  # JSON's whole numbers have no end
        if isinstance(score, numbers.Real) and math.isfinite(score):
            return Outcome(DONE, float(score))
    return Outcome(FAILED, message=f"the service gives the sample {_shown(score, 80)} instead of a finite number")


def _seconds(header: str | None) -> float:
    """Return the seconds of a Retry-After header; a date, and what is no number, count as none."""
    return float(header) if header and re.fullmatch("[0-9]{1,9}", header.strip()) else 0.0
