"""A hub on this machine that serves folders as huggingface.co does. Used by tests only; no test lives here."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass
class Served:
    """A repository: what is asked of it, and how it answers.

    Attributes:
        files: by path, of each commit.
        branches: commits by name.
        token: without it the repository is gated.
        cuts: how many more answers with a body end in the middle.
        claimed_bytes: what a file is said to have, by path.
        held: by path, events without which the second half of a file is not sent.
        failing: paths of files whose content is answered with 503.
    """

    files: dict[str, dict[str, bytes]]
    branches: dict[str, str]
    token: str | None = None
    cuts: int = 0
    claimed_bytes: dict[str, int] = field(default_factory=dict)
    held: dict[str, threading.Event] = field(default_factory=dict)
    failing: set[str] = field(default_factory=set)


class HubServer(ThreadingHTTPServer):
    """The server, with the repositories by kind and name, such as models/OWNER/NAME, and the requests that it had."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Served] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.away = 0  # so many requests are answered with 503 first

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def add(self, name: str, *versions: dict[str, bytes], **options: Any) -> Served:
        """Add a repository; main is its last version."""
        commits = [hashlib.sha1(f"{name} {index}".encode()).hexdigest() for index in range(len(versions))]
        branches = {"main": commits[-1], "first": commits[0]}
        served = Served(dict(zip(commits, versions, strict=True)), branches, **options)
        self.repositories[name] = served
        return served

    def downloads(self) -> list[str]:
        """Return the paths of the files whose content was asked for."""
        asked = [path.rsplit("/", 1)[1] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path]
        return sorted(asked)


@contextlib.contextmanager
def hub() -> Iterator[HubServer]:
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def cached_files(home: Path, pattern: str) -> list[Path]:
    """Return the files anywhere in a cache whose names match, also while a client makes and removes folders there.

    ``Path.rglob`` raises FileNotFoundError where a folder is removed before it is read; ``os.walk`` skips it.
    """
    return [Path(folder, name) for folder, _, names in os.walk(home) for name in fnmatch.filter(names, pattern)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append((self.command, path, {name.lower(): value for name, value in self.headers.items()}))
        if self.server.away:
            self.server.away -= 1
            return self._refuse(503, "")
        match = re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?(/.*)?", path)
        match = match or re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/(resolve)/([^/]+)/(.+)", path)
        if match is None:
            return self._refuse(404, "EntryNotFound")
        kind = "datasets" if "datasets" in (match[1] or "") else "models"
        served = self.server.repositories.get(f"{kind}/{match[2]}")
        if served is None:
            return self._refuse(401, "RepoNotFound")
        revision = match[4] or "main"
        commit = revision if revision in served.files else served.branches.get(revision)
        if commit is None:
            return self._refuse(404, "RevisionNotFound")
        if served.token is not None and self.headers.get("Authorization") != f"Bearer {served.token}":
            return self._refuse(401, "GatedRepo")
        if match[3] == "resolve":
            return self._file(served, commit, match[5])
        if match[3] == "tree":
            return self._json([self._entry(served, name, content) for name, content in served.files[commit].items()])
        siblings = [{"rfilename": name} for name in served.files[commit]]
        return self._json({"id": match[2], "modelId": match[2], "sha": commit, "siblings": siblings})

    def _entry(self, served: Served, name: str, content: bytes) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "path": name, "oid": hashlib.sha1(content).hexdigest()}
        entry["size"] = served.claimed_bytes.get(name, len(content))
        return entry

    def _file(self, served: Served, commit: str, name: str) -> None:
        content = served.files[commit].get(name)
        if content is None:
            return self._refuse(404, "EntryNotFound")
        if self.command == "GET" and name in served.failing:
            return self._refuse(503, "")
        first = int((re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) or ["", "0"])[1])
        self.send_response(206 if first else 200)
        size = served.claimed_bytes.get(name, len(content))
        self.send_header("Content-Length", str(size - first))
        if first:
            self.send_header("Content-Range", f"bytes {first}-{size - 1}/{size}")
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if self.command == "GET":
            is_cut = served.cuts > 0 and len(content) - first > 1000
            served.cuts -= is_cut
            half = first + (len(content) - first) // 2
            self.wfile.write(content[first:half])
            if name in served.held:
                served.held[name].wait(300)
            if not is_cut:
                self.wfile.write(content[half:])
            self.close_connection = is_cut

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()
