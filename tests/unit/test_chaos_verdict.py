"""The judge of the fault campaign sees what it is there to see."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import trajectories
import verdict
from safetensors.numpy import save_file

FOLDER = Path(__file__).parents[2] / "tools" / "chaos"
STEPS = verdict.STEPS


def record(step: int, drawn: int, **more: float) -> dict[str, Any]:
    """Return one step of a run that draws 4 rows in a round, uses 3 and leaves 1, which the next step but one uses
    up."""
    groups = {"rounds": 1, "groups": 3, "groups_carried_over": 0, "groups_dropped": 0, "groups_surplus": 1}
    if step % 2 == 0:
        groups |= {"groups_carried_over": 1, "groups_dropped": 2, "groups_surplus": 0}
    named = {f"rollout/{name}": float(value) for name, value in groups.items()}
    return {
        "step": step,
        "data/epoch": drawn / verdict.ROWS,
        "train/loss": 1.0 / step,
        "time/update": 0.1,
        **named,
    } | more


def write(run: Path, records: list[dict[str, Any]], weight: float = 1.0) -> Path:
    export = run / "export" / f"step-{STEPS}"
    export.mkdir(parents=True, exist_ok=True)
    save_file({"a": numpy.full(3, weight, dtype=numpy.float32)}, str(export / "model.safetensors"))
    (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return run


def whole() -> list[dict[str, Any]]:
    return [record(step, 4 * step) for step in range(1, STEPS + 1)]


def test_rows_that_are_lost_used_twice_or_forgotten_are_noticed(tmp_path: Path) -> None:
    assert verdict.accounts(write(tmp_path, whole()), None) == []
    again = [*whole()[:4], *whole()[2:]]  # steps 3 and 4 are done again from the same place
    assert verdict.accounts(write(tmp_path, again), None) == []
    lost = [*whole()[:3], *(record(step, 4 * step + 4) for step in range(4, STEPS + 1))]
    assert verdict.accounts(write(tmp_path, lost), None)[0] == "step 4: 8 rows were drawn in 1 rounds"
    assert verdict.accounts(write(tmp_path, [*whole()[:4], *lost[3:]]), (4, 4)) == []
    twice = [*whole()[:3], *(record(step, 4 * step - 4) for step in range(4, STEPS + 1))]
    assert verdict.accounts(write(tmp_path, twice), None)[0] == "step 4: 0 rows were drawn in 1 rounds"
    forgotten = whole()
    forgotten[1]["rollout/groups_carried_over"] = 0.0
    assert "1 waiting, 0 taken from these" in verdict.accounts(write(tmp_path, forgotten), None)[0]


@pytest.mark.parametrize(
    ("loss", "weight", "equal"),
    [(0.25, 1.0, "bits"), (0.25 + 1e-7, 1.0, "rounding"), (0.25, 1.0 + 1e-6, "rounding"), (0.3, 1.0, "until step 3"),
     (0.25, 1.1, f"until step {STEPS}"), (None, 1.0, "until step 3")],
)  # fmt: skip
def test_runs_are_compared_to_the_bit(tmp_path: Path, loss: float, weight: float, equal: str) -> None:
    reference = write(tmp_path / "reference", whole())
    other = [*whole()[:3], record(4, 16, **{"train/loss": loss, "time/update": 7.0}), *whole()[4:]]
    assert verdict.equality(write(tmp_path / "other", other, weight), reference) == equal


def test_repeated_steps_and_the_time_to_go_on_are_counted() -> None:
    times = [{"time": f"2030-01-01T00:00:{second:02d}+00:00"} for second in range(60)]
    lines = [
        {"what": "start", "step": 0} | times[0],
        {"what": "fault", "step": None} | times[20],
        {"what": "restart", "step": 5} | times[30],
        {"what": "resume", "step": 2} | times[33],
        {"what": "done", "step": 6} | times[50],
    ]
    fault = verdict.seconds_of(times[19]["time"])
    assert verdict.steps_repeated(lines) == 3
    assert verdict.gone_on(lines, fault) == fault + 14
    assert verdict.gone_on(lines, fault + 20) is None


def test_steps_are_repeated_once_where_an_attempt_ends_before_its_first_step() -> None:
    beginnings: list[dict[str, Any]] = [{"what": "start", "step": 0}, {"what": "restart", "step": 4}]
    fault, resume, done = {"what": "fault", "step": None}, {"what": "resume", "step": 2}, {"what": "done", "step": 6}
    assert verdict.steps_repeated([*beginnings, fault, {"what": "restart", "step": 4}, resume, done]) == 2
    assert verdict.steps_repeated([*beginnings, done]) == 4
    assert verdict.steps_repeated([*beginnings, resume, {"what": "restart", "step": 2}, resume, done]) == 2
    assert verdict.steps_repeated([*beginnings, resume, {"what": "restart", "step": 3}, resume, done]) == 3


def games() -> tuple[list[trajectories.Trained], list[trajectories.Line]]:
    """Play a whole run, whose games have two turns; return what was trained, and the ledger."""
    batch, rows, ledger = trajectories.GAMES["batch"], [], []
    for step in range(1, STEPS + 1):
        for place in range(batch["prompts_per_step"] * batch["responses_per_prompt"]):
            life, seed = f"{step}-{place}", 100 * step + place // batch["responses_per_prompt"]
            rows.append(trajectories.Trained(step, life, 2))
            for what, turn in (("reset", 0), ("step", 1), ("step", 2), ("close", 2)):
                line = {"what": what, "life": life, "turn": turn, "process": place, "seed": seed, "attempt": 1}
                ledger.append(line)
    return rows, ledger


def calls(life: str, attempt: int, *what: tuple[str, int]) -> list[trajectories.Line]:
    """Return lines of another process, of the fifth step's first prompt."""
    of_all = {"life": life, "process": 7 + attempt, "seed": 500, "attempt": attempt}
    return [{"what": name, "turn": turn} | of_all for name, turn in what]


