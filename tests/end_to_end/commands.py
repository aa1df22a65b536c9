"""Commands of launch/ and tools/ as a person types them, for tests: started, watched, ended whatever happens.

    with torchrun(2, "launch/train.py", "recipe.yaml", "steps=3", folder=tmp_path) as run:
        finished = run.finish()
    assert finished.status == 0

Import it as ``from end_to_end.commands import ...``. No test lives here.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from nursery import Nursling, environment_of, nursery
from rlhf_megatron.rollout.vllm.process_environment import has_gpu

ROOT = Path(__file__).resolve().parents[2]
# The error line of a command; torchrun repeats it, indented, in its closing box.
ERROR_LINE = re.compile(r"^(?:\[rank \d+\] )?error: .*$", re.MULTILINE)
OWN_FRAME = re.compile(r'File "[^"]*/(?:launch|tools|rlhf_megatron)/[^"]*"')


@dataclass(frozen=True)
class Finished:
    """What a command left: exit status, both outputs, and when it ended (time.time())."""

    status: int
    out: str
    err: str
    ended: float

    def check(self) -> Finished:
        """Return itself; raises AssertionError with what stands on stderr where the command failed."""
        assert self.status == 0, self.err
        return self

    def error_lines(self) -> list[str]:
        """Return the one-line errors on stderr."""
        return ERROR_LINE.findall(self.err)

    def only_error(self) -> str:
        """Return the single error line, after checks that the command failed and that no traceback of this project's
        shows."""
        assert self.status != 0, self.err
        assert len(self.error_lines()) == 1, self.err
        assert not OWN_FRAME.search(self.err), self.err
        return self.error_lines()[0]


class Command:
    """A running command; a context manager that kills what is left of it and of all that it started."""

    def __init__(
        self, arguments: list[str], folder: Path, warm: bool = True, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start ``arguments`` in ``folder``, where its outputs go to files: a pipe may outlive the command.

        A ``warm`` one is forked from a process with the imports done, see nursery; others take ten seconds longer, and
        show the warnings that a person would see.
        """
        self._out, self._err = (folder / f"{time.monotonic_ns()}.{name}" for name in ("out", "err"))
        environment = environment_of(sees_gpus=False) | dict(environment or {})
        warm = warm and not has_gpu()
        if not warm:
            del environment["PYTHONWARNINGS"]
        with self._out.open("wb") as out, self._err.open("wb") as err, open(os.devnull, "rb") as none:
            self._process: Nursling | subprocess.Popen[bytes] = (
                nursery().start(arguments, folder, environment, [file.fileno() for file in (none, out, err)])
                if warm
                else subprocess.Popen(arguments, cwd=folder, stdin=none, stdout=out, stderr=err, env=environment)
            )
        self.pid = self._process.pid

    def rank(self, number: int) -> psutil.Process:
        """Return the process of a rank; raises LookupError where torchrun has none of that number."""
        children = psutil.Process(self.pid).children()
        if len(children) == 1:  # torchrun's own starter of ranks, see nursery
            children += children[0].children()
        for process in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.environ().get("RANK") == str(number):
                    return process
        raise LookupError(f"no rank {number} is running")

    def family(self) -> list[psutil.Process]:
        """Return all processes that the command has started, and itself."""
        process = psutil.Process(self.pid)
        return [*process.children(recursive=True), process]

    def is_running(self) -> bool:
        """Return whether it has not ended."""
        return bool(self._process.poll() is None)

    def finish(self, timeout: float = 300.0) -> Finished:
        """Wait for the end; raises AssertionError with the outputs after ``timeout`` seconds."""
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout:g} s:\n{self._read()}") from None
        ended = time.time()
        return Finished(status, *self._read(), ended)

    def so_far(self) -> Finished:
        """Return what it has written up to now; the status is -1."""
        return Finished(-1, *self._read(), time.time())

    def _read(self) -> tuple[str, str]:
        out, err = (path.read_text(encoding="utf-8", errors="replace") for path in (self._out, self._err))
        return out, err

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_running():
            for process in self.family():
                process.kill()
            self._process.wait()


def python(script: str, *arguments: str, folder: Path) -> Finished:
    """Run a script of the repository with plain python in ``folder``, to its end."""
    with Command([sys.executable, "-P", str(ROOT / script), *arguments], folder) as command:
        return command.finish()


def torchrun(ranks: int, script: str, *arguments: str, folder: Path, restarts: int = 0, warm: bool = True) -> Command:
    """Start a script of the repository on ``ranks`` ranks in ``folder``, and again up to ``restarts`` times."""
    launcher = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
    launcher += [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    return Command([*launcher, str(ROOT / script), *arguments], folder, warm)
