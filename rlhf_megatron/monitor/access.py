"""Readers of a run's endpoints, and what they may read: a token each, from the environment.

RLHF_MEGATRON_PAGE_TOKEN       everything: page, kept prompts and responses, Prometheus
RLHF_MEGATRON_METRICS_TOKEN    numbers alone: the page without prompts and responses, Prometheus
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from rlhf_megatron.errors import MonitorError
from rlhf_megatron.redaction import read_secret

TOKEN_VARIABLE, METRICS_VARIABLE = "RLHF_MEGATRON_PAGE_TOKEN", "RLHF_MEGATRON_METRICS_TOKEN"
SHORTEST_TOKEN = 16
Access = Literal["all", "numbers"]
Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class Tokens(NamedTuple):
    """The tokens that open an endpoint; None: nobody has it."""

    page: str | None
    metrics: str | None

    @property
    def is_any(self) -> bool:
        """True if there is one."""
        return bool(self.page or self.metrics)

    def access(self, token: str) -> Access | None:
        """Return what a reader with this token may read; None: nothing."""
        if self.page and _same(token, self.page):
            return "all"
        return "numbers" if self.metrics and _same(token, self.metrics) else None


def given_tokens() -> Tokens:
    """Return the tokens of the environment; raises MonitorError for a short one, or one token for both."""
    tokens = Tokens(_given(TOKEN_VARIABLE), _given(METRICS_VARIABLE))
    if tokens.page and tokens.page == tokens.metrics:
        raise MonitorError(f"{METRICS_VARIABLE} has the token of {TOKEN_VARIABLE}; choose another, which opens less")
    return tokens


def bearer_token(header: str) -> str:
    """Return the token of an Authorization header; "" where it has none."""
    scheme, _, token = header.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def guarded(application: Application, tokens: Tokens) -> Application:
    """Return a WSGI application that answers requests with one of the tokens, and status 401 to others."""

    def answer(environment: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        request: Mapping[str, Any] = environment
        if tokens.access(bearer_token(request.get("HTTP_AUTHORIZATION", ""))):
            return application(environment, start_response)
        start_response("401 Unauthorized", [("Content-Type", "text/plain"), ("WWW-Authenticate", "Bearer")])
        return [b"send the token as Authorization: Bearer TOKEN\n"]

    return answer


def is_loopback(address: str) -> bool:
    """Return whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _given(variable: str) -> str | None:
    given = read_secret(variable)
    if given and (len(given) < SHORTEST_TOKEN or not given.isascii() or not given.isprintable()):
        raise MonitorError(
            f"the token in {variable} is not {SHORTEST_TOKEN} printable ASCII characters or more; choose another"
        )
    return given or None


def _same(token: str, expected: str) -> bool:
    return hmac.compare_digest(token.encode("utf-8", "replace"), expected.encode())
