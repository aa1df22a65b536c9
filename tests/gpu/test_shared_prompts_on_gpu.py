"""Shared prompts on a GPU: one call of Transformer Engine's attention, or of FlexAttention, over repeated keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hugging_face import make_model
from parallel.parity import VOCABULARY, case
from parallel.parity_ranks import run_cases
from parallel.ranks import run_ranks
from parallel.test_shared_prompts import grouped_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# What a token's logprob may differ by, and losses and norms relatively: other kernels and another order of sums.
TYPES = {"float32": (5e-3, 1e-2), "bfloat16": (6e-2, 2e-2)}
# Plain, in a window, with soft caps, with sinks, and with keys and values of different widths.
FAMILIES = ["qwen3", "mistral_window", "gemma2", "gpt_oss", "deepseek_v3"]
CASES = [f"{family}, {dtype}" for family in FAMILIES for dtype in TYPES]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    home, cases = tmp_path_factory.mktemp("shared prompts"), {}
    for family in FAMILIES:
        folder = make_model(home / family, family, vocabulary=VOCABULARY)
        for dtype in TYPES:
            for shares in (True, False):
                cases[f"{family}, {dtype}, {shares}"] = case(
                    folder, {}, list(grouped_rows()), 70, dtype=dtype, shares_prompts=shares
                )
    [found] = run_ranks(run_cases, 1, {"cases": cases, "go_on": True}, timeout=900)
    return found


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_steps_are_those_of_rows_by_themselves(name: str, results: dict[str, dict[str, Any]]) -> None:
    shared, alone = results[f"{name}, True"], results[f"{name}, False"]
    for result in (shared, alone):
        assert "failed" not in result, result["failed"]
    largest, relative = TYPES[name.split(", ")[1]]
    assert (torch.tensor(shared["logprobs"]) - torch.tensor(alone["logprobs"])).abs().max() < largest
    assert shared["losses"] == pytest.approx(alone["losses"], rel=relative)
    assert shared["grad_norms"] == pytest.approx(alone["grad_norms"], rel=relative)
    assert all(fraction > 0.05 for fraction in shared["shared_prompt_fractions"])
