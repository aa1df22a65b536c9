"""The judge of the fault campaign: what a run has left, against what was expected and the undisturbed run."""

from __future__ import annotations

import datetime
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from safetensors.numpy import load_file
from trajectories import judged

from rlhf_megatron.monitor.metrics import comparable, read_records, read_steps
from rlhf_megatron.runtime.recovery import RecoveryLog

RECIPE = yaml.safe_load((Path(__file__).resolve().parent / "recipe.yaml").read_text(encoding="utf-8"))
STEPS, ROWS = RECIPE["steps"], 40
_PHASE, _TIME = re.compile(r"@(\w+):"), re.compile("time/|start/")
RELATIVE, ABSOLUTE = 1e-3, 1e-5  # tolerance of what differs by rounding


@dataclass(frozen=True)
class Case:
    """A fault and what is expected of it.

    Attributes:
        expected: in words.
        fault: the value of RLHF_MEGATRON_FAULT, for the first launch.
        outside: the method of Disturbance that is called while the first launch goes on.
        decisions: of recovery.jsonl, without ``resume`` and the ``fault`` that another rank may have; by default the
            attempt after each fault begins by a restart.
        equality: of metrics and exported weights with those of the undisturbed run.
        launches: calls of torchrun. Only a single one has restarts.
        said: what the output must have.
        passed_over: the first and last step whose data are skipped after a rollback.
        environment, agent: the class or function of counted.py that plays, by games.yaml in place of recipe.yaml.
        kill: the call in which it kills its rank, or "turn": as the model goes on.
        each_phase: ``fault`` is to name every phase that the run goes through.
        begun: what its trajectories must be, of replayed, resumed and restarted; the others must not, but for those
            that are restarted since the kill came before their first turn.
        replayed: how many of them, where that is certain.
    """

    name: str
    expected: str
    fault: str = ""
    outside: str = ""
    decisions: tuple[str, ...] = ()
    equality: Literal["bits", "rounding", "other data", "trained once"] = "bits"
    launches: int = 1
    overrides: tuple[str, ...] = ()
    said: str = ""
    passed_over: tuple[int, int] | None = None
    environment: str = ""
    agent: str = ""
    kill: str = ""
    each_phase: bool = False
    begun: tuple[str, ...] = ()
    replayed: int | None = None

    @property
    def restarts(self) -> int:
        """Number of restarts where each fault is met once."""
        return len(self.fault.split(","))

    @property
    def expected_decisions(self) -> tuple[str, ...]:
        """The decisions, or what they are by default."""
        return tuple(self.decisions) or ("start", *["restart"] * self.restarts, "done")


@dataclass
class Result:
    """The result of a case; ``problems`` is empty where all was as expected."""

    name: str
    fault: str
    expected: str
    happened: str
    equal: str
    steps_repeated: int
    seconds_to_recover: float | None
    seconds: float
    problems: list[str]

    def row(self) -> list[str]:
        """Return the cells of a table."""
        happened = self.happened + "".join(f"; NOT AS EXPECTED: {problem}" for problem in self.problems)
        recovery = "" if self.seconds_to_recover is None else f"{self.seconds_to_recover:.0f}"
        return [self.name, self.expected, happened, self.equal, str(self.steps_repeated), recovery]


def decisions(run: Path) -> list[dict[str, Any]]:
    """Return the run's recovery.jsonl."""
    return RecoveryLog(run).lines()


def metrics_of(run: Path) -> dict[int, dict[str, float | None]]:
    """Return the last word on each step so far, without what depends on the machine and the packing."""
    path = run / "metrics.jsonl"
    # The packing changes with a smaller budget of tokens.
    return comparable(read_steps(path) if path.exists() else {}, "train/imbalance")


