"""Gradients summed and weights gathered while passes compute give what the plain way gives, to rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hugging_face import make_model, random_rows
from parallel.overlap_ranks import OVERLAPPED, READERS, read_while_weights_travel, run_cases
from parallel.parity import OPTIMIZER, VOCABULARY, Case, named, selected_names
from parallel.ranks import run_ranks
from rlhf_megatron.topology.layout import Layout

GRADIENTS = {"overlap_grad_reduce": True}
AWAY = {"offload": {"parameters": True, "gradients": True, "optimizer": True}}
STREAMED = {"offload": {"streamed_optimizer": 0.7}}
ADAPTERS = {"lora": {"rank": 4}}
RECOMPUTED = {"recompute": {"granularity": "full"}}
CASES: dict[str, tuple[Case, dict[str, bool]]] = {
    "DP2": (Case("qwen3", False, {"data": 2}), OVERLAPPED),
    "experts, EP2": (Case("qwen3_moe", False, {"data": 2, "expert": 2}), OVERLAPPED),
}
IN_GRID: dict[str, tuple[Case, dict[str, bool]]] = {
    "DP2, gradients alone": (Case("llama", True, {"data": 2}), GRADIENTS),
    "DP2, optimizer not distributed": (Case("qwen3", True, {"data": 2}), GRADIENTS | {"distributed": False}),
    "DP2, away between calls": (Case("qwen2", True, {"data": 2}, AWAY), OVERLAPPED),
    "DP2, streamed": (Case("qwen3", False, {"data": 2}, STREAMED), OVERLAPPED),
    "DP2, recomputed": (Case("qwen3", True, {"data": 2}, RECOMPUTED), OVERLAPPED),
    "CP2": (Case("llama", False, {"context": 2}), OVERLAPPED),
    "PP2 VP2": (Case("qwen3", True, {"pipeline": 2, "virtual_pipeline": 2}), OVERLAPPED),
    "experts, DP2": (Case("qwen3_moe", True, {"data": 2}), OVERLAPPED),
    "latent attention, DP2": (Case("deepseek_v3", False, {"data": 2}), OVERLAPPED),
    # In delta nets rounding in a step is large in the next.
    "delta nets, DP2": (
        Case("qwen3_next", False, {"data": 2}, norms_within=5e-4, weights_within=1e-4),
        OVERLAPPED,
    ),
    "DP2, adapters": (Case("qwen3", False, {"data": 2}, ADAPTERS), GRADIENTS),
    "TP2, adapters": (Case("qwen3", False, {"tensor": 2}, ADAPTERS), GRADIENTS),
    "TP2 PP2, adapters": (Case("qwen3", False, {"tensor": 2, "pipeline": 2}, ADAPTERS), GRADIENTS),
    "TP2 DP2": (Case("qwen3", True, {"tensor": 2, "data": 2}, {"sequence_parallel": True}), OVERLAPPED),
    "PP2 DP2": (Case("llama", False, {"pipeline": 2, "data": 2}), OVERLAPPED),
    "PP2 DP2, tied": (Case("llama", True, {"pipeline": 2, "data": 2}), OVERLAPPED),
    "PP2 VP2 DP2": (Case("qwen2", True, {"pipeline": 2, "virtual_pipeline": 2, "data": 2}), OVERLAPPED),
    "experts, TP2 EP2": (Case("qwen3_moe", False, {"tensor": 2, "data": 2, "expert": 2}), OVERLAPPED),
    "experts, EP2 DP2": (Case("qwen3_moe", True, {"data": 4, "expert": 2}), OVERLAPPED),
    "bfloat16, DP4": (Case("qwen3", False, {"data": 4}, norms_within=1e-2, weights_within=1e-2), OVERLAPPED),
}
CASES |= {name: (case._replace(grid=True), keys) for name, (case, keys) in IN_GRID.items()}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    """Return each case's differences by rank; all cases of as many ranks share a launch."""
    home = tmp_path_factory.mktemp("overlap")
    cases: dict[int, dict[str, Any]] = {}
    for name in selected_names(request):
        given, keys = CASES[name]
        of_size = cases.setdefault(Layout(**given.layout).size, {})
        of_size[name] = {
            "model": str(
                make_model(home / name, given.family, tied=given.tied, vocabulary=VOCABULARY, num_hidden_layers=4)
            ),
            "layout": given.layout,
            "rows": list(random_rows(7, VOCABULARY)),
            "section": {"tokens_per_gpu": 30} | (given.section or {}),  # several micro-batches
            "optimizer": OPTIMIZER,
            "keys": keys,
            "dtype": "bfloat16" if "bfloat16" in name else "float32",
        }
    found: dict[str, list[Any]] = {}
    for ranks, of_size in cases.items():
        by_rank = run_ranks(run_cases, ranks, {"cases": of_size, "folder": str(home / "saved")}, timeout=590)
        found |= {name: [result[name] for result in by_rank] for name in of_size}
    return found


UNIT_OF_A_LOGIT = 2**-6  # from 2 to 4, in bfloat16


@pytest.mark.parametrize("name", named({name: case for name, (case, _) in CASES.items()}))
def test_steps_equal_the_plain_way(name: str, results: dict[str, list[Any]]) -> None:
    case, _ = CASES[name]
    for found in results[name]:
        assert found["metrics"] < case.norms_within
        assert found["weights"] < case.weights_within
        # Sums in another order round a few weights to their other neighbour, which moves a logit by a unit or two.
        assert found["logprobs"] < case.weights_within + (2 * UNIT_OF_A_LOGIT if "bfloat16" in name else 0.0)
        assert found["resumed"] == 0
        assert found["threads"] == 1, "other collectives travel over the same group"
    assert results[name][0]["buckets"] > 2


def test_nothing_reads_weights_before_they_are_there(tmp_path: Path) -> None:
    arguments = {
        "model": str(make_model(tmp_path / "model", "qwen3", tied=False, vocabulary=VOCABULARY, num_hidden_layers=4)),
        "rows": list(random_rows(7, VOCABULARY)),
        "optimizer": OPTIMIZER,
    }
    for found in run_ranks(read_while_weights_travel, 2, arguments):
        assert found == dict.fromkeys(READERS, pytest.approx(0, abs=1e-5))
