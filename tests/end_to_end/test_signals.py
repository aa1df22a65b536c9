"""A run that is asked to stop saves, ends and goes on to the same numbers; after a fault it starts again by itself."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest
import yaml

from end_to_end.commands import ROOT, Command, torchrun
from end_to_end.runs import SUPERVISED, TRAIN, decisions, logged, make_model, make_sums, metrics_of, wait_for

STEPS = 150


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with random weights, and data."""
    path = tmp_path_factory.mktemp("signals")
    (path / "sft.yaml").write_text(yaml.safe_dump(SUPERVISED | {"steps": STEPS}))
    make_model(path, layers=1)
    make_sums(path, 60)
    return path


def train(folder: Path, *arguments: str, restarts: int = 0) -> Command:
    """Start the recipe on two ranks, which torchrun may start again so often."""
    return torchrun(2, TRAIN, "sft.yaml", *arguments, folder=folder, restarts=restarts)


def test_a_run_that_is_stopped_killed_and_stopped_gives_the_numbers_of_one_that_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with train(folder) as command:
        command.finish().check()
    whole = metrics_of(folder / "runs" / "whole")
    assert sorted(whole) == list(range(1, STEPS + 1))

    # SIGTERM to torchrun, which forwards it; no checkpoints but the one for the stop.
    run = folder / "runs" / "stopped"
    with train(folder, "name=stopped") as command:
        wait_for(command, lambda: logged(run) > 3)
        command.family()[-1].send_signal(signal.SIGTERM)
        stopped = command.finish()
    start, stop = decisions(run)
    assert stopped.status != 0
    assert (start["what"], start["step"], stop["what"], stop["why"]) == ("start", 0, "stop", "SIGTERM came")
    first = stop["step"]
    assert 3 < first < STEPS and logged(run) == first
    assert f"stopped after step {first}: SIGTERM came; the same command resumes from there" in stopped.out
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["latest", f"step-{first}"]
    assert json.loads((run / "requeue").read_text())["step"] == first

    # One rank is killed: torchrun starts both again by itself. Then one rank alone is told to stop.
    with train(folder, "name=stopped", "checkpoint.save_interval=5", restarts=1) as command:
        wait_for(command, lambda: logged(run) > first + 12)
        assert not (run / "requeue").exists()
        command.rank(1).kill()
        wait_for(command, lambda: decisions(run)[-1]["what"] == "resume" and decisions(run)[-1]["attempt"] == 1)
        records = logged(run)
        wait_for(command, lambda: logged(run) > records + 3)
        command.rank(1).send_signal(signal.SIGUSR1)
        stopped = command.finish()
    assert stopped.status != 0 and "exitcode  : 85" in stopped.err, "no restarts are left: the ranks say why they end"
    # The other rank may have lost its connection before it was ended.
    lines = [line for line in decisions(run)[2:] if line["what"] != "fault"]
    assert [line["what"] for line in lines] == ["start", "resume", "restart", "resume", "stop"]
    _, resumed, restart, again, stop = lines
    assert resumed["step"] == first
    assert first + 12 < restart["step"] and restart["attempt"] == 1
    assert again["step"] % 5 == 0 and first < again["step"] <= restart["step"], "from the newest checkpoint"
    assert stop["why"] == "SIGUSR1 came"

    # The job is about to end.
    monkeypatch.setenv("RLHF_MEGATRON_DEADLINE", str(time.time() + 1000))
    with train(folder, "name=stopped", "checkpoint.save_before_seconds=1000") as command:
        assert "exitcode  : 85" in command.finish().err
    assert decisions(run)[-1]["step"] == stop["step"] + 1, "one step is done in any case"
    assert decisions(run)[-1]["why"] == "the next step would end less than 1000 s before the job does"

    with train(folder, "name=stopped") as command:
        command.finish().check()
    assert decisions(run)[-1]["what"] == "done" and not (run / "requeue").exists()
    assert metrics_of(run) == whole


# launch/train.py; in a torchrun's first attempt rank 1 dies at the end of Python, when all that it had to do is done.
DIES_AT_THE_END = """
import atexit, os, runpy, signal
if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
    atexit.register(os.kill, os.getpid(), signal.SIGKILL)
runpy.run_path({train!r}, run_name="__main__")
"""


def test_what_has_stopped_is_started_again_by_slurm_but_not_by_torchrun(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    run, script = folder / "runs" / "once", folder / "dies_at_the_end.py"
    script.write_text(DIES_AT_THE_END.format(train=str(ROOT / TRAIN)))
    with torchrun(2, str(script), "sft.yaml", "name=once", folder=folder, restarts=1) as command:
        wait_for(command, lambda: logged(run) > 3)
        command.rank(0).send_signal(signal.SIGTERM)
        stopped = command.finish()
    assert "exitcode  : 85" in stopped.err, "torchrun has taken the death for a fault; the ranks end as before"
    assert [line["what"] for line in decisions(run)] == ["start", "stop"]
    assert logged(run) == decisions(run)[-1]["step"] and (run / "requeue").exists()

    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # a requeued job keeps its number
    with train(folder, "name=once", restarts=1) as command:
        wait_for(command, lambda: decisions(run)[-1]["what"] == "resume")
    assert [line["what"] for line in decisions(run)] == ["start", "stop", "restart", "resume"]


def test_a_fault_that_comes_again_ends_the_run_with_the_reason(folder: Path) -> None:
    run = folder / "runs" / "repeats"
    with train(folder, "name=repeats", "retry.max_repeats=1", restarts=1) as command:
        wait_for(command, lambda: logged(run) > 3)
        command.rank(0).kill()
        error = command.finish().only_error()
    step = decisions(run)[-1]["step"]
    # Whichever rank is the first to say it.
    assert re.sub(r"^\[rank 1\] ", "", error).startswith(
        f"error: runs/repeats/recovery.jsonl: 1 attempts in a row ended after step {step} ("
    )
    assert [line["what"] for line in decisions(run) if line["what"] != "fault"] == ["start", "give_up"]
