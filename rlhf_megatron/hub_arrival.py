"""Weights of the hub's models that are read while later files of them are downloaded, by one process of the node.

    HF_HUB_CACHE/.locks/rlhf_megatron/model--OWNER--NAME--COMMIT.lock      held by that process while it lives
    HF_HUB_CACHE/.locks/rlhf_megatron/model--OWNER--NAME--COMMIT.failed    {"line": ..., "may_pass": ...}: why it ended

huggingface_hub puts a file in its place when it is whole. Who waits for one and finds nobody who downloads goes on with
the download, so another job that is killed takes nothing along. The process ends with the rank that has started it.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from rlhf_megatron.child_python import child_command, end_with_parent
from rlhf_megatron.hub import (
    HubError,
    HubUnreachable,
    Repository,
    beside_cache,
    complete,
    download,
    folder_of,
    patiently,
    told,
)
from rlhf_megatron.untrusted import parse_json, read_text

_SECONDS_BETWEEN_LOOKS = 0.2
_MOST_STARTS = 3  # by one process that waits
_CHILD = "from rlhf_megatron.hub_arrival import download_in_child; download_in_child()"


class _Arrival:
    """Files of a commit that are to come to a folder of the cache."""

    def __init__(self, repository: Repository, patterns: Sequence[str], waits: Sequence[float]) -> None:
        """Begin to download, unless another process does."""
        self._repository, self._patterns, self._waits = repository, patterns, waits
        self._lock = beside_cache(repository, f"--{repository.revision}.lock")
        self._failure = self._lock.with_suffix(".failed")
        self._children: list[subprocess.Popen[bytes]] = []
        self.has_ended(after_failure=True)

    def has_ended(self, after_failure: bool = False) -> bool:
        """Return whether nothing more is to come, and see to it that somebody downloads what is.

        Raises HubError where the download has failed, unless it is to begin again ``after_failure``.
        """
        with told(self._repository), self._lock.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            if complete(self._repository, self._patterns) is not None:
                return True
            if after_failure:
                self._failure.unlink(missing_ok=True)
            self._refuse()
            self._start(file)
            return False

    def _refuse(self) -> None:
        if self._failure.exists():
            said = parse_json(read_text(self._failure, HubError), str(self._failure), HubError)
            raise (HubUnreachable if said["may_pass"] else HubError)(said["line"])
        if len(self._children) == _MOST_STARTS:
            status = self._children[-1].wait()
            raise HubUnreachable(
                f"{self._repository.key}: {self._repository.text}: what downloads it is killed each time (status "
                f"{status}); see whether the node's memory suffices, and try again"
            )

    def _start(self, lock: IO[str]) -> None:
        """Start a process that downloads, and that holds the lock from now on."""
        asked = {
            "repository": self._repository,
            "patterns": list(self._patterns),
            "waits": list(self._waits),
            "lock": lock.fileno(),
            "failure": str(self._failure),
        }
        child = subprocess.Popen(
            child_command(_CHILD, json.dumps(asked)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"LOCAL_RANK": "0"},  # it speaks for the node
            pass_fds=(lock.fileno(),),
            start_new_session=True,  # signals are for the rank, with which it ends
        )
        self._children.append(child)

    def progress(self) -> int:
        """Return a number that changes as bytes come."""
        return self._lock.stat().st_mtime_ns


_arrivals: dict[Path, _Arrival] = {}


def arriving_folder(
    repository: Repository, commit: str, described_by: Sequence[str], weights: Sequence[str], waits: Sequence[float]
) -> Path:
    """Return the folder of the cache with a commit's files that are ``described_by`` these patterns, to which its
    ``weights`` come from now on.

    Args:
        repository: as for ``folder_of``.
        commit: its.
        described_by: patterns of what is there at the return.
        weights: patterns of what may come later.
        waits: seconds before further tries where the hub cannot be reached.

    Raises:
        HubError: as ``folder_of``, which it is where nothing may be downloaded.
    """
    from huggingface_hub.constants import HF_HUB_OFFLINE

    fixed = repository._replace(revision=commit)
    if HF_HUB_OFFLINE or complete(fixed, [*described_by, *weights]) is not None:
        return folder_of(repository, commit, [*described_by, *weights])
    folder = folder_of(repository, commit, described_by)
    if folder not in _arrivals:
        _arrivals[folder] = _Arrival(fixed, weights, waits)
    return folder


def is_here(path: Path) -> bool:
    """Return whether a file is in its folder, or the folder is none to which files come."""
    return path.parent not in _arrivals or os.path.exists(path)


def looks_until_here(path: Path) -> Iterator[bool]:
    """Yield now and then until a file is here, or nothing more is to come to its folder: whether more bytes have come.

    Raises HubError where the download fails.
    """
    before = None
    while not (is_here(path) or _arrivals[path.parent].has_ended()):
        now = _arrivals[path.parent].progress()
        yield now != before
        before = now
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def download_in_child() -> None:
    """Download what the argument asks for, with a progress bar; where that fails, write why."""
    end_with_parent()
    asked: dict[str, Any] = parse_json(sys.argv[2], "argument", HubError)
    repository, failure = Repository(*asked["repository"]), Path(asked["failure"])

    def fetch() -> None:
        with told(repository):
            download(repository, asked["patterns"], on_progress=lambda: os.utime(asked["lock"]))

    try:
        patiently(fetch, asked["waits"])
    except HubError as error:
        partial = failure.with_suffix(".partial")
        partial.write_text(json.dumps({"line": str(error), "may_pass": error.is_transient}), encoding="utf-8")
        partial.replace(failure)