def judge(case: Case, folder: Path, faults: list[float], seconds: float, problems: list[str]) -> Result:
    """Compare what a run has left with what the case expects and with the reference."""
    run, lines = folder / "runs" / case.name, decisions(folder / "runs" / case.name)
    made = tuple(line["what"] for line in lines if line["what"] not in ("resume", "fault"))
    if made != case.expected_decisions:
        problems.append(f"recovery.jsonl says {', '.join(made)} instead of {', '.join(case.expected_decisions)}")
    if case.said not in (run / "launch.log").read_text(encoding="utf-8"):
        problems.append(f"nothing was said of {case.said!r}")
    if (run / "metrics.jsonl").exists():
        plays = case.environment or case.agent
        equal = trained_once(case, folder, problems) if plays else equal_data(case, folder, problems)
    else:
        said = (run / "launch.log").read_text(encoding="utf-8").split("\n")
        problems.append(f"no step was made; launch.log ends {' | '.join(line for line in said if line)[-500:]!r}")
        equal = "not whole"
    repeated = steps_repeated(lines)
    # A checkpoint becomes visible one step later.
    if repeated > (RECIPE["checkpoint"]["save_interval"] + 1) * case.restarts:
        problems.append(f"{repeated} steps were repeated")
    recovery = max((after - fault for fault in faults if (after := gone_on(lines, fault))), default=None)
    return Result(case.name, case.fault, case.expected, story(lines), equal, repeated, recovery, seconds, problems)


def equal_data(case: Case, folder: Path, problems: list[str]) -> str:
    """Return a comparison of a run with the reference, in words; adds what is not as the case expects to
    ``problems``."""
    run = folder / "runs" / case.name
    equal = equality(run, folder / "runs" / RECIPE["name"])
    if equal not in {"bits": ["bits"], "rounding": ["bits", "rounding"]}.get(case.equality, [equal]):
        problems.append(f"equal {equal} instead of {case.equality}")
    problems += accounts(run, case.passed_over)
    return equal


def trained_once(case: Case, folder: Path, problems: list[str]) -> str:
    """Return an account of how trajectories were begun, in words; adds what is not as the case expects to
    ``problems``."""
    run = folder / "runs" / case.name
    of_trajectories, counts, lost = judged(run, folder / "games" / case.name, bool(case.agent))
    problems += of_trajectories
    if case.each_phase:
        problems += [f"the phase {phase} has no fault" for phase in phases_without_fault(case, run)]
    seen = {what for what, count in counts.items() if (lost if what == "restarted" else count)}
    if seen != set(case.begun):
        problems.append(f"trajectories were {sorted(seen)} instead of {sorted(case.begun)}")
    if case.replayed not in (None, counts["replayed"]):
        problems.append(f"{counts['replayed']} trajectories were replayed instead of {case.replayed}")
    begun = [f"{count} {what}" for what, count in counts.items() if count]
    return ", ".join(["not each once" if of_trajectories else "each once", *begun])


def phases_without_fault(case: Case, run: Path) -> list[str]:
    """Return the phases of a run's steps and of its start, by its metrics, that a case's faults do not name."""
    names = {name for metrics in read_steps(run / "metrics.jsonl").values() for name in metrics}
    phases = {_TIME.sub("", name) for name in names if _TIME.match(name)} - {"launch", "total"}
    return sorted(phases - set(_PHASE.findall(case.fault)))


def equality(run: Path, reference: Path) -> str:
    """Compare metrics and exported weights with the reference: equal bits, rounding, or until which step."""
    actual, expected = metrics_of(run), metrics_of(reference)
    exports = [path / "export" / f"step-{STEPS}" / "model.safetensors" for path in (run, reference)]
    if actual.keys() != expected.keys() or not all(path.exists() for path in exports):
        return "not whole"
    if actual == expected and exports[0].read_bytes() == exports[1].read_bytes():
        return "bits"
    weights, wanted = (load_file(path) for path in exports)
    largest = max(float(abs(weights[name] - wanted[name]).max()) for name in wanted)
    if all(are_close(actual[step], expected[step]) for step in expected) and largest < ABSOLUTE:
        return "rounding"
    return f"until step {min((step for step in expected if actual[step] != expected[step]), default=STEPS + 1) - 1}"