def test_trajectories_that_are_lost_trained_twice_or_played_wrongly_are_noticed() -> None:
    rows, ledger = games()
    none, end = Counter[str](), ("close", 2)
    assert trajectories.accounts(rows, ledger, none) == []
    others = [line for line in ledger if line["life"] != "5-0"]
    resumed = [*others, *calls("5-0", 1, ("reset", 0), ("step", 1)), *calls("5-0", 2, ("load", 1), ("step", 2), end)]
    assert trajectories.accounts(rows, resumed, Counter(resumed=1)) == []
    assert "went on, and metrics say 0 and 0" in trajectories.accounts(rows, resumed, none)[0]
    before, after = (("reset", 0), ("step", 1), ("step", 2)), (("load", 1), ("step", 2), end)
    unanswered = [*others, *calls("5-0", 1, *before), *calls("5-0", 2, *after)]  # the second turn was not recorded
    assert trajectories.accounts(rows, unanswered, Counter(resumed=1)) == []
    backwards = [*others, *calls("5-0", 1, *before), *calls("5-0", 2, ("load", 0), end)]
    assert trajectories.accounts(rows, backwards, Counter(resumed=1)) == ["game 5-0: went on at turn 0 behind turn 2"]
    skipped = [*others, *calls("5-0", 1, ("reset", 0), ("step", 2), end)]
    assert trajectories.accounts(rows, skipped, none) == ["game 5-0: turn 2 follows turn 0"]
    begun_again = [*ledger, *calls("lost", 2, ("reset", 0), ("step", 1))]
    assert trajectories.accounts(rows, begun_again, Counter(restarted=1)) == []
    assert trajectories.lost_after_a_turn(rows, begun_again) == 1
    assert trajectories.lost_after_a_turn(rows, [*ledger, *calls("lost", 1, ("reset", 0))]) == 0
    assert trajectories.accounts(rows, [*ledger, *calls("lost", 1, ("reset", 0))], none) == [
        "73 games began, of which 72 were trained"
    ]
    twice = [*rows[:-1], rows[0]]
    problems = trajectories.accounts(twice, ledger, none)
    assert "game 1-0 was trained more than once" in problems and "step 6: 11 rows instead of 12" in problems
    long = [row for row in rows if row.life != "5-0"]
    assert any(
        "the prompt of seed 500 was begun and trained" in each for each in trajectories.accounts(long, ledger, none)
    )


