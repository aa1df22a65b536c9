"""The linear layers of a rank's experts: in stacks of any size, of widths that grouped products refuse too."""

from __future__ import annotations

import itertools

import pytest
import torch

from expert_layers import EXPERTS, TOKENS, differences, make_layer
from rlhf_megatron.models.experts import behind_each_other
from rlhf_megatron.models.families import mixture

WIDTHS = {"aligned": (48, 32), "odd": (47, 31)}


@pytest.mark.parametrize("together", [1, 3, EXPERTS])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("apart", [False, True])  # in memory, as some of Megatron's buffers have them
def test_layers_equal_one_expert_after_the_other(
    widths: str, together: int, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, columns = WIDTHS[widths]
    monkeypatch.setattr(mixture, "STACK_ELEMENTS", together * rows * columns)
    for dtype, bias, fused in itertools.product((torch.float32, torch.bfloat16), (False, True), (False, True)):
        layer = make_layer(rows, columns, dtype, "cpu", bias, apart)
        assert len(list(layer.parameters())) == -(-EXPERTS // together) + bias
        assert (behind_each_other(layer.weights()) is None) == (apart and together < EXPERTS)
        for tokens in TOKENS.values():
            worst = differences(layer, tokens, fused)
            assert max(worst.values()) < (1e-6 if dtype == torch.float32 else 2**-7), (dtype, bias, fused, worst)


@pytest.mark.parametrize(("experts", "rows", "columns", "sizes"), [
    (8, 2, 2, [8]), (8, 2**13, 2**13, [1] * 8), (8, 2**14, 2**13, [1] * 8), (10, 2**12, 2**12, [3, 3, 4]),
])  # fmt: skip
def test_stacks_are_of_about_equal_size(experts: int, rows: int, columns: int, sizes: list[int]) -> None:
    assert mixture.stack_sizes(experts, rows, columns) == sizes
