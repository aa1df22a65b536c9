"""Memory that leaves the device between calls: really freed, and nothing that is computed changes by a bit."""

from __future__ import annotations

from typing import Any

import pytest

from hugging_face import make_model, random_rows
from parallel.layout_ranks import KINDS, learn_with_memory_away
from parallel.ranks import run_ranks

OPTIMIZER = {"learning_rate": 1e-3, "clip_grad": 1.0}
CASES: dict[str, tuple[str, dict[str, Any] | None]] = {
    "float32": ("float32", OPTIMIZER),
    "bfloat16": ("bfloat16", OPTIMIZER),
    "whole optimizer": ("float32", OPTIMIZER | {"distributed": False}),
    "frozen": ("float32", None),
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
        assert result["before"]["parameters"] > 0
        assert (result["before"]["gradients"] > 0) == (CASES[name][1] is not None)
        assert all(after == dict.fromkeys(KINDS, 0) for after in result["after"])
