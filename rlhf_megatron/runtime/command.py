"""The common part of commands: arguments, a rank's run, and error lines. Imports no torch."""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import io
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn, ParamSpec

from rlhf_megatron.errors import UserError, is_transient
from rlhf_megatron.untrusted import reason_of, shown

# torchrun looks at its ranks every 0.1 s and ends them all when one has failed; that one may take seconds to end.
SECONDS_UNTIL_ENDED = 5.0
INPUT_STATUS = 2
# The statuses of programs that end by these signals, as shells tell them.
INTERRUPTED_STATUS, NO_READER_STATUS = 128 + signal.SIGINT, 128 + signal.SIGPIPE
MOST_GPUS = 100_000  # beyond any cluster; a plan looks at each
_LONGEST_LINE, _MOST_LINES = 4000, 50
_Arguments = ParamSpec("_Arguments")
# What torchrun tells its ranks: the least and the most that the variable can be.
_OF_TORCHRUN = {
    "RANK": (0, 10**6),
    "WORLD_SIZE": (1, 10**6),
    "LOCAL_RANK": (0, 10**6),
    "MASTER_PORT": (1, 65535),
}
_OF_TORCHRUN_OR_SLURM = {
    "LOCAL_WORLD_SIZE": (1, 10**6),
    "TORCHELASTIC_RESTART_COUNT": (0, 10**6),
    "TORCHELASTIC_MAX_RESTARTS": (0, 10**6),
    "SLURM_RESTART_COUNT": (0, 10**6),
    "RLHF_MEGATRON_ATTEMPT": (0, 10**9),
}


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, whose complaint is one line, and which answers a shell that completes a command of it."""

    program: ClassVar[str | None] = None
    """Name by which a person calls the command, where it is not the script's name."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **({"prog": self.program} | named))

    def parse_args(self, *arguments: Any, **named: Any) -> Any:
        """Do as argparse's does."""
        self._complete()
        return super().parse_args(*arguments, **named)

    def parse_intermixed_args(self, *arguments: Any, **named: Any) -> Any:
        """Do as argparse's does."""
        self._complete()
        return super().parse_intermixed_args(*arguments, **named)

    def _complete(self) -> None:
        """Write what a line can go on with and end the process, where a shell asks for that (by argcomplete)."""
        if "_ARGCOMPLETE" in os.environ:
            import argcomplete

            argcomplete.autocomplete(self)

    def error(self, message: str) -> NoReturn:
        """Raise UserError."""
        raise UserError(f"{message}; --help tells what there is")


def path_argument(text: str) -> Path:
    """Return a path of a command line; raises argparse.ArgumentTypeError for an empty one, which is this folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty; name a file or folder")
    return Path(text)


def command(main: Callable[_Arguments, int]) -> Callable[_Arguments, int]:
    """Make a function that returns an exit status the main function of a command.

    For input that is not right the status is 2, after one line. Where the reader of standard output has gone
    (``| head``) or a person has interrupted the command, it is that of a program ended by the signal, and nothing is
    told.
    """

    @functools.wraps(main)
    def run(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> int:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # of a terminal that knows ASCII alone
        try:
            try:
                return main(*arguments, **named)
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()
        except UserError as error:
            return tell(error)
        except KeyboardInterrupt:
            return INTERRUPTED_STATUS
        except OSError as error:
            if error.filename is None and error.errno == errno.ENOSPC:  # print does not say what it writes to
                return tell(UserError(f"standard output or a file cannot be written ({reason_of(error)}); make room"))
            if isinstance(error, BrokenPipeError) and _stdout_is_lost():
                return NO_READER_STATUS
            raise

    return run


def _stdout_is_lost() -> bool:
    """Return whether nobody reads standard output any more; from then on it goes nowhere, so that Python can end."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not any(happened & select.POLLERR for _, happened in poll.poll(0)):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return True


def check_environment(environment: Mapping[str, str]) -> None:
    """Raise UserError where a variable of torchrun or Slurm is not what these set; all may be absent."""
    needed = _OF_TORCHRUN if "RANK" in environment else {}
    for name in (*needed, *(["MASTER_ADDR"] if needed else [])):
        if not environment.get(name):
            raise UserError(
                f"environment: RANK is set and {name} is not; start the command by torchrun, which sets both"
            )
    for name, (least, most) in (needed | _OF_TORCHRUN_OR_SLURM).items():
        text = environment.get(name)
        if not text:
            continue
        if not (text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
            raise UserError(f"environment: {name}={shown(repr(text))} must be a number from {least} to {most}")
    if needed and int(environment["RANK"]) >= int(environment["WORLD_SIZE"]):
        world = environment["WORLD_SIZE"]
        raise UserError(f"environment: RANK={environment['RANK']} must be below WORLD_SIZE={world}")


def number_of_gpus(where: str, text: str) -> int:
    """Return the GPUs to plan for; raises UserError, naming ``where`` it was said, for what is no such number."""
    if not (text.isascii() and text.isdecimal()) or not text.strip("0"):
        raise UserError(f"{where}={shown(text, 40)}: must be a number of GPUs, 1 or more")
    if len(text) > 20 or int(text) > MOST_GPUS:
        raise UserError(f"{where}={shown(text, 40)}: is more GPUs than can be planned for, which are {MOST_GPUS:,}")
    return int(text)


def on_this_rank(action: Callable[[], int]) -> int:
    """Do this rank's part of a command, in step with all others; return the exit status."""
    try:
        return action()
    except UserError as error:
        return tell(error)
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS
    except Exception:
        # Where another rank has died, this one's lost connection explains nothing: torchrun ends it while it sleeps.
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            time.sleep(SECONDS_UNTIL_ENDED)
        raise


def say_that_imports_begin() -> None:
    """Tell a person at a terminal why nothing happens at first; once, by the first rank."""
    if os.environ.get("RANK", "0") == "0" and sys.stderr.isatty():
        print("importing torch, Megatron and vLLM ...", file=sys.stderr, flush=True)


def was_refused() -> bool:
    """Return whether an attempt of the same torchrun has refused its input; this one then ends without a word."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return False
    from rlhf_megatron.topology.world import refusal_before

    line = refusal_before()
    if line is not None:
        _report(line, may_pass=False)
    return line is not None


def tell(error: UserError) -> int:
    """Print the error in one line, once where all ranks fail alike; return the exit status."""
    rank = os.environ.get("RANK")
    text = line_of(error)
    line = f"error: {text}" if rank in (None, "0") else f"[rank {shown(rank)}] error: {text}"
    if rank is not None:
        from rlhf_megatron.topology.world import first_to_say, note_refusal

        may_pass = is_transient(error)
        _report(line, may_pass)
        if not may_pass:
            note_refusal(line)
        if not first_to_say(str(error)):
            return INPUT_STATUS
    with contextlib.suppress(OSError):  # where nobody can be told, the status tells
        print(line, file=sys.stderr, flush=True)
    return INPUT_STATUS


def line_of(error: UserError) -> str:
    """Return the text of an error as a terminal can show it: no control characters, and not without end."""
    lines = [shown(line, _LONGEST_LINE) for line in str(error).splitlines()]
    return "\n".join(lines[:_MOST_LINES])


def _report(line: str, may_pass: bool) -> None:
    """Write what torchrun shows of this rank at the end, and what tells launch/torchrun.py not to try again."""
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if report:
        cause = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        traits = {"category": "input", "retryability": str(may_pass)}
        with contextlib.suppress(OSError, ValueError):
            Path(report).write_text(json.dumps({"message": cause, "errorTraits": traits}), encoding="utf-8")
