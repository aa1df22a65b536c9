"""The page of runs over HTTP, for whoever has the token: the overview, its newest numbers, and the rollout browser.

Reads the runs' folders at each request and writes nothing. One process serves it: ``tools/watch.py``, or beside rank 0.
"""

from __future__ import annotations

import dataclasses
import hashlib
import http.server
import os
import secrets
import socket
import threading
import time
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import MonitorError
from rlhf_megatron.monitor.access import Access, Tokens, bearer_token, given_tokens
from rlhf_megatron.monitor.page import correct_from, overview_values, view_of
from rlhf_megatron.monitor.rendering import policy, render, render_part
from rlhf_megatron.monitor.rollout_view import filters_of, rollouts_view
from rlhf_megatron.monitor.run_files import FilesOfRun
from rlhf_megatron.monitor.run_view import RunView
from rlhf_megatron.untrusted import reason_of, shown

SECONDS_OF_A_CONNECTION, MOST_CONNECTIONS = 15.0, 32
TOKENS_OF_A_RESPONSE = 1500
_LONGEST_QUERY = 4096


def page_token() -> str:
    """Return the token that opens a page: of the environment, else a new one. Raises MonitorError for a short one."""
    return given_tokens().page or secrets.token_urlsafe(24)


def listening_socket(address: str, port: int, where: str) -> socket.socket:
    """Return a socket that listens; raises MonitorError, beginning with ``where``, where it cannot."""
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=MOST_CONNECTIONS)
    except (OSError, OverflowError) as error:
        raise MonitorError(
            f"{where}: cannot listen on {shown(address, 60)}:{port} ({reason_of(error)}); choose another port, or 0 "
            "for any that is free"
        ) from error


def url_of(address: str, port: int, token: str) -> str:
    """Return the URL that opens a page."""
    return f"http://{f'[{address}]' if ':' in address else address}:{port}/?token={urllib.parse.quote(token, safe='')}"


class Pages:
    """Pages that are served: those of runs by label, views of unchanged files made once."""

    def __init__(self, runs: Mapping[str, Path], title: str = "") -> None:
        self._runs, self._title = dict(runs), title or " / ".join(runs)
        self._lock = threading.Lock()
        self._views: dict[str, tuple[object, RunView]] = {}

    def overview(self, access: Access = "all") -> str:
        """Return the whole page of the runs, as far as a reader may read it."""
        return render("overview.html.j2", self._title, live=True, **self._overview_values(access))

    def part(self, access: Access = "all") -> str:
        """Return the overview's content alone."""
        return render_part("overview.html.j2", **self._overview_values(access))

    def rollouts(self, query: Mapping[str, str]) -> str:
        """Return the page of kept rows; raises MonitorError for a filter that is none."""
        filters = filters_of(query)
        runs = {label: (folder, correct_from(FilesOfRun(folder).recipe())) for label, folder in self._runs.items()}
        view = rollouts_view(runs, filters)
        return render("rollouts.html.j2", self._title, live=True, view=view, most_tokens=TOKENS_OF_A_RESPONSE)

    def message(self, text: str) -> str:
        """Return a page that says one thing."""
        return render("message.html.j2", self._title, live=True, message=text)

    def _overview_values(self, access: Access) -> dict[str, Any]:
        with self._lock:
            views = [self._view(label, folder) for label, folder in self._runs.items()]
            if access == "all":
                return overview_values(views, self._runs)
            without_text = [dataclasses.replace(view, samples=[]) for view in views]
            return overview_values(without_text, self._runs) | {"rollouts": None}

    def _view(self, label: str, folder: Path) -> RunView:
        """Return the view of a run; that of its files as they are is made once, and once more where it may be
        silent."""
        state = _state_of(folder)
        known = self._views.get(label)
        if known is None or known[0] != state:
            known = state, view_of(label, folder, live=True)
            self._views[label] = known
        return known[1]


def _state_of(folder: Path) -> object:
    """Return a value that is another where a file of a run has changed, and each minute, as a run may fall silent."""
    names = ("metrics.jsonl", "recovery.jsonl", "recipe.yaml", "environment.json", "samples", "rollouts")
    return [int(time.time() / 60), *(_changed(folder / name) for name in names)]


