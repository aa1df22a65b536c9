"""Micro-batches padded as Transformer Engine's fp8 asks for, in float32: a role computes and learns the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hugging_face import make_model, random_rows
from parallel.fp8_ranks import learn_in_longer_micro_batches
from parallel.ranks import run_ranks
from parallel.test_shared_prompts import grouped_rows
from rlhf_megatron.models.fp8 import TOKENS
from rounded_numbers import rounded_blocks

SECTION = {"tokens_per_gpu": 60}
TWO_RANKS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "TP2": ({"tensor": 2}, SECTION),
    "TP2, sequence parallel": ({"tensor": 2}, SECTION | {"sequence_parallel": True}),
    "CP2": ({"context": 2}, SECTION),
    "PP2": ({"pipeline": 2}, SECTION),
    "PP2 of two chunks": ({"pipeline": 2, "virtual_pipeline": 2}, SECTION),
}


def check(found: list[dict[str, Any]]) -> None:
    plain, padded = found
    difference = torch.tensor(padded["logprobs"]) - torch.tensor(plain["logprobs"])
    assert difference.abs().max() < 1e-5
    assert padded["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert padded["grad_norms"] == pytest.approx(plain["grad_norms"], rel=1e-5)
    assert padded["losses"][-1] < padded["losses"][0]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = make_model(tmp_path_factory.mktemp("fp8") / "model")
    arguments = {"model": str(folder), "rows": list(random_rows(12, 250)), "cases": TWO_RANKS}
    [first, _] = run_ranks(learn_in_longer_micro_batches, 2, arguments)
    return dict(first)


@pytest.mark.parametrize("name", TWO_RANKS)
def test_padding_changes_no_output_and_no_gradient(name: str, results: dict[str, Any]) -> None:
    check(results[name])
    layout, section = TWO_RANKS[name]
    of_layers = TOKENS * layout.get("tensor", 1) if section.get("sequence_parallel") else TOKENS
    assert {size % of_layers for size in results[name][1]["sizes"]} == {0}


def test_padding_of_shared_prompts(tmp_path: Path) -> None:
    arguments = {
        "model": str(make_model(tmp_path / "model")),
        "rows": list(grouped_rows()),
        "cases": {"one rank": ({}, SECTION)},
        "shares_prompts": True,
    }
    [first] = run_ranks(learn_in_longer_micro_batches, 1, arguments)
    check(first["one rank"])
    assert {size % TOKENS for size in first["one rank"][1]["sizes"]} == {0}


def test_the_formula_of_blocks() -> None:
    values = torch.randn(200, 300, generator=torch.Generator().manual_seed(1))
    values[:128, 128:256] *= 1e4
    left = rounded_blocks(values, 128)
    assert torch.equal(rounded_blocks(left, 128), left)  # all are numbers of e4m3
    relative = (left - values).abs() / values.abs()
    assert relative[values.abs() > 1e-2 * values.abs().max()].max() <= 2**-4  # half of the last of 3 bits
    assert (rounded_blocks(values, 1) - values).abs().sum() < (left - values).abs().sum()
