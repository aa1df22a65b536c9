"""Memory that leaves the device between calls: really freed, and nothing that is computed changes by a bit."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest

from hugging_face import make_model, random_rows
from parallel.layout_ranks import (
    KINDS,
    inputs_left,
    learn_with_memory_away,
    learn_with_remainders,
    memory_over_cycles,
)
from parallel.ranks import run_ranks

OPTIMIZER = {"learning_rate": 1e-3, "clip_grad": 1.0}
NARROW = OPTIMIZER | {"state_dtype": "bfloat16"}
REMAINDERS = OPTIMIZER | {"master_remainders": True}
CASES: dict[str, tuple[str, dict[str, Any] | None, float]] = {
    "float32": ("float32", OPTIMIZER, 0.0),
    "bfloat16": ("bfloat16", OPTIMIZER, 0.0),
    "whole optimizer": ("float32", OPTIMIZER | {"distributed": False}, 0.0),
    "frozen": ("float32", None, 0.0),
    "float32, optimizer streamed": ("float32", OPTIMIZER, 1.0),
    "bfloat16, half of the optimizer streamed": ("bfloat16", OPTIMIZER, 0.5),
    "bfloat16, optimizer streamed": ("bfloat16", OPTIMIZER, 1.0),
    "moments in bfloat16": ("float32", NARROW, 0.0),
    "moments in bfloat16, half of the optimizer streamed": ("bfloat16", NARROW, 0.5),
    "remainders": ("bfloat16", REMAINDERS, 0.0),
    "remainders, half of the optimizer streamed": ("bfloat16", REMAINDERS, 0.5),
    "remainders and moments in bfloat16, optimizer streamed": ("bfloat16", REMAINDERS | NARROW, 1.0),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    arguments = {
        "model": str(make_model(tmp_path_factory.mktemp("memory"), vocabulary=250)),
        "rows": list(random_rows(6, 250)),
        "section": {"tokens_per_gpu": 60},
        "cases": CASES,
    }
    return run_ranks(learn_with_memory_away, 2, arguments)


@pytest.mark.parametrize("name", CASES)
def test_offloading_before_every_call_changes_nothing(name: str, results: list[dict[str, Any]]) -> None:
    for by_case in results:
        result = by_case[name]
        assert result["same_results"]
        assert result["equal"] == result["all"]
        assert (result["pieces"] > 3) == (CASES[name][2] > 0)
        assert result["before"]["parameters"] > 0
        assert (result["before"]["gradients"] > 0) == (CASES[name][1] is not None)
        assert all(after == dict.fromkeys(KINDS, 0) for after in result["after"])


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_remainders_are_the_master_weights_in_fewer_bytes(family: str, tmp_path: Path) -> None:
    arguments = {
        "model": str(make_model(tmp_path / "model", family, vocabulary=2000)),
        "rows": list(random_rows(6, 2000)),
        "section": {"tokens_per_gpu": 60},
        "optimizer": OPTIMIZER,
        "steps": 3,
    }
    for found in run_ranks(learn_with_remainders, 2, arguments):
        # One of 2^17 numbers is off by one, and few of these change a weight in bfloat16, and so what follows.
        assert found["largest"] <= 16 and found["share"] < 1e-3
        whole, kept = found["bytes"]
        assert kept == pytest.approx(whole * 10 / 12, rel=0.01)


def test_layers_of_experts_that_are_computed_again_leave_nothing(tmp_path: Path) -> None:
    arguments = {
        "model": str(make_model(tmp_path / "model", "qwen3_moe", vocabulary=250)),
        "rows": list(random_rows(6, 250)),
        "section": {"tokens_per_gpu": 60},
        "optimizer": OPTIMIZER,
        "cases": {"layers": {"granularity": "full"}, "experts": {"granularity": "selective", "modules": ["moe"]}},
    }
    assert run_ranks(inputs_left, 1, arguments) == [{"layers": [], "experts": []}]


def test_fifty_cycles_leak_nothing(tmp_path: Path) -> None:
    check_cycles(tmp_path, world=2, dtype="float32")


def check_cycles(folder: Path, world: int, dtype: str) -> None:
    """Check that what a process has in its last cycles is what it had in earlier ones, but for what allocators hold
    back at the moment; one that kept a copy of its model in each would have 30 times 4 MB more."""
    arguments = {
        "model": str(make_model(folder / "model", vocabulary=16000)),
        "rows": list(random_rows(6, 16000)),
        "section": {"tokens_per_gpu": 60},
        "optimizer": OPTIMIZER,
        "dtype": dtype,
        "cycles": 50,
    }
    for found in run_ranks(memory_over_cycles, world, arguments):
        early, late = (median(found["host"][first : first + 10]) for first in (10, 40))
        assert late - early < 32 << 20
        assert found["device"][-1] == found["device"][9]
        assert all(found["pages"]) == any(found["device"]), "a GPU's memory grows by pages while passes run"
        assert found["pages left"][-1] == found["pages left"][9]
