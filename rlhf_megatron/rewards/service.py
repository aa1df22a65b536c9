"""A reward service: samples are posted as JSON over HTTP and come back as scores, with retries.

A request is {"samples": [{"data_source", "solution_str", "ground_truth", "extra_info"}, ...]}, the answer {"scores":
[number, ...]} with one number for each, or null for a sample that the service cannot score.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import math
import numbers
import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from rlhf_megatron.errors import RewardError
from rlhf_megatron.recipe import RewardServiceSection
from rlhf_megatron.rewards.pool import Outcome
from rlhf_megatron.rewards.rules import ScoreItem
from rlhf_megatron.rewards.threads import DaemonThreads
from rlhf_megatron.rewards.worker import DONE, FAILED

LONGEST_BACKOFF_SECONDS = 30.0
LONGEST_ANSWER_BYTES = 64 * 2**20
# Timeout, conflict with an earlier request, too early, too many requests; and all of 5xx.
RETRIED_STATUSES = (408, 425, 429)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected request would carry the authentication header to another place."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow none; the status becomes an error."""


class _TemporaryError(Exception):
    """A request that may succeed when it is sent again; `after` is the server's wish in seconds, if it has one."""

    is_transient = True

    def __init__(self, message: str, after: float = 0.0) -> None:
        super().__init__(message)
        self.after = after


class ServiceJudge:
    """A Judge that asks a service; `concurrency` requests are on their way at a time, each in a thread."""

    is_rule = False

    def __init__(self, section: RewardServiceSection, timeout_seconds: float, concurrency: int) -> None:
        """Read the authentication header's value; nothing is sent yet.

        Raises:
            RewardError: the environment variable that should hold the value is missing or cannot be a header.
        """
        self.name = f"reward.service {section.url}"
        self._section, self._timeout_seconds = section, timeout_seconds
        self._secret = _secret(section.header_environment)
        self._opener = urllib.request.build_opener(_NoRedirect)
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
            outcomes = [Outcome(FAILED, message=str(error))] * len(items)
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
            RewardError: any other status than 200.
        """
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._secret is not None:
            headers[self._section.header] = self._secret
        request = urllib.request.Request(self._section.url, body, headers, method="POST")
        deadline = time.monotonic() + self._timeout_seconds
        try:
            with self._opener.open(request, timeout=self._timeout_seconds) as response:
                return _read(response, deadline)
        except urllib.error.HTTPError as error:
            with error:
                message = f"the service answers with status {error.code} {error.reason}{self._said(error)}"
            if error.code in RETRIED_STATUSES or error.code >= 500:
                raise _TemporaryError(message, _seconds(error.headers.get("Retry-After"))) from error
            raise RewardError(message) from error
        except TimeoutError as error:
            raise _TemporaryError(f"no answer within {self._timeout_seconds:g} s") from error
        except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise _TemporaryError(f"no answer within {self._timeout_seconds:g} s") from error
            raise _TemporaryError(f"no connection: {reason or type(error).__name__}") from error

    def _said(self, error: urllib.error.HTTPError) -> str:
        """Return the beginning of an error's body, without the secret, which some servers repeat."""
        try:
            text = " ".join(error.read(1000).decode(errors="replace").split())
        except (OSError, http.client.HTTPException):
            return ""
        if self._secret:
            text = text.replace(self._secret, "***")
        return f": {text[:200]}" if text else ""


def _secret(variable: str | None) -> str | None:
    """Return the value of the authentication header."""
    if variable is None:
        return None
    value = os.environ.get(variable, "").strip()
    if not value:
        raise RewardError(
            f"reward.service.header_environment: the environment variable {variable} is not set; "
            "export it with the header's value on every node"
        )
    if not (value.isascii() and value.isprintable()):
        raise RewardError(f"reward.service.header_environment: {variable} holds more than one line of plain text")
    return value


def _without_nan(value: Any) -> Any:
    """NaN and infinities, which are not JSON and which most readers refuse, become null."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read(response: http.client.HTTPResponse, deadline: float) -> bytes:
    """Return the body; the socket's own limit is for each read alone, and a slow sender would never reach it."""
    body = bytearray()
    while part := response.read1(65536):
        body += part
        if time.monotonic() > deadline:
            raise TimeoutError
        if len(body) > LONGEST_ANSWER_BYTES:
            raise RewardError(f"the service answers with more than {LONGEST_ANSWER_BYTES} bytes")
    return bytes(body)


def _outcomes(answer: bytes, count: int) -> list[Outcome]:
    """Return the outcomes in an answer; raises RewardError where it is not what the module's first lines say."""
    try:
        scores = json.loads(answer)["scores"]
    except (ValueError, KeyError, TypeError) as error:
        shown = answer[:80].decode(errors="replace")
        raise RewardError(f'the service answers {shown!r} instead of {{"scores": [number, ...]}}') from error
    if not isinstance(scores, list) or len(scores) != count:
        raise RewardError(f"the service answers {str(scores)[:80]} instead of a list of {count} scores")
    return [_outcome(score) for score in scores]


def _outcome(score: Any) -> Outcome:
    with contextlib.suppress(OverflowError):  # JSON's whole numbers have no end
        if isinstance(score, numbers.Real) and math.isfinite(score):
            return Outcome(DONE, float(score))
    return Outcome(FAILED, message=f"the service gives the sample {str(score)[:80]} instead of a finite number")


def _seconds(header: str | None) -> float:
    """Return the seconds of a Retry-After header; a date counts as none."""
    return float(header) if header and header.strip().isdigit() else 0.0
