"""When a run is started again, when it is given up, what a rank does with signals, and when the time is up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlhf_megatron.checkpoint.manager import _TimeLimit
from rlhf_megatron.errors import UserError
from rlhf_megatron.recipe.slurm import NetworkRetrySection, RetrySection
from rlhf_megatron.runtime import signals
from rlhf_megatron.runtime.processes import identity
from rlhf_megatron.runtime.rank_logs import next_log
from rlhf_megatron.runtime.recovery import Origin, RecoveryLog
from rlhf_megatron.runtime.signals import job_end, stop_status, wait_unless_stopped

FIRST, BY_HAND = Origin("node 11 100"), Origin("node 12 200")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run's folder."""
    return tmp_path


def attempt(run: Path, steps: list[int], *, ending: str | None = None, origin: Origin = FIRST) -> str | None:
    """Make one attempt that logs ``steps``; return why it was refused."""
    log = RecoveryLog(run, origin)
    refused = log.begin(max_repeats=3)
    if refused is None:
        with (run / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps({"step": step}) + "\n" for step in steps)
        if ending == "fault":
            log.append("fault", None, "ValueError: bad row")
        elif ending == "stop":
            log.stop(steps[-1], "SIGTERM came", saved=True)
        elif ending == "stop without saving":
            log.stop(steps[-1], "SIGTERM came", saved=False)
        elif ending == "health_stop":
            log.append("health_stop", None, "the loss is too high")
            log.append("fault", None, "rank 1: RuntimeError: connection closed")  # what others make of its end
    return refused


def test_a_fault_at_the_same_step_is_tried_so_often_and_no_more(run: Path) -> None:
    assert attempt(run, [1, 2, 3], ending="fault") is None
    assert attempt(run, [3], ending="fault") is None
    assert attempt(run, [3], ending="fault") is None
    for _ in range(2):  # asked again, the answer is the same
        refused = attempt(run, [])
        assert refused is not None and "3 attempts in a row ended after step 3 (ValueError: bad row)" in refused
    lines = RecoveryLog(run).lines()
    assert [line["what"] for line in lines if line["what"] != "fault"] == ["start"] + ["restart"] * 2 + ["give_up"] * 2
    assert [line["attempt"] for line in lines if line["what"] == "restart"] == [1, 2]
    assert attempt(run, [3], origin=BY_HAND) is None, "a person may try again"
    assert attempt(run, [3], origin=BY_HAND) is None, "and that counts anew"


def test_progress_and_orderly_stops_are_no_repeated_faults(run: Path) -> None:
    for number in range(9):
        assert attempt(run, [number + 1]) is None, "each attempt came one step further"
    for _ in range(6):
        assert attempt(run, [9], ending="stop") is None, "stopped each time, never failed"


def test_attempts_that_fail_before_their_first_step_are_counted(run: Path) -> None:
    assert attempt(run, [1, 2]) is None
    assert attempt(run, []) is None
    assert attempt(run, []) is None
    refused = attempt(run, [])
    assert refused is not None and "ended after step 2 (it said nothing: killed" in refused


def test_an_attempt_waits_after_a_fault_and_longer_where_the_network_was_away(run: Path) -> None:
    retry = RetrySection(interval_seconds=3.0, network=NetworkRetrySection(backoff_seconds=2.0))

    def fail(kind: str | None, steps: list[int]) -> float:
        """Return the wait after one more attempt, which logs these steps."""
        log = RecoveryLog(run, FIRST)
        assert log.begin(max_repeats=99) is None
        with (run / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps({"step": step}) + "\n" for step in steps)
        log.append("fault", None, "it failed", **({"kind": kind} if kind else {}))
        return RecoveryLog(run, FIRST).seconds_to_wait(retry)

    assert RecoveryLog(run, FIRST).seconds_to_wait(retry) == 0.0, "nothing has failed"
    assert [fail("network", [1]), fail("network", []), fail("network", []), fail("network", [2])] == [3, 4, 8, 3]
    assert [fail(None, [3]), fail("network", [4]), fail(None, [5])] == [3.0, 3.0, 3.0]
    assert RecoveryLog(run, BY_HAND).seconds_to_wait(retry) == 0.0, "a person has waited already"
    assert attempt(run, [3], ending="stop") is None
    assert RecoveryLog(run, FIRST).seconds_to_wait(retry) == 0.0, "it was asked to stop"
    assert retry.network.seconds_before(1000) == 300.0
    assert NetworkRetrySection(backoff_seconds=1000.0).seconds_before(3) == 1000.0


