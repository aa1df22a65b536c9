"""Attention with soft caps and sinks by compiled FlexAttention, beside the explicit one in float32."""

from __future__ import annotations

import pytest
import torch

from interval_cases import CASES, explicit, inputs, interval

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("lengths", [None, [3, 700], [128]], ids=["five rows", "another length", "one block"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_the_explicit_attention(name: str, lengths: list[int] | None) -> None:
    if lengths and "two ranks" in name:
        lengths = [4 * length for length in lengths]  # which two ranks divide
    given = inputs(name, "cuda", torch.bfloat16, lengths)
    wanted = inputs(name, "cuda", torch.bfloat16, lengths)
    for each in (given, wanted):
        for tensor in each.tensors:
            tensor.requires_grad_()
    found, expected = interval(given), explicit(wanted)
    pull = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).cuda()
    (found.float() * pull).sum().backward()
    (expected * pull).sum().backward()
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=2e-2)
    for own, theirs in zip(given.tensors, wanted.tensors, strict=True):
        assert own.grad is not None and theirs.grad is not None
        difference = (own.grad.float() - theirs.grad.float()).norm() / theirs.grad.float().norm()
        print(f"{name}: {difference:.1e}")
        assert difference < 1e-2


def test_memory_grows_with_the_tokens() -> None:
    peaks = []
    for tokens in (4096, 16384):
        given = inputs("both, in a window", "cuda", torch.bfloat16, [tokens])
        for tensor in given.tensors:
            tensor.requires_grad_()
        interval(given).float().sum().backward()  # kernels are made
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        interval(given).float().sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    print(f"peaks: {[f'{peak / 2**20:.0f} MB' for peak in peaks]}")
    assert peaks[1] < 6 * peaks[0]
    assert peaks[1] < 16384 * 16384  # not even a byte for each pair of tokens, of any of the four heads
