"""FlexAttention over packed sequences beside the explicit attention; gradients need a GPU (tests/gpu)."""

from __future__ import annotations

import pytest
import torch

from interval_cases import CASES, Inputs, explicit, inputs, interval
from rlhf_megatron.models.interval_attention import BLOCK, interval_mask, intervals


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_explicit_attention(name: str) -> None:
    given: Inputs = inputs(name, "cpu", torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(interval(given), explicit(given), atol=1e-5, rtol=1e-5)


def test_blocks_out_of_reach_are_skipped() -> None:
    boundaries = torch.tensor([0, 600, 650, 1000])
    low, high = intervals(boundaries, 200, None)
    mask = interval_mask(low, high, 1000)
    dense = mask.to_dense()[0, 0].bool()
    queries, keys = torch.arange(1024)[:, None].clamp(max=999), torch.arange(1024)[None]
    wanted = (keys >= low[queries]) & (keys <= high[queries])
    blocks = wanted.view(8, BLOCK, 8, BLOCK).any(-1).any(1)
    assert torch.equal(dense, blocks)
    assert mask.sparsity() > 60
