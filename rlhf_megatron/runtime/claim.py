"""One job at a time trains in a run's folder: whoever does holds the file ``claim`` there, and keeps changing it.

Two jobs in one folder would delete each other's checkpoints. The file says whose it is (an ``identity``) and counts the
signs of life below. It works on any file system that all nodes share: no locks, no clocks that must agree. A holder on
the same machine is looked up; of one elsewhere a sign of life is waited for.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
import threading
import time
from pathlib import Path

from rlhf_megatron.errors import UserError
from rlhf_megatron.runtime.processes import identity, lives
from rlhf_megatron.untrusted import kind_of, read_bytes, shown

_NAME = "claim"
_MOST_BYTES = 1 << 20
_SECONDS_BETWEEN_SIGNS = 3.0
# A process may stand still for a while without being dead: a long call that keeps Python's lock, a slow file server.
SECONDS_OF_SILENCE = 30.0
_SECONDS_TO_SETTLE = 1.0
_ENDED_STATUS = 1


class FolderInUse(UserError):
    """Another job trains in the run's folder."""


class Claim:
    """The right of this process to write into a run's folder."""

    def __init__(self, run: Path, seconds_of_silence: float = SECONDS_OF_SILENCE) -> None:
        """Take the right, from a process that is gone if need be. Raises FolderInUse where one has it that lives.

        A holder on another machine counts as gone after ``seconds_of_silence``.
        """
        self._path, self._own = run / _NAME, identity(os.getpid())
        self._signs, self._ended = 0, threading.Event()
        try:
            while not (self._create() or self._take_over(seconds_of_silence)):
                pass
        except OSError as error:
            raise UserError(f"{self._path}: cannot be written ({error.strerror}); make room or set run_root") from error
        self._thread = threading.Thread(target=self._give_signs, name="claim", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Let others have the folder."""
        self._ended.set()
        self._thread.join(_SECONDS_BETWEEN_SIGNS)  # it would make the file anew
        with contextlib.suppress(UserError):  # what is there now is not this process's
            if _holder(self._read()) == self._own:
                self._path.unlink(missing_ok=True)

    def _create(self) -> bool:
        """Make the file, unless there is one."""
        try:
            file = self._path.open("xb")
        except FileExistsError:
            return False
        try:
            with file:
                file.write(self._content())
        except OSError:  # an empty claim would have others wait for nobody
            self._path.unlink(missing_ok=True)
            raise
        return True

    def _content(self) -> bytes:
        return f"{self._own}\n{self._signs:012d}\n".encode()

    def _read(self) -> bytes | None:
        """Return the file's content, None where there is none; raises UserError where it is no file of this kind."""
        try:
            mode = self._path.lstat().st_mode
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(mode):
            raise UserError(f"{self._path}: is not a regular file ({kind_of(mode)}); delete it")
        try:
            return read_bytes(self._path, UserError, _MOST_BYTES)
        except UserError:
            if not os.path.lexists(self._path):  # released meanwhile
                return None
            raise

    def _take_over(self, seconds_of_silence: float) -> bool:
        """Take the folder over if its holder is gone, and return whether it did; raises FolderInUse if that lives."""
        seen = now = self._read()
        holder = _holder(seen)
        alive = lives(holder) if holder else None
        if alive is None and seen is not None:  # of another machine, or just being written
            print(
                f"{self._path}: waiting for a sign of life of {shown(holder) or 'its writer'}",
                file=sys.stderr,
                flush=True,
            )
            now = self._after(seen, seconds_of_silence)
            if now != seen:
                holder, alive = _holder(now), True
        if now is None or (alive and not holder):  # it has been released meanwhile, or is being written
            return False
        if alive:
            machine, process, _ = holder.split()
            host = shown(machine.partition("/")[0])
            raise FolderInUse(
                f"{self._path.parent}: process {process} of {host} trains in this folder; wait "
                "for its end, stop it, or give this run another name"
            )
        own = self._path.with_name(f"{_NAME}.{self._own.replace('/', '-').replace(' ', '-')}")
        own.write_bytes(self._content())
        if self._read() == now:
            own.replace(self._path)
        own.unlink(missing_ok=True)
        time.sleep(_SECONDS_TO_SETTLE)  # of several that come together, the last one's file stays
        return _holder(self._read()) == self._own

    def _after(self, seen: bytes, seconds: float) -> bytes | None:
        """Return the file's content when it is no longer what was ``seen``, or ``seconds`` have passed.

        It is opened anew each time, for which a file system over a network asks its server.
        """
        deadline = time.monotonic() + seconds
        while (now := self._read()) == seen and time.monotonic() < deadline:
            time.sleep(min(1.0, seconds / 10))
        return now

    def _give_signs(self) -> None:
        """Go on until the claim is released; end the process if another job has taken the folder meanwhile."""
        while not self._ended.wait(_SECONDS_BETWEEN_SIGNS):
            self._signs += 1
            with contextlib.suppress(
                OSError, UserError
            ):  # a full disk or a server that is away: the next sign may come through
                if self._create():  # a person has deleted it
                    continue
                if _holder(self._read()) not in ("", self._own):
                    why = "another job has taken this folder while this process stood still"
                    print(f"error: {self._path.parent}: {why}", file=sys.stderr, flush=True)
                    os._exit(_ENDED_STATUS)
                with self._path.open("r+b") as file:
                    file.write(self._content())


def _holder(content: bytes | None) -> str:
    """Return the holder of a claim; empty where nothing says it, as when the file is just being written."""
    words = (content or b"").partition(b"\n")[0].decode("utf-8", errors="replace")
    return words if re.fullmatch(r"\S{1,300} [0-9]{1,20} [0-9]{1,20}", words) else ""
