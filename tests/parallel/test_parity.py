"""Megatron roles in several layouts against transformers and torch.optim.AdamW in one process, in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hugging_face import make_model, random_rows
from parallel.parity import OPTIMIZER, VOCABULARY, Case, case, check_against_transformers, one_result, prepared
from parallel.parity_ranks import run_cases
from parallel.ranks import run_ranks
from rlhf_megatron.topology.layout import Layout

STREAMED = {"offload": {"streamed_optimizer": 0.7}}
TRANSFORMERS = {
    "one rank": Case("qwen3", True, {}),
    "TP2": Case("qwen3", True, {"tensor": 2}),
    "TP2, logits kept": Case("qwen2", False, {"tensor": 2}, {"kept_logits_gb": 1}),
    "PP2": Case("qwen2", False, {"pipeline": 2}),
    "PP2, tied": Case("llama", True, {"pipeline": 2}),
    "DP2": Case("qwen3", False, {"data": 2}),
    "CP2": Case("llama", False, {"context": 2}),
    "CP2, Ulysses": Case("qwen3", True, {"context": 2}, {"cp_comm_type": "a2a"}),
    "PP2 VP2": Case("qwen3", False, {"pipeline": 2, "virtual_pipeline": 2}, {"tokens_per_gpu": 25}),
    "PP2 VP2, tied": Case("llama", True, {"pipeline": 2, "virtual_pipeline": 2}),
    "TP2 PP2": Case("qwen2", True, {"tensor": 2, "pipeline": 2}),
    "TP2 CP2": Case("qwen2", True, {"tensor": 2, "context": 2}),
    "PP2 CP2": Case("qwen3", True, {"pipeline": 2, "context": 2}),
    "CP2 DP2, Ulysses": Case("mistral", False, {"context": 2, "data": 2}, {"cp_comm_type": "a2a"}),
    "TP2 PP2 VP2": Case("qwen2", True, {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2}),
    "PP2 VP2 CP2": Case("mistral", False, {"pipeline": 2, "virtual_pipeline": 2, "context": 2}),
    "TP2 DP2": Case("qwen3", True, {"tensor": 2, "data": 2}),
    "PP2 DP2": Case("llama", True, {"pipeline": 2, "data": 2}),
    "TP2 PP2, sequence parallel": Case("qwen3", True, {"tensor": 2, "pipeline": 2}, {"sequence_parallel": True}),
    "TP2 CP2, sequence parallel": Case("llama", False, {"tensor": 2, "context": 2}, {"sequence_parallel": True}),
    "PP2 VP2, then CP2": Case("qwen2", True, {"pipeline": 2, "virtual_pipeline": 2}, then={"context": 2}),
    "CP2 DP2, then PP2 VP2 DP2": Case(
        "qwen3", False, {"context": 2, "data": 2}, then={"pipeline": 2, "virtual_pipeline": 2, "data": 2}
    ),
    "PP4 VP2": Case("qwen2", True, {"pipeline": 4, "virtual_pipeline": 2}, {"tokens_per_gpu": 25}, layers=8),
    "CP4": Case("qwen3", False, {"context": 4}),
    "TP2, sequence parallel": Case("qwen3", False, {"tensor": 2}, {"sequence_parallel": True}),
    "TP4, more ranks than key-value heads": Case("qwen2", True, {"tensor": 4}),
    "DP2 with its optimizer streamed, then TP2": Case("qwen3", False, {"data": 2}, STREAMED, then={"tensor": 2}),
    "experts, EP2 with its optimizer streamed": Case("qwen3_moe", False, {"data": 2, "expert": 2}, STREAMED),
    "experts, one rank": Case("qwen3_moe", True, {}),
    "experts, EP2": Case("qwen3_moe_plain", False, {"data": 2, "expert": 2}),
    "experts, TP2": Case("qwen3_moe", False, {"tensor": 2}),
    "experts, TP2 and EP2 of the same ranks": Case("qwen3_moe", True, {"tensor": 2, "expert": 2, "expert_tensor": 1}),
    "experts, CP2 EP2": Case("qwen3_moe", False, {"context": 2, "expert": 2}),
    "experts, TP2 EP2": Case("qwen3_moe", False, {"tensor": 2, "data": 2, "expert": 2}),
    "experts, EP2 DP2": Case("qwen3_moe_plain", True, {"data": 4, "expert": 2}),
    "experts, PP2 EP2": Case("qwen3_moe", False, {"pipeline": 2, "data": 2, "expert": 2}),
    "experts, EP2, then TP2": Case("qwen3_moe", False, {"data": 2, "expert": 2}, then={"tensor": 2}),
    "experts, TP2 and EP2, then PP2": Case(
        "qwen3_moe", True, {"tensor": 2, "expert": 2, "expert_tensor": 1}, then={"pipeline": 2}
    ),
    "experts, EP2 DP2, then TP2 EP2": Case(
        "qwen3_moe", False, {"data": 4, "expert": 2}, then={"tensor": 2, "data": 2, "expert": 2}
    ),
}
# Updates whose rows without an advantage are left out, and rewards of four groups of three in each of three steps: in
# the first minibatch of the second step, and in all of the third, no group teaches anything.
LEFT_OUT: dict[str, dict[str, Any]] = {
    "rows left out": {"loss_aggregation": "token_mean"},
    "rows left out of GSPO": {"policy_loss": "gspo", "loss_aggregation": "sequence_mean_token_mean"},
}
# Six steps, and other micro-batches with and without these rows: rounding is larger than in one step.
LEFT_OUT_OPTIMIZER = OPTIMIZER | {"epsilon": 1e-5}
REWARDS = [
    [1.0, 0.0, 0.0, *(1.0, 1.0, 1.0), *(0.0, 0.0, 0.0), *(0.0, 1.0, 1.0)],
    [1.0, 1.0, 1.0, *(0.0, 0.0, 0.0), *(0.0, 1.0, 0.0), *(1.0, 1.0, 1.0)],
    [0.0] * 12,
]
# Name: (layout, tokens of a micro-batch, dtype), all of one model and the same rows.
CUTS: dict[str, tuple[dict[str, int], int, str]] = {
    "whole": ({}, 10_000, "float32"),
    "in micro-batches": ({}, 25, "float32"),
    "over two ranks": ({"data": 2}, 10_000, "float32"),
    "over two ranks in micro-batches": ({"data": 2}, 25, "float32"),
    "bfloat16": ({"tensor": 2}, 60, "bfloat16"),
    "float16": ({"tensor": 2}, 60, "float16"),
}
TOO_HIGH = 2.0**30
RECOMPUTE: dict[str, dict[str, Any]] = {
    "kept": {},
    "attention": {"granularity": "selective"},
    "layers": {"granularity": "full"},
    "some layers": {"granularity": "full", "layers": 1},
}
ORDER = [4, 2, 8, 0, 6, 1, 3, 7, 5]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="module")
def results(home: Path) -> dict[str, list[dict[str, Any]]]:
    """Return each case's results by rank; all cases of as many ranks share a launch."""
    cases: dict[int, dict[str, Any]] = {1: {}, 2: {}, 4: {}}
    for name, given in TRANSFORMERS.items():
        cases[given.ranks][name] = prepared(home, name, given)
    folder, rows = make_model(home / "cut", "qwen3", vocabulary=VOCABULARY), list(random_rows(9, VOCABULARY))
    for name, (layout, tokens, dtype) in CUTS.items():
        cases[Layout(**layout).size][name] = case(folder, layout, rows, tokens, dtype=dtype)
    overflow = {"dtype": "float16", "loss_scale": TOO_HIGH, "then": {"data": 2}}
    cases[2]["float16, scale too high"] = case(folder, {"tensor": 2}, rows, **overflow)
    cases[1]["shuffled"] = case(folder, {}, [[part[row] for row in ORDER] for part in rows], 25)
    for name, recompute in RECOMPUTE.items():
        layout = {"context": 2, "tensor": 2}
        cases[4][f"recompute: {name}"] = case(folder, layout, rows, section={"recompute": recompute})
    for dtype in ("float32", "bfloat16", "float16"):
        arguments = {"model": str(folder), "rows": rows, "dtype": dtype}
        cases[2][f"NaN in {dtype}"] = {"function": "learn_past_a_nan", "arguments": arguments}
    rows = list(random_rows(12, VOCABULARY))
    for name, algorithm in LEFT_OUT.items():
        for which in ("skip", "keep"):
            arguments = {
                "model": str(folder),
                "rows": rows,
                "rewards": REWARDS,
                "optimizer": LEFT_OUT_OPTIMIZER,
                "zero_advantage_rows": which,
            }
            of_case = {"function": "learn_from_groups", "arguments": arguments | algorithm}
            cases[2][f"{name}, {which}"] = of_case
    found: dict[str, list[dict[str, Any]]] = {}
    for ranks, of_size in cases.items():
        by_rank = run_ranks(run_cases, ranks, {"cases": of_size}, timeout=600)
        found |= {name: [result[name] for result in by_rank] for name in of_size}
    return found


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_outputs_and_steps_equal_transformers(
    name: str,
    home: Path,
    results: dict[str, list[dict[str, Any]]],
    record_property: Callable[[str, Any], None],
) -> None:
    found = check_against_transformers(home / name, home / f"{name}, exported", one_result(results[name]))
    record_property("measured", TRANSFORMERS[name].description | found)


