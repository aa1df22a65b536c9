"""One run that gets stuck, runs out of memory, meets gradients that are not finite and is killed, and yet comes to its
end. Every fault by itself, in a run of reinforcement learning: tools/chaos.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from end_to_end.commands import torchrun
from end_to_end.runs import SUPERVISED, TRAIN, decisions, make_model, make_sums, records_of

STEPS, ROWS, PROMPTS = 16, 60, 4
CHANGES: dict[str, Any] = {
    "name": "faults",
    "steps": 0,
    "epochs": STEPS * PROMPTS / ROWS,
    "actor": SUPERVISED["actor"] | {"tokens_per_gpu": "auto"},
    "evaluation": {"interval": 3, "at_start": False},
    "checkpoint": {
        "export_at_end": False,
        "save_interval": 3,
        "save_before_seconds": 60,
        "keep_last_k": 1,
        # The loss falls, so the first checkpoint is the best by this.
        "keep_best": {"metric": "eval/loss", "mode": "max"},
    },
    "retry": {"interval_seconds": 0.1, "hang_seconds": 10, "hang_seconds_at_start": 300, "max_skipped_steps": 3},
}
FAULTS = "stop@update:5:1,out_of_memory@update:8:1,nan@update:11-13:1,kill@publish:15:0,clock@update:14:1"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the run, which torchrun has started five times."""
    folder = tmp_path_factory.mktemp("faults")
    data = SUPERVISED["data"] | {"validation_files": ["train.parquet"]}
    (folder / "sft.yaml").write_text(yaml.safe_dump(SUPERVISED | CHANGES | {"data": data}))
    make_model(folder, layers=1)
    make_sums(folder, ROWS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLHF_MEGATRON_FAULT", FAULTS)
        patch.setenv("RLHF_MEGATRON_DEADLINE", str(time.time() + 2 * 3600))  # and an hour by the clock that is wrong
        with torchrun(2, TRAIN, "sft.yaml", folder=folder, restarts=4) as command:
            command.finish().check()
    return folder / "runs" / "faults"


def test_each_fault_is_followed_by_what_helps(run: Path) -> None:
    # Whoever loses its connection to a rank that is killed may say so.
    lines = [line for line in decisions(run) if line["what"] != "fault" or "kind" in line]
    told = [(line["what"], line.get("kind"), line["step"]) for line in lines]
    # Checkpoints are written while steps go on: on a busy machine the newest may not be there yet as a fault comes.
    for line, steps in ((6, (3, 6)), (9, (6, 9))):
        assert told[line][2] in steps
        told[line] = (*told[line][:2], steps[-1])
    assert told == [
        ("start", None, 0),
        ("hang", None, None),
        ("restart", None, 4),
        ("resume", None, 3),
        ("fault", "out_of_memory", None),
        ("restart", None, 7),
        ("resume", None, 6),
        ("fault", "not_finite", None),
        ("restart", None, 13),
        ("resume", None, 9),  # step 12 was not saved: it was skipped
        ("restart", None, STEPS),
        ("resume", None, 12),  # step-15 was there, but ``latest`` did not name it yet
        ("done", None, STEPS),
    ]
    assert lines[4]["phase"] == "update"
    whole, less = {"actor.tokens_per_gpu": 256}, {"actor.tokens_per_gpu": 192}  # at once all rows of a rank fit
    assert [line["found"] for line in lines if line["what"] in ("start", "restart")] == [whole, whole, less, less, less]
    assert lines[5]["reduced"] == less
    assert (lines[7]["first"], lines[7]["last"]) == (11, 13)


def test_a_hang_leaves_the_stacks_of_the_ranks_that_wait(run: Path) -> None:
    hang = decisions(run)[1]
    assert hang["why"].endswith(" s: rank 0 in update of step 5; rank 1 said nothing")
    (stacks,) = (run.parents[1] / hang["stacks"]).iterdir()
    assert stacks.name == "rank-0.txt"
    assert "in update\n" in stacks.read_text() and "roles/passes.py" in stacks.read_text()


def test_steps_that_are_done_again_say_the_same(run: Path) -> None:
    by_step: dict[int, list[dict[str, float]]] = {}
    for record in records_of(run):
        if "train/loss" in record:
            by_step.setdefault(record["step"], []).append(record)
    assert len(by_step[3]) == 1
    for step in (4, 7, 10):  # a smaller budget changes rounding only
        first, *others = (record["train/loss"] for record in by_step[step])
        assert others and others == pytest.approx([first] * len(others), rel=1e-5)
    for step in (14, 15, 16):
        first, again = by_step[step]
        assert first["train/loss"] == again["train/loss"]


def test_data_of_skipped_steps_are_passed_over(run: Path) -> None:
    epochs = {record["step"]: record["data/epoch"] for record in records_of(run) if "data/epoch" in record}
    steps_of_data = {step: step if step < 11 else step + 3 for step in range(1, STEPS + 1)}
    assert epochs == pytest.approx({step: PROMPTS * drawn / ROWS for step, drawn in steps_of_data.items()})
    assert "train/skipped" in records_of(run)[-2] and records_of(run)[-1]["step"] == STEPS


def test_the_best_checkpoint_is_kept_beside_the_newest(run: Path) -> None:
    checkpoints = run / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["best", "latest", f"step-{STEPS}", "step-3"]
    losses = {record["step"]: record["eval/loss"] for record in records_of(run) if "eval/loss" in record}
    best = json.loads((checkpoints / "best").read_text())
    assert best == {"checkpoint": "step-3", "metric": "eval/loss", "mode": "max", "value": max(losses.values())}
