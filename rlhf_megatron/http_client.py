"""A POST over HTTP with one deadline for the whole exchange, whatever the server does.

The timeouts of httpx are for one read each, and a server that sends a byte now and then reaches none. So an exchange is
a task of an event loop, which one thread runs for the whole process; at the deadline it is cancelled, which closes its
connection, and its caller goes on in any case.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import logging
import os
import socket
import ssl
import threading
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, TypeVar, TypeVarTuple
from urllib.parse import urlsplit

import httpx2

from rlhf_megatron.untrusted import reason_of, shown

# An error's status says nearly all; of its text only the beginning is for people.
ERROR_BYTES = 1000
# An answer is never unpacked, so it cannot grow. Each exchange has a connection of its own, so that what a server sends
# too much is not taken for the answer to another request.
_HEADERS = {
    "Accept": "application/json",
    "Accept-Encoding": "identity",
    "Connection": "close",
    "Content-Type": "application/json",
}

# Their lines for each request would hold a webhook's URL, which is a secret, and headers.
for _name in ("httpx2", "httpcore2"):
    logging.getLogger(_name).setLevel(logging.WARNING)


_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class ExchangeError(Exception):
    """No answer: none in time, or something that is not HTTP. Its text is one line."""


class NoConnectionError(ExchangeError):
    """No connection, or one that broke; the text is the operating system's word for it."""


@dataclass(frozen=True)
class Answer:
    """A server's response; of an error's ``body``, at most ERROR_BYTES."""

    status: int
    reason: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_success(self) -> bool:
        """True if the status is one of 2xx. Redirects are not followed: they would carry headers elsewhere."""
        return 200 <= self.status < 300


class HttpClient:
    """Client that posts JSON to one URL; any number of threads may do so at a time."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        """Read the proxy from the environment as urllib does; nothing is sent yet.

        Raises:
            ValueError: URL, headers or proxy cannot be used; its text shows no part of them.
        """
        self._url, self._loop = url, _event_loop()
        try:
            self._client = httpx2.AsyncClient(
                headers=_HEADERS | dict(headers or {}),
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),  # no request depends on one before
                verify=_certificates(),
                proxy=_proxy_of(url),
                timeout=None,  # the exchange's deadline is the only one
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
                trust_env=False,
            )
            self._client.build_request("POST", url)
            _ = urlsplit(url).port  # raises for one beyond 65535, which httpx takes
        except (httpx2.InvalidURL, ValueError, ImportError) as error:
            reason = f"the URL, or the proxy that the environment names for it, cannot be used ({type(error).__name__})"
            raise ValueError(reason) from None

    def post(self, body: bytes, seconds: float, most_bytes: int) -> Answer:
        """Return the answer, or raise after ``seconds``: for name lookup, connection, request and answer together.

        Args:
            body: JSON.
            seconds: until the deadline.
            most_bytes: of an answer's body; what is beyond is not read.

        Raises:
            ExchangeError: there is no answer, or none in time.
        """
        exchange = asyncio.run_coroutine_threadsafe(self._exchange(body, most_bytes), self._loop)
        try:
            return exchange.result(seconds)
        except TimeoutError as error:
            raise ExchangeError(f"no answer within {seconds:g} s") from error
        except httpx2.NetworkError as error:
            raise NoConnectionError(_cause(error)) from error
        except Exception as error:  # whatever a server's bytes make a library raise, they are no answer
            raise ExchangeError(f"no valid answer over HTTP: {_cause(error)}") from error
        finally:
            exchange.cancel()

    async def _exchange(self, body: bytes, most_bytes: int) -> Answer:
        async with self._client.stream("POST", self._url, content=body) as response:
            most = most_bytes if response.is_success else min(most_bytes, ERROR_BYTES)
            content = bytearray()
            async for part in response.aiter_raw():
                content += part
                if len(content) >= most:
                    break
            return Answer(response.status_code, response.reason_phrase, response.headers, bytes(content[:most]))


class _EventLoop(asyncio.SelectorEventLoop):
    """Event loop that looks up names in daemon threads: a lookup that hangs keeps neither others nor the process's end
    waiting."""

    def run_in_executor(
        self, executor: concurrent.futures.Executor | None, func: Callable[[*_Ts], _T], *args: *_Ts
    ) -> asyncio.Future[_T]:
        """Have a call made in a thread of its own."""
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()
        threading.Thread(target=_settle, args=(future, func, args), name="name lookup", daemon=True).start()
        return asyncio.wrap_future(future, loop=self)


def _settle(future: concurrent.futures.Future[Any], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        future.set_result(function(*arguments))
    except BaseException as error:
        future.set_exception(error)


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Return the authorities that this machine trusts, whose reading takes as long as many exchanges."""
    return ssl.create_default_context()


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of all exchanges of this process, which runs as long as it does."""
    loop = _EventLoop()
    threading.Thread(target=loop.run_forever, name="http", daemon=True).start()
    return loop


def _proxy_of(url: str) -> str | None:
    """Return the proxy that urllib would take for a URL, by ``http_proxy``, ``https_proxy`` and ``no_proxy``."""
    parts = urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if not proxy or urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _cause(error: BaseException) -> str:
    """Return the operating system's word for what went wrong, which libraries keep in a cause; or else the error's
    own."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, ssl.SSLError | socket.gaierror) and inner.strerror:
            return shown(inner.strerror)
        if isinstance(inner, OSError) and inner.errno:
            return os.strerror(inner.errno)
        inner = inner.exceptions[0] if isinstance(inner, BaseExceptionGroup) else inner.__cause__ or inner.__context__
    return reason_of(error)
