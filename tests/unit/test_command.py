"""Commands: what a person gets who types them wrongly, closes their output, or starts them in an odd environment."""

from __future__ import annotations

import logging
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from end_to_end.commands import ROOT, python
from rlhf_megatron.errors import DataError, RewardError, UserError, is_transient
from rlhf_megatron.runtime.command import check_environment, command, line_of, number_of_gpus
from rlhf_megatron.runtime.skipped_steps import TooManySkippedSteps

OF_A_RANK = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
# A command without a plan's imports, which take a process seconds.
SAYS = """
import sys
from rlhf_megatron.runtime.command import command
@command
def main():
    print(sys.argv[1])
    return 0
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"RANK": "abc"}, "environment: RANK='abc' must be a number from 0 to 1000000"),
        ({"RANK": "2"}, "environment: RANK=2 must be below WORLD_SIZE=2"),
        ({"WORLD_SIZE": "0"}, "environment: WORLD_SIZE='0' must be a number from 1 to 1000000"),
        ({"WORLD_SIZE": "-1"}, "environment: WORLD_SIZE='-1' must be"),
        ({"LOCAL_RANK": ""}, "environment: RANK is set and LOCAL_RANK is not; start the command by torchrun"),
        ({"MASTER_ADDR": ""}, "environment: RANK is set and MASTER_ADDR is not"),
        ({"MASTER_PORT": "x"}, "environment: MASTER_PORT='x' must be a number from 1 to 65535"),
        ({"MASTER_PORT": "9" * 5000}, "environment: MASTER_PORT='999"),
        ({"LOCAL_WORLD_SIZE": "x"}, "environment: LOCAL_WORLD_SIZE='x' must be"),
        ({"TORCHELASTIC_MAX_RESTARTS": "-3"}, "environment: TORCHELASTIC_MAX_RESTARTS='-3' must be"),
        ({"SLURM_RESTART_COUNT": "١"}, "environment: SLURM_RESTART_COUNT='١' must be"),
        ({"RLHF_MEGATRON_ATTEMPT": "\x1b[31m"}, r"environment: RLHF_MEGATRON_ATTEMPT='\x1b[31m' must be"),
    ],
)
def test_an_odd_environment_is_told_in_one_line(changes: dict[str, str], line: str) -> None:
    check_environment(OF_A_RANK)
    with pytest.raises(UserError) as caught:
        check_environment(OF_A_RANK | changes)
    assert str(caught.value).startswith(line) and len(str(caught.value)) < 400


def test_a_command_without_torchrun_needs_none_of_its_variables() -> None:
    check_environment({})
    check_environment({"MASTER_PORT": "x", "WORLD_SIZE": "x"})


@pytest.mark.parametrize("text", ["0", "-1", "x", "", "3.5", "٣", "000", "100001", "9" * 5000])
def test_no_number_of_gpus(text: str) -> None:
    with pytest.raises(UserError, match="--world="):
        number_of_gpus("--world", text)


def test_an_error_is_shown_without_control_characters_and_not_without_end() -> None:
    assert line_of(DataError("a\x1b[31mb\nc\rd")) == "a\\x1b[31mb\nc\nd"
    assert len(line_of(DataError("x" * 10**6))) < 5000
    assert len(line_of(DataError("x\n" * 10**5)).splitlines()) == 50


def test_what_another_attempt_may_mend_is_known_also_where_it_was_wrapped() -> None:
    assert is_transient(TooManySkippedSteps(1, 2, {}))
    wrapped = RewardError("sample of row 3")
    wrapped.__cause__ = TooManySkippedSteps(1, 2, {})
    assert is_transient(wrapped) and not is_transient(DataError("row 3"))


def test_an_interrupted_command_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    @command
    def main() -> int:
        raise KeyboardInterrupt

    assert main() == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("output", "status", "line"),
    [
        ("/dev/full", 2, "error: standard output or a file cannot be written (No space left on device); make room\n"),
        ("a pipe without a reader", 141, ""),
    ],
)
def test_output_that_nobody_takes(output: str, status: int, line: str) -> None:
    if output == "/dev/full":
        descriptor = os.open(output, os.O_WRONLY)
    else:
        reader, descriptor = os.pipe()
        os.close(reader)
    arguments = [sys.executable, "-P", "-c", SAYS, "a line"]
    done = subprocess.run(arguments, cwd=ROOT, stdout=descriptor, stderr=subprocess.PIPE, text=True, check=False)
    os.close(descriptor)
    assert (done.returncode, done.stderr) == (status, line)


@pytest.mark.parametrize(
    "arguments",
    [
        ["launch/train.py"],
        ["launch/train.py", "x.yaml", "--bogus"],
        ["launch/train.py", "x.yaml", "--world", "abc"],
        ["launch/evaluate.py"],
        ["launch/plan.py", "x.yaml"],
        ["launch/submit.py", "x.yaml", "--nodes", "x"],
        ["launch/torchrun.py"],
        ["launch/torchrun.py", "--nproc-per-node", "abc", "x.py"],
        ["launch/torchrun.py", "--nproc-per-node", "0", "x.py"],
        ["launch/torchrun.py", "--max-restarts", "-1", "x.py"],
        ["launch/torchrun.py", "--nnodes", "a", "x.py"],
        ["tools/preflight.py", "x.yaml", "--seconds", "nan"],
        ["tools/convert.py", "checkpoint-to-hf", "--input", "/", "--output", "out"],
        ["tools/make_tiny_model.py", "--output", "/dev/null"],
        ["tools/make_tiny_model.py", "--output", "out", "--layers", "9" * 12],
        ["tools/report.py", "x" * 5000],
        ["tools/prepare_data.py", "gsm8k", "--input", "/dev/zero", "--output", "out.parquet"],
        ["tools/tune.py", "x.yaml", "--trials", "0"],
        ["tools/demo.py", "--seed", "x"],
    ],
    ids=lambda arguments: " ".join(arguments)[:50],
)
def test_wrong_arguments_are_told_in_one_line(arguments: list[str], tmp_path: Path) -> None:
    finished = python(*arguments, folder=tmp_path)
    assert (finished.status, finished.out) == (2, "")
    assert finished.err.startswith("error: ") and finished.err.count("\n") == 1 and len(finished.err) < 5000


def test_torchrun_s_log_has_nothing_that_is_told_already() -> None:
    is_news = runpy.run_path(str(ROOT / "launch/torchrun.py"))["is_news"]

    def record(text: str, *arguments: object) -> logging.LogRecord:
        return logging.LogRecord("torchrun", logging.ERROR, "", 0, text, arguments, None)

    failed = "failed (exitcode: %s) local_rank: %s (pid: %s) of binary: %s"
    assert is_news(record(failed, 1, 0, 7, "python")) and is_news(record("Something else"))
    assert not is_news(record(failed, 2, 0, 7, "python"))


def test_a_terminal_that_knows_ascii_alone_gets_the_rest() -> None:
    shown = subprocess.run(
        [sys.executable, "-P", "-c", SAYS, "\u00fc.parquet"],
        cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, b"\\xfc.parquet\n", b"")
