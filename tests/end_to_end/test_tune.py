"""tools/tune.py: searches over real runs on the CPU, that go on, share what they found, and survive runs that fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from PIL import Image
from tune import Range, parse_range

from end_to_end.commands import python
from end_to_end.runs import make_model, steps_of
from rlhf_megatron.recipe import RecipeError, load_recipe

RATE = "actor.optimizer.learning_rate"
RECIPE: dict[str, Any] = {
    "name": "searched",
    "loop": "sft",
    "steps": 4,
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train_files": ["rows.parquet"], "validation_files": ["rows.parquet"], "max_prompt_length": 64},
    "batch": {"prompts_per_step": 8},
    "actor": {"tokens_per_gpu": 256, "optimizer": {"learning_rate": 1e-5}},
    "evaluation": {"interval": 2},
    "checkpoint": {"export_at_end": False},
}


def search(folder: Path, *arguments: str) -> Any:
    command = ("tools/tune.py", "recipe.yaml", "--metric", "eval/loss", "--mode", "min", "--no-pruning", *arguments)
    return python(*command, folder=folder)


def test_the_best_of_the_trials_becomes_a_recipe(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": f"{number} + 0 ="}], "reward_model": {"ground_truth": str(number)}}
        for number in range(100, 116)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    make_model(tmp_path, layers=1)
    ranges = ("--search", f"{RATE}=1e-6..1e-2:log")
    first = search(tmp_path, *ranges, "--trials", "2").check()
    assert first.out.count("searched-study/") == 2
    done = search(tmp_path, *ranges, "--trials", "3").check()
    runs = sorted((tmp_path / "runs").glob("searched-trial-*"))
    assert [run.name for run in runs] == [f"searched-trial-{number}" for number in range(3)], "the study went on"

    losses = {run.name: steps_of(run)[4]["eval/loss"] for run in runs}
    rates = {run.name: load_recipe(run / "recipe.yaml").actor.optimizer.learning_rate for run in runs}
    best = min(losses, key=lambda name: losses[name])
    recipe = load_recipe(tmp_path / "runs" / "searched-study" / "best.yaml")
    assert recipe.actor.optimizer.learning_rate == rates[best] == max(rates.values()), "who learns most, learns best"
    assert (recipe.name, recipe.steps) == ("searched", 4)
    header, winner, *_ = done.out.splitlines()
    assert header.split() == ["trial", "eval/loss", RATE] and winner.split()[0] == best.rpartition("-")[2]
    assert Image.open(tmp_path / "runs" / "searched-study" / "trials.png").width > 500

    failing = search(tmp_path, *ranges, "--trials", "9", "data.train_files=[nowhere.parquet]", "name=broken")
    assert failing.status == 1
    assert failing.err.count("failed: ") == 3 and "nowhere.parquet" in failing.err
    assert failing.err.splitlines()[-1].startswith("error: 3 trials in a row failed; the last: ")

    mistaken = search(tmp_path, "--search", "actor.optimizer.learnig_rate=1e-6..1e-2")
    assert mistaken.status == 2 and "did you mean actor.optimizer.learning_rate" in mistaken.only_error()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b=1e-6..1e-4:log", Range("a.b", 1e-6, 1e-4, logarithmic=True)),
        ("a=1..8", Range("a", 1, 8, whole=True)),
        ("a=1..8.0", Range("a", 1, 8)),
        ("a=-1..1", Range("a", -1, 1, whole=True)),
        ("a=[1, 2]|null", Range("a", choices=("[1, 2]", "null"))),
    ],
)
def test_ranges(text: str, expected: Range) -> None:
    assert parse_range(text) == expected


@pytest.mark.parametrize("text", ["a", "a=1", "a=2..1", "a=0..1:log", "=1..2", "a=1..2:lin"])
def test_ranges_that_are_none(text: str) -> None:
    with pytest.raises(RecipeError, match="write KEY=LOW..HIGH"):
        parse_range(text)