def programs() -> tuple[list[trajectories.Trained], list[trajectories.Program]]:
    """Play a whole run, whose programs hear two answers; return what was trained, and the programs."""
    batch, rows, played = trajectories.GAMES["batch"], [], []
    for step in range(1, STEPS + 1):
        for place in range(batch["prompts_per_step"] * batch["responses_per_prompt"]):
            heard = [step, place, 7]
            rows.append(trajectories.Trained(step, trajectories.life_of(heard), 2))
            seed = 100 * step + place // batch["responses_per_prompt"]
            played.append(trajectories.Program(seed, 1, heard, True))
    return rows, played


def test_programs_that_are_lost_trained_twice_or_answered_otherwise_are_noticed() -> None:
    (rows, played), none = programs(), Counter[str]()
    assert trajectories.agent_accounts(rows, played, none) == []
    killed, again = played[0]._replace(heard=[1, 0], ended=False), played[0]._replace(attempt=2)
    goes_on = [killed, again, *played[1:]]
    assert trajectories.agent_accounts(rows, goes_on, Counter(resumed=1)) == []
    assert trajectories.agent_accounts(rows, goes_on, none) == ["1 programs began again, and metrics say 0 and 0"]
    assert trajectories.agent_accounts(rows, [killed._replace(heard=[5]), *goes_on[1:]], Counter(resumed=1)) == [
        "a program of seed 100 was killed, and none was answered as it was"
    ]
    life = trajectories.life_of([9])
    assert trajectories.agent_accounts(rows, [*played, played[0]._replace(heard=[9])], none) == [
        f"game {life} was played to its end and not trained",
        "73 programs began, of which 72 were trained",
    ]
    assert f"game {rows[0].life} was trained more than once" in trajectories.agent_accounts(
        [*rows[:-1], rows[0]], played, none
    )
    assert f"game {rows[0].life} was trained and never played" in trajectories.agent_accounts(rows, played[1:], none)


def test_programs_are_read_from_their_ledger() -> None:
    of_all = {"seed": 3, "attempt": 1}
    lines = [("begin", "a", {}), ("begin", "b", {}), ("hear", "a", {"tokens": [1, 2]}), ("hear", "b", {"tokens": [5]}),
             ("hear", "a", {"tokens": [3]}), ("end", "a", {})]  # fmt: skip
    ledger = [{"what": what, "life": life} | of_all | more for what, life, more in lines]
    assert trajectories.programs_of(ledger) == [
        trajectories.Program(3, 1, [1, 2, 3], True), trajectories.Program(3, 1, [5], False)
    ]  # fmt: skip


def test_a_phase_that_is_not_killed_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps(record(1, 4, **{"start/total": 9.0, "start/engine": 3.0})) + "\n"
    )
    case = verdict.Case(name="phases", expected="killed in each", fault="kill@update:4,kill@save:4", each_phase=True)
    assert case.expected_decisions == ("start", "restart", "restart", "done")
    assert verdict.phases_without_fault(case, tmp_path) == ["engine"]
    assert verdict.phases_without_fault(replace(case, fault="kill@update:4,kill@engine:0:1"), tmp_path) == []


def test_a_run_without_a_step_is_told_with_its_last_words(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "kill"
    run.mkdir(parents=True)
    (run / "launch.log").write_text("warning: one\nerror: no port is free\n")
    case = verdict.Case(name="kill", expected="starts again", decisions=["restart"])
    result = verdict.judge(case, tmp_path, [], 1.0, [])
    assert result.problems[-1].endswith("no step was made; launch.log ends 'warning: one | error: no port is free'")
