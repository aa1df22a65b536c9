"""Gradients that are added to sums: of rows, against torch's own of an embedding; of an output layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding

from rlhf_megatron.kernels.linear_logprob import linear_logprobs
from rlhf_megatron.models.gradient_sums import add_to_rows

VOCABULARY, HIDDEN = 11, 3


@pytest.mark.parametrize("rows", [[4], [4, 4, 4], [0, 10, 3, 0, 3, 3, 7], list(range(11)), []], ids=str)
def test_rows_get_what_autograd_gives_an_embedding(rows: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    before = torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64, generator=generator)
    values = torch.randn(len(rows), HIDDEN, dtype=torch.float64, generator=generator)
    ids, weight = torch.tensor(rows, dtype=torch.int64), torch.zeros_like(before, requires_grad=True)
    (embedding(ids, weight) * values).sum().backward()
    assert weight.grad is not None
    total = before.clone()
    add_to_rows(total, ids, values)
    assert torch.allclose(total, before + weight.grad, rtol=0, atol=1e-14)


def test_rows_are_summed_in_float32() -> None:
    ones = torch.full((1000, 2), 1 + 2**-7, dtype=torch.bfloat16)
    total = torch.zeros(3, 2)
    add_to_rows(total, torch.ones(1000, dtype=torch.int64), ones)
    assert total.tolist() == [[0, 0], [1007.8125, 1007.8125], [0, 0]], "in bfloat16 it would stay at 256"


@pytest.mark.parametrize("kept_bytes", [0, 1 << 20])
def test_an_output_layers_gradient_is_added_to_its_sum(kept_bytes: int) -> None:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    hidden, weight, before = draw(5, HIDDEN).requires_grad_(), draw(VOCABULARY, HIDDEN).requires_grad_(), draw(11, 3)
    targets, total = torch.tensor([1, 10, 0, 1, 5]), before.clone()
    for weight_sum in (None, total):
        logprobs, entropy = linear_logprobs(
            hidden, weight, targets, None, VOCABULARY, 0.7, 4, kept_bytes, weight_sum=weight_sum
        )
        (logprobs * torch.arange(5) + entropy).sum().backward()
        if weight_sum is None:
            assert weight.grad is not None and hidden.grad is not None
            expected, of_hidden = weight.grad.clone(), hidden.grad.clone()
    assert torch.allclose(total, before + expected, rtol=0, atol=1e-13)
    assert torch.equal(hidden.grad, 2 * of_hidden), "the other gradient is as it was"
