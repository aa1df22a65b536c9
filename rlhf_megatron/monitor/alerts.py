"""Alerts to people: a JSON POST to a webhook, or a command, from a thread of their own so that training never waits.

When to alert is decided by runtime/health_rules.py. A webhook's URL is a secret: it comes from the environment and
appears in no message.
"""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
import urllib.parse
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from rlhf_megatron.errors import MonitorError
from rlhf_megatron.http_client import ExchangeError, HttpClient
from rlhf_megatron.redaction import hide_secrets, read_secret, redact
from rlhf_megatron.untrusted import shown

HTTP_SECONDS = 10.0
COMMAND_SECONDS = 30.0
HOUR = 3600.0
# Answers that another attempt may change: request timeout, too many requests, and every fault of the server.
_PASSING = (408, 425, 429)


class AlertSettings(Protocol):
    """The fields that are read of the recipe's health.alert section."""

    @property
    def webhook_environment(self) -> str | None:
        """Name of the environment variable with the URL."""

    @property
    def command(self) -> Sequence[str]:
        """Program and arguments; empty: none."""

    @property
    def retries(self) -> int:
        """Attempts after the first."""

    @property
    def most_per_hour(self) -> int:
        """Alerts sent within any hour."""


class DeliveryError(Exception):
    """An alert that did not arrive; ``again`` says whether another attempt may help."""

    def __init__(self, reason: str, again: bool) -> None:
        super().__init__(reason)
        self.again = again


class AlertSender:
    """Alerts that are sent one after the other in the background. Use on one rank only; ``close`` gives the last ones
    time."""

    def __init__(
        self,
        settings: AlertSettings,
        tell: Callable[[str], None],
        first_pause: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set up; ``tell`` gets one line for each alert that could not be delivered; ``first_pause``: seconds, then
        doubled.

        Raises MonitorError where the webhook's variable is not set or holds no http(s) URL.
        """
        self._settings, self._tell, self._pause, self._clock = settings, tell, first_pause, clock
        self._webhook = None if settings.webhook_environment is None else _webhook_in(settings.webhook_environment)
        self._sent: deque[float] = deque()
        self._withheld = 0
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="alerts", daemon=True)
        self._thread.start()

    def send(self, text: str, details: Mapping[str, Any], urgent: bool = False) -> bool:
        """Queue an alert: JSON {"text", "withheld", **details}. Returns False where the hour's number is used up.

        Secrets in it are hidden: it goes to people and to services.
        ``urgent`` alerts are sent in any case. ``withheld`` is the number that was not sent since the last one.
        """
        now = self._clock()
        while self._sent and now - self._sent[0] >= HOUR:
            self._sent.popleft()
        if not urgent and len(self._sent) >= self._settings.most_per_hour:
            self._withheld += 1
            return False
        self._sent.append(now)
        self._waiting.put(redact({"text": text, "withheld": self._withheld, **details}))
        self._withheld = 0
        return True

    def close(self, seconds: float = 30.0) -> None:
        """Wait at most so long for what is queued; what is left then is reported as lost. May be called twice."""
        self._waiting.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._tell(f"warning: alerts are not delivered after {seconds:g} s; they are given up")

    def _work(self) -> None:
        while (alert := self._waiting.get()) is not None:
            if self._webhook is not None:
                self._deliver("webhook", partial(post, self._webhook, alert))
            if self._settings.command:
                self._deliver("command", partial(run_command, self._settings.command, alert))

    def _deliver(self, channel: str, attempt: Callable[[], None]) -> None:
        """Try until it works, no attempt can help, or the attempts are used up."""
        for number in range(self._settings.retries + 1):
            try:
                attempt()
                return
            except DeliveryError as error:
                if not error.again or number == self._settings.retries:
                    self._tell(f"warning: alert not delivered by {channel} after {number + 1} attempts: {error}")
                    return
            except Exception as error:  # of any kind: the thread has later alerts to deliver
                # Its text may hold the webhook's URL.
                self._tell(f"warning: alert not delivered by {channel}: {type(error).__name__}")
                return
            time.sleep(self._pause * 2**number)


def _webhook_in(variable: str) -> HttpClient:
    """Return the webhook whose URL an environment variable holds; raises MonitorError without showing it."""
    where = f"health.alert.webhook_environment: environment variable {variable}"
    url = read_secret(variable)
    if not url:
        raise MonitorError(f"{where} is not set on rank 0; export it, or leave webhook_environment out")
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:
        parts = urllib.parse.urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise MonitorError(f"{where} holds no http(s) URL; correct it")
    try:
        return HttpClient(url)
    except ValueError as error:
        raise MonitorError(f"{where}: {error}; correct it") from error


def post(webhook: HttpClient, alert: Mapping[str, Any]) -> None:
    """Post an alert as JSON; raises DeliveryError, in whose text the URL does not appear."""
    try:
        # Nothing of what is said to an alert is of use. A redirected one would go on without its body.
        answer = webhook.post(json.dumps(alert, default=str).encode(), HTTP_SECONDS, most_bytes=1)
    except ExchangeError as error:
        raise DeliveryError(hide_secrets(str(error)), True) from None
    if not answer.is_success:
        raise DeliveryError(f"HTTP status {answer.status}", answer.status >= 500 or answer.status in _PASSING)


def run_command(command: Sequence[str], alert: Mapping[str, Any]) -> None:
    """Run a command with the alert as JSON on its standard input; raises DeliveryError where it fails.

    No shell sees it, so nothing in a message is carried out; {message} in an argument becomes the alert's text.
    """
    arguments = [argument.replace("{message}", str(alert["text"])) for argument in command]
    body = json.dumps(alert, default=str)
    try:
        finished = subprocess.run(
            arguments,
            input=body,
            capture_output=True,
            text=True,
            errors="replace",  # it may print any bytes
            timeout=COMMAND_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DeliveryError(f"{command[0]} ran past {COMMAND_SECONDS:g} s", True) from None
    except OSError as error:
        raise DeliveryError(f"{command[0]}: {error.strerror}", False) from None
    if finished.returncode:
        last = (finished.stderr.strip().splitlines() or ["no message"])[-1]
        raise DeliveryError(f"{command[0]} ended with status {finished.returncode}: {shown(hide_secrets(last))}", True)