def test_a_wait_ends_when_the_rank_is_asked_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = time.monotonic()
    wait_unless_stopped(0.05)
    assert time.monotonic() - begun >= 0.05
    monkeypatch.setattr(signals.stop_signals, "_noted", (signal.SIGTERM, 0.0))
    wait_unless_stopped(3600.0)


def test_a_line_cut_by_a_crash_is_left_out(run: Path) -> None:
    assert attempt(run, [1], ending="fault") is None
    with RecoveryLog(run).path.open("a") as file:
        file.write('{"what": "sto')
    assert [line["what"] for line in RecoveryLog(run).lines()] == ["start", "fault"]
    assert attempt(run, [2]) is None
    assert [line["what"] for line in RecoveryLog(run).lines()] == ["start", "fault", "restart"], "nor is more lost"
    with RecoveryLog(run).path.open("a") as file:
        file.write('{"what": "fault"}\n[1]\n')
    assert attempt(run, [3]) is None


@pytest.mark.parametrize(
    ("first", "then", "is_restart"),
    [
        (Origin("a 1 5"), Origin("a 1 5"), True),  # torchrun starts ranks again
        (Origin("a 1 5"), Origin("a 1 9"), False),  # another process of the same number
        (Origin("a 1 5", "42"), Origin("a 2 9", "42"), False),  # a second torchrun in an interactive job
        (Origin("a 1 5", "42"), Origin("b 2 9", "42", 1), True),  # a requeue
        (Origin("a 1 5", "42", 1), Origin("b 2 9", "42", 1), False),
        (Origin("a 1 5", "42"), Origin("b 2 9", "43", 1), False),
    ],
)
def test_torchrun_and_a_requeue_go_on_and_a_person_begins_anew(
    run: Path, first: Origin, then: Origin, is_restart: bool
) -> None:
    assert attempt(run, [1], ending="health_stop", origin=first) is None
    assert attempt(run, [2], origin=then) == (f"{run}/recovery.jsonl: the loss is too high" if is_restart else None)
    other = run / "other"
    other.mkdir()
    assert attempt(other, [3], ending="fault", origin=first) is None
    log = RecoveryLog(other, then)
    assert bool(log.of_this_launch()) == is_restart
    assert log.begin(max_repeats=3) is None
    lines = log.lines()
    assert (lines[-1]["what"], lines[-1]["attempt"]) == (("restart", 1) if is_restart else ("start", 0))
    assert log.launch() == lines[-1]["launch"] == (first.torchrun if is_restart else then.torchrun)


@pytest.mark.parametrize("wrapper", ["exec", "true;"], ids=["none", "a shell"])
def test_torchrun_is_found_behind_wrappers_of_ranks(wrapper: str) -> None:
    asks = "import os; from rlhf_megatron.runtime.recovery import Origin; print(Origin.of(os.environ).torchrun)"
    command = ["sh", "-c", f'{wrapper} "$0" -P -c "$1"{"; true" * (wrapper != "exec")}', sys.executable, asks]
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "a run"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == identity(os.getpid())


def test_another_rank_speaks_for_the_same_launch(run: Path) -> None:
    attempt(run, [1])
    log = RecoveryLog(run, Origin("another node 7 9"))  # it has a torchrun of its own
    log.append("fault", None, "ValueError: bad row")
    assert log.lines()[-1]["launch"] == FIRST.torchrun and log.lines()[-1]["attempt"] == 0


def test_why_a_run_has_ended_is_told_at_its_next_start(run: Path) -> None:
    whys = []
    for number, ending in enumerate(("health_stop", "stop without saving", "stop", "fault", None)):
        attempt(run, [number], ending=ending, origin=Origin(f"node {number} 0"))
        RecoveryLog(run, BY_HAND).begin(9)
        whys.append(RecoveryLog(run).lines()[-1]["why"])
    assert whys == [
        "rank 1: RuntimeError: connection closed",
        "SIGTERM came; the step was not saved",
        "the attempt before had ended with: stop",
        "ValueError: bad row",
        "it said nothing: killed, or its machine failed",
    ]


def test_a_run_that_starts_again_takes_back_its_request_for_a_requeue(run: Path) -> None:
    log = RecoveryLog(run)
    log.begin(1)
    log.ask_for_requeue(7, "SIGTERM came")
    assert json.loads((run / "requeue").read_text())["step"] == 7
    log.begin(1)
    assert not (run / "requeue").exists()


def test_the_exit_status_asks_for_a_requeue_unless_torchrun_would_restart_for_it() -> None:
    assert stop_status({}) == 85
    assert stop_status({"TORCHELASTIC_MAX_RESTARTS": "2", "TORCHELASTIC_RESTART_COUNT": "2"}) == 85
    assert stop_status({"TORCHELASTIC_MAX_RESTARTS": "2", "TORCHELASTIC_RESTART_COUNT": "1"}) == 0