def _changed(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


class PageServer(http.server.ThreadingHTTPServer):
    """Server of pages on a socket that listens already, to requests with the token."""

    daemon_threads = True

    def __init__(self, pages: Pages, token: str, listening: socket.socket) -> None:
        self.pages, self.token = pages, token
        self.tokens = Tokens(token, given_tokens().metrics)
        self.address_family = listening.family
        super().__init__(listening.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.server_port = listening.getsockname()[1]
        # Cookies are of a host, not of a port: two pages of one host have two.
        self.cookie = f"rlhf_megatron_{self.server_port}"
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Do as the parent does, for so many connections at a time; others are closed."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Do as the parent does."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a reader that has gone is no news."""


class _Handler(http.server.BaseHTTPRequestHandler):
    """Handler of one connection."""

    server: PageServer
    server_version, sys_version = "rlhf_megatron", ""
    timeout = SECONDS_OF_A_CONNECTION

    def do_GET(self) -> None:
        """Answer with a page, or say in a line why not."""
        path, _, query_text = self.path.partition("?")
        try:
            pairs = urllib.parse.parse_qsl(query_text[:_LONGEST_QUERY], keep_blank_values=True, max_num_fields=40)
        except ValueError:
            self._answer(400, "the address has too many fields\n", "text/plain")
            return
        query = dict(pairs)
        access = self._access()
        if self.server.tokens.access(query.get("token", "")):
            self._let_in(path, query["token"])
        elif access:
            self._serve(path, query, access)
        else:
            self._answer(403, "open the address with its token, as the command printed it\n", "text/plain")

    do_HEAD = do_GET

    def _serve(self, path: str, query: Mapping[str, str], access: Access) -> None:
        pages = self.server.pages
        routes = {
            "/": lambda: pages.overview(access),
            "/part": lambda: pages.part(access),
            "/rollouts": lambda: pages.rollouts(query),
        }
        if path == "/rollouts" and access != "all":
            self._answer(403, "this token opens numbers alone; prompts and responses need the page's\n", "text/plain")
            return
        if path not in routes:
            self._answer(404, "there is no such page\n", "text/plain")
            return
        try:
            self._answer(200, routes[path]())
        except MonitorError as error:
            if path == "/rollouts":
                self._answer(400, f"{error}\n", "text/plain")
            else:
                whole = pages.message(f"No numbers yet: {error}")
                self._answer(200, whole) if path == "/" else self._answer(503, f"{error}\n", "text/plain")
        except Exception as error:  # one page that cannot be made must not end the server's others
            self._answer(500, f"the page cannot be made ({type(error).__name__})\n", "text/plain")

    def _let_in(self, path: str, token: str) -> None:
        """Move the token from the address, which browsers remember and show, into a cookie."""
        self.send_response(303)
        self.send_header("Location", path if path in ("/", "/rollouts") else "/")
        self.send_header("Set-Cookie", f"{self.server.cookie}={token}; Path=/; HttpOnly; SameSite=Strict")
        self.send_header("Content-Length", "0")
        self._send_guards()
        self.end_headers()

    def _access(self) -> Access | None:
        """Return the access of this request, by the token in its header or cookie."""
        cookies = (pair.strip().partition("=") for pair in self.headers.get("Cookie", "").split(";"))
        own = [value for name, _, value in cookies if name == self.server.cookie]
        tokens = [bearer_token(self.headers.get("Authorization", "")), *own]
        return next(filter(None, map(self.server.tokens.access, tokens)), None)

    def _answer(self, status: int, text: str, kind: str = "text/html") -> None:
        body = text.encode("utf-8", "replace")
        tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
        unchanged = status == 200 and self.headers.get("If-None-Match") == tag
        self.send_response(304 if unchanged else status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", "0" if unchanged else str(len(body)))
        self.send_header("ETag", tag)
        self._send_guards()
        self.end_headers()
        if self.command != "HEAD" and not unchanged:
            self.wfile.write(body)

    def _send_guards(self) -> None:
        self.send_header("Content-Security-Policy", f"{policy()}; frame-ancestors 'none'")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: the first address of each reader has the token in it."""
