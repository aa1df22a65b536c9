"""A rank that refuses its input: no other attempt, one line, status 2 by launch/torchrun.py; faults are tried again."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from end_to_end.commands import ROOT, Command, Finished, torchrun

SECONDS_TO_END = 60.0
# Rank 1 alone cannot go on, while the others wait for it.
PROGRAM = """
import os, sys, time
from pathlib import Path
from rlhf_megatron.errors import UserError
from rlhf_megatron.runtime.command import command, on_this_rank, was_refused
from rlhf_megatron.runtime.skipped_steps import TooManySkippedSteps

def part():
    with Path("attempts").open("a") as file:
        file.write(os.environ["RANK"] + os.environ["TORCHELASTIC_RESTART_COUNT"] + " ")
    if os.environ["RANK"] == "1":
        raise {error}
    time.sleep(600)
    return 0

@command
def main():
    return 2 if was_refused() else on_this_rank(part)

sys.exit(main())
"""
REFUSAL = 'UserError("data.parquet: cannot be read; copy it")'


def launched(folder: Path, error: str) -> Finished:
    (folder / "program.py").write_text(PROGRAM.format(error=error))
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=2", "program.py"]
    with Command([sys.executable, "-P", str(ROOT / "launch/torchrun.py"), *options], folder) as command:
        return command.finish(SECONDS_TO_END)


def attempts(folder: Path) -> list[str]:
    return sorted(text for text in (folder / "attempts").read_text().split() if text[0] == "1")


def test_bad_input_of_one_rank_is_one_line_and_one_attempt(tmp_path: Path) -> None:
    finished = launched(tmp_path, REFUSAL)
    assert (finished.status, finished.out) == (2, "")
    assert finished.err == "[rank 1] error: data.parquet: cannot be read; copy it\n"
    assert attempts(tmp_path) == ["10"]


def test_what_another_attempt_may_mend_is_tried_again(tmp_path: Path) -> None:
    finished = launched(tmp_path, "TooManySkippedSteps(3, 4, dict())")
    assert attempts(tmp_path) == ["10", "11", "12"]
    assert finished.status == 1 and "exitcode  : 2" in finished.err and "Traceback" not in finished.err


def test_torchrun_itself_tries_again_and_the_attempts_end_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.format(error=REFUSAL))
    with torchrun(2, str(tmp_path / "program.py"), folder=tmp_path, restarts=2) as command:
        finished = command.finish(SECONDS_TO_END)
    assert finished.only_error() == "[rank 1] error: data.parquet: cannot be read; copy it"
    assert attempts(tmp_path) == ["10"]


@pytest.mark.parametrize("restarts", [0, 2])
def test_a_script_that_is_not_there(restarts: int, tmp_path: Path) -> None:
    options = ["--standalone", f"--max-restarts={restarts}", "missing.py"]
    with Command([sys.executable, "-P", str(ROOT / "launch/torchrun.py"), *options], tmp_path, warm=False) as command:
        finished = command.finish(SECONDS_TO_END)
    assert finished.status == 2
    assert re.fullmatch(r".*can't open file '.*missing.py'.*\n", finished.err)