def test_the_time_is_up_when_the_next_step_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    for name in ("time", "monotonic"):
        monkeypatch.setattr(time, name, lambda: clock[0])
    limit = _TimeLimit(60.0, job_end({"SLURM_JOB_END_TIME": "1200"}))
    reached = []
    for seconds in (30.0, 40.0, 29.0, 2.0):  # ends at 1030, 1070, 1099, 1101; the longest step takes 40, 60 are left
        clock[0] += seconds
        reached.append(limit.is_reached_in_the_next_step())
    assert reached == [False, False, False, True]
    assert not _TimeLimit(0.0, 1.0).is_reached_in_the_next_step(), "0 means never"
    assert job_end({}) is None
    assert job_end({"SLURM_JOB_END_TIME": "5", "RLHF_MEGATRON_DEADLINE": "4"}) == 4.0
    with pytest.raises(UserError, match="RLHF_MEGATRON_DEADLINE='noon' must be seconds since 1970"):
        job_end({"RLHF_MEGATRON_DEADLINE": "noon"})
    for never in ("nan", "inf", "1e999"):
        with pytest.raises(UserError, match="must be seconds since 1970"):
            job_end({"RLHF_MEGATRON_DEADLINE": never})


def test_logs_have_a_folder_for_each_attempt(tmp_path: Path) -> None:
    made = [next_log(tmp_path, 2, rank) for rank in ("0", "1", "1", "0")]
    assert [str(path.relative_to(tmp_path)) for path in made] == [
        "attempt-2/rank-0.log", "attempt-2/rank-1.log", "attempt-3/rank-1.log", "attempt-3/rank-0.log"
    ]  # fmt: skip


# The main thread is in a call that Python's own signal handlers would have to wait for.
STUCK = """
import ctypes, os, time
from rlhf_megatron.runtime import signals
signals.SECONDS_OF_ONE_WARNING = 2.0
signals.stop_signals.listen()
if os.fork() == 0:
    time.sleep(60)
mutex, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
library.pthread_mutex_lock(mutex)
print("ready", flush=True)
library.pthread_mutex_lock(mutex)  # for ever
"""


@contextlib.contextmanager
def stuck(**environment: str) -> Iterator[psutil.Popen]:
    command = [sys.executable, "-P", "-c", STUCK]
    process = psutil.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "LOCAL_WORLD_SIZE": "0", **environment}
    )
    try:
        assert process.stdout.readline() == "ready\n"
        family = [*process.children(), process]
        yield process
    finally:
        for part in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                part.kill()
        process.wait()
        process.stdout.close()


def test_a_second_signal_ends_a_process_that_is_stuck() -> None:
    with stuck() as process:
        (forked,) = process.children()
        forked.terminate()
        while forked.status() != psutil.STATUS_ZOMBIE:  # in a forked child the signal has its usual effect
            time.sleep(0.01)
        for number in (signal.SIGUSR1, signal.SIGTERM):  # one warning that came twice
            process.send_signal(number)
        with pytest.raises(psutil.TimeoutExpired):
            process.wait(2.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM


# What others have a forked child do first takes its time: the signal comes before the child has handlers of its own.
FORKED = """
import os, signal, time
from rlhf_megatron.runtime.signals import stop_signals
os.register_at_fork(after_in_child=lambda: time.sleep(0.5))
stop_signals.listen()
child = os.fork()
if child == 0:
    time.sleep(60)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), stop_signals.noted, signal.pthread_sigmask(0, ()))
"""


def test_the_signal_of_a_child_just_forked_ends_the_child_and_not_the_run() -> None:
    ended = subprocess.run([sys.executable, "-P", "-c", FORKED], capture_output=True, text=True, timeout=50)
    assert ended.stdout == "-15 None set()\n", ended.stderr


SAVED = """
import sys
from rlhf_megatron.runtime.signals import stop_signals
stop_signals.listen()
stop_signals.ignore()
print("ready", flush=True)
sys.stdin.readline()
"""


def test_no_signal_disturbs_the_end_of_a_run_that_has_saved() -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-P", "-c", SAVED], text=True, **pipes) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        print("end", file=process.stdin, flush=True)
        while process.poll() is None:  # also when Python has given up its own handlers
            process.send_signal(signal.SIGUSR1)
    assert process.returncode == 0


def test_a_rank_whose_neighbour_is_gone_ends_at_once() -> None:
    with stuck(LOCAL_RANK="0", LOCAL_WORLD_SIZE="2") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