def test_a_checkpoint_with_rows_in_another_order_is_refused(results: dict[str, list[dict[str, Any]]]) -> None:
    for result in results["PP2 VP2, then CP2"]:
        assert result["refused"] == (
            "the checkpoint was written by another version, with actor's queries, keys and values in another order; "
            "go on with that version, or give --resume none"
        )


def test_loss_and_gradients_do_not_depend_on_how_rows_are_dealt(results: dict[str, list[dict[str, Any]]]) -> None:
    whole = one_result(results["whole"])
    for name in ("in micro-batches", "over two ranks", "over two ranks in micro-batches", "shuffled"):
        cut = one_result(results[name])
        assert cut["losses"] == pytest.approx(whole["losses"], abs=2e-6)
        assert cut["grad_norms"] == pytest.approx(whole["grad_norms"], rel=2e-6)


def test_recompute_changes_nothing(results: dict[str, list[dict[str, Any]]]) -> None:
    kept = one_result(results["recompute: kept"])
    for name in RECOMPUTE:
        assert one_result(results[f"recompute: {name}"]) == kept


def test_bfloat16_stays_near_float32(results: dict[str, list[dict[str, Any]]]) -> None:
    full, half = one_result(results["whole"]), one_result(results["bfloat16"])
    difference = (torch.tensor(half["logprobs"]) - torch.tensor(full["logprobs"])).abs()
    assert difference.median() < 1e-2
    assert half["losses"] == pytest.approx(full["losses"], rel=5e-3)


