"""Logprobs without logits on a GPU, where Triton reduces, against float64 on the same rounded logits."""

from __future__ import annotations

import pytest
import torch

from rlhf_megatron.kernels.linear_logprob import linear_logprobs

pytestmark = pytest.mark.gpu

TOKENS, HIDDEN, REAL, PADDED, TEMPERATURE = 333, 64, 5000, 5120, 0.8


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-5)])
@pytest.mark.parametrize(
    ("block_columns", "kept_bytes", "cap"), [(128, 0, None), (1 << 30, 0, None), (128, 1 << 30, None), (128, 0, 3.0)]
)
def test_outputs_equal_float64(
    dtype: torch.dtype, bound: float, block_columns: int, kept_bytes: int, cap: float | None
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    generator = torch.Generator("cuda").manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=dtype, generator=generator)
    weight = torch.randn(PADDED, HIDDEN, device="cuda", dtype=dtype, generator=generator) / 4
    targets = torch.randint(REAL, (TOKENS,), device="cuda", generator=generator)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    outputs = linear_logprobs(*leaves, targets, None, REAL, TEMPERATURE, block_columns, kept_bytes, cap)

    # bfloat16 products are rounded before they are reduced, and so they are here.
    logits = (hidden @ weight.T).detach()[:, :REAL].double().requires_grad_()
    capped = logits if cap is None else cap * torch.tanh(logits / cap)
    log_probability = (capped / TEMPERATURE).log_softmax(-1)
    wanted = (
        log_probability.gather(-1, targets[:, None])[:, 0],
        -(log_probability.exp() * log_probability).sum(-1),
    )
    for got, want in zip(outputs, wanted, strict=True):
        assert (got - want).abs().max() < bound
    ramp = torch.linspace(-1, 2, TOKENS, device="cuda")
    found = torch.autograd.grad((outputs[0] * ramp + outputs[1] * ramp.flip(0)).sum(), leaves)
    (of_logits,) = torch.autograd.grad((wanted[0] * ramp + wanted[1] * ramp.flip(0)).sum(), logits)
    expected = of_logits @ weight.detach()[:REAL].double(), of_logits.T @ hidden.detach().double()
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for got, want in zip((found[0], found[1][:REAL]), expected, strict=True):
        assert (got - want).norm() < tolerance * want.norm()
    assert not found[1][REAL:].any()


def test_kept_logits_may_be_more_than_four_billion() -> None:
    """Where a place no longer fits 32 bits; the head of a 0.5B model over a large micro-batch."""
    tokens, vocabulary = 32768, 151_936
    if torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("needs 20 GB of GPU memory")
    generator = torch.Generator("cuda").manual_seed(2)
    hidden = torch.randn(tokens, 896, device="cuda", dtype=torch.bfloat16, generator=generator)
    weight = torch.randn(vocabulary, 896, device="cuda", dtype=torch.bfloat16, generator=generator) / 30
    targets = torch.randint(vocabulary, (tokens,), device="cuda", generator=generator)
    ramp = torch.linspace(-1, 2, tokens, device="cuda")
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    found = []
    for kept_bytes in (0, 2 * tokens * vocabulary):
        outputs = linear_logprobs(*leaves, targets, None, vocabulary, kept_bytes=kept_bytes)
        found.append((*outputs, *torch.autograd.grad((outputs[0] * ramp + outputs[1] * ramp.flip(0)).sum(), leaves)))
    for blocks, whole, bound in zip(*found, (1e-5, 1e-5, 1e-2, 1e-2), strict=True):
        assert (blocks.float() - whole.float()).norm() < bound * blocks.float().norm()
