"""A command's main function called in this process, for tests: a process of its own takes a second or two to import."""

from __future__ import annotations

import contextlib
import io
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path


def called(main: Callable[[Sequence[str]], int], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Return the status and output of the command."""
    words = [str(argument) for argument in arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(words)
    return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())