def test_float16_is_nearer_to_float32_and_loses_no_step_to_its_scale(results: dict[str, list[dict[str, Any]]]) -> None:
    full, half, brain = (one_result(results[name]) for name in ("whole", "float16", "bfloat16"))
    difference = (torch.tensor(half["logprobs"]) - torch.tensor(full["logprobs"])).abs()
    assert difference.median() < (torch.tensor(brain["logprobs"]) - torch.tensor(full["logprobs"])).abs().median() / 4
    assert half["losses"] == pytest.approx(full["losses"], rel=1e-3)
    assert half["grad_norms"] == pytest.approx(full["grad_norms"], rel=5e-3)
    # The passes that overflow are made again with less, and a checkpoint has the scale that was found.
    again = one_result(results["float16, scale too high"])
    assert again["losses"] == pytest.approx(full["losses"], rel=1e-3)
    assert again["grad_norms"] == pytest.approx(full["grad_norms"], rel=5e-3)
    assert again["loss_scales"][0] == again["loss_scales"][1] < TOO_HIGH


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_gradient_that_is_not_finite_is_skipped_by_all_ranks(
    dtype: str, results: dict[str, list[dict[str, Any]]]
) -> None:
    for result in results[f"NaN in {dtype}"]:
        assert result["poisoned"]["skipped"] == 1.0
        assert not result["poisoned_moved"]
        assert result["ordinary"]["skipped"] == 0.0
        assert result["ordinary_moved"] and result["ordinary_finite"]


@pytest.mark.parametrize("name", LEFT_OUT)
def test_rows_without_an_advantage_change_nothing(name: str, results: dict[str, list[dict[str, Any]]]) -> None:
    skipped, kept = results[f"{name}, skip"], results[f"{name}, keep"]
    for rank in range(2):
        parameters, expected = (torch.tensor(result[rank]["parameters"]) for result in (skipped, kept))
        assert (parameters - expected).abs().max() < 1e-6
    learned = [metrics["train/learned_fraction"] for metrics in skipped[0]["metrics"]]
    assert learned == pytest.approx([1 / 2, (1 / 6 + 1 / 2) / 2, 1 / 6])
    assert all(metrics["train/learned_fraction"] == 1.0 for metrics in kept[0]["metrics"])
