"""The grouped products of experts on a GPU, and the kernel that adds their gradients to Megatron's sums."""

from __future__ import annotations

import pytest
import torch

from expert_layers import TOKENS, differences, make_layer
from rlhf_megatron.models.families import mixture

ROWS, COLUMNS = 1536, 2048


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("apart", [True, False])
def test_layers_equal_one_expert_after_the_other(
    dtype: torch.dtype, fused: bool, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixture, "STACK_ELEMENTS", 3 * ROWS * COLUMNS)
    layer = make_layer(ROWS, COLUMNS, dtype, "cuda", bias=True, apart=apart)
    for name, tokens in TOKENS.items():
        worst = differences(layer, tokens, fused)
        assert max(worst.values()) < 2**-7, (name, worst)
    if fused and dtype == torch.bfloat16:  # gradients as exact as their factors
        assert differences(layer, TOKENS["some"], fused)["weights"] < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_equals_float64(dtype: torch.dtype) -> None:
    from grouped_gradients import check_kernel

    check_kernel("cuda", dtype)