def are_close(actual: dict[str, float | None], expected: dict[str, float | None]) -> bool:
    """Return whether two records have the same numbers up to rounding."""
    return actual.keys() == expected.keys() and all(
        value == wanted
        or (
            value is not None and wanted is not None and math.isclose(value, wanted, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
        )
        for value, wanted in ((actual[name], expected[name]) for name in expected)
    )


def steps_repeated(lines: list[dict[str, Any]]) -> int:
    """Count the finished steps that later attempts have done again."""
    repeated, finished = 0, 0  # steps that were finished when the attempt began that has not resumed yet
    for line in [*lines, {"what": "end"}]:
        if line["what"] == "resume":
            repeated += finished - line["step"]
            finished = 0
        elif line["what"] in ("start", "restart", "end"):
            ended_before_its_first_step = line.get("step") == finished
            repeated += 0 if ended_before_its_first_step else finished  # without a checkpoint it began anew
            finished = line.get("step", 0)
    return repeated


def accounts(run: Path, passed_over: tuple[int, int] | None) -> list[str]:
    """Return problems of the run's rows: each one drawn is trained on once, waits for the next step, or is dropped.

    Looks at the last time that each step was done, since these steps made the weights.
    """
    records = [record for record in read_records(run / "metrics.jsonl") if "data/epoch" in record]
    steps = {record["step"]: record for record in records}
    after = {step: round(record["data/epoch"] * ROWS) for step, record in steps.items()}
    before = {step: after.get(step - 1, 0) for step in steps}
    if passed_over:  # where the data stood after the last of these steps, when it was first done
        first, last = passed_over
        skipped_to = next(record["data/epoch"] for record in records if record["step"] == last)
        before[first] = round(skipped_to * ROWS)
    problems, waiting = [], 0.0
    for step, record in sorted(steps.items()):
        rounds, used, carried, dropped, surplus = (
            record[f"rollout/{name}"]
            for name in ("rounds", "groups", "groups_carried_over", "groups_dropped", "groups_surplus")
        )
        drawn = after[step] - before[step]
        if drawn != rounds * RECIPE["algorithm"]["filter_groups"]["prompts_per_round"]:
            problems.append(f"step {step}: {drawn} rows were drawn in {rounds:g} rounds")
        if carried != waiting or drawn + carried != used + dropped + surplus:
            problems.append(
                f"step {step}: {drawn} rows drawn, {waiting:g} waiting, {carried:g} taken from these, {used:g} used, "
                f"{dropped:g} dropped, {surplus:g} left"
            )
        waiting = surplus
    return problems


def gone_on(lines: list[dict[str, Any]], fault: float) -> float | None:
    """Return the time at which an attempt resumed after a fault, in seconds since 1970; None where none had to."""
    later = [line | {"at": moment} for line in lines if (moment := seconds_of(line["time"])) > fault]
    while later and later[0]["what"] not in ("start", "restart"):
        later.pop(0)
    moments: list[float] = [line["at"] for line in later[:2] if line["what"] in ("start", "restart", "resume")]
    return moments[-1] if moments else None


def seconds_of(text: str) -> float:
    """Return the seconds since 1970 of a time in ISO's form."""
    return datetime.datetime.fromisoformat(text).timestamp()


def story(lines: list[dict[str, Any]]) -> str:
    """Return a summary of recovery.jsonl, in a few words."""
    restarts = [line["step"] for line in lines if line["what"] == "restart"]
    if len(restarts) > 2:
        return f"{len(restarts)} restarts, after steps {restarts[0]} to {restarts[-1]}, {lines[-1]['what']}"
    words = {
        "start": "starts after step {step}", "restart": "restarts after step {step}", "resume": "from step {step}",
        "fault": "fault in {phase}", "hang": "hang noticed", "stop": "stops after step {step}", "done": "done",
    }  # fmt: skip
    return ", ".join(words.get(line["what"], line["what"]).format_map(line) for line in lines[1:])
