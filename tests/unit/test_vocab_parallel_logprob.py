"""Logprob and entropy against torch's own softmax, and their gradients, in float64; cut over two ranks as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel.ranks import run_ranks
from rlhf_megatron.kernels.vocab_parallel_logprob import vocab_parallel_logprobs

TOKENS, REAL, PADDED, TEMPERATURE = 7, 11, 16, 0.7


def inputs() -> tuple[Tensor, Tensor]:
    """Logits [7, 16] of a vocabulary of 11 with 5 padded columns, which are large to be found out; targets [7]."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(TOKENS, PADDED, dtype=torch.float64, generator=generator) * 3
    logits[:, REAL:] = 50.0
    logits[2, 4] = -torch.inf  # a token that a filter has excluded
    return logits, torch.tensor([0, 5, 10, 4, 8, 7, 1])


def expected(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """torch's own: log_softmax over the real columns. Minus infinity becomes -1e6, or 0 * inf would make it NaN."""
    log_probability = (logits[:, :REAL].clamp(min=-1e6) / TEMPERATURE).log_softmax(-1)
    entropy = -(log_probability.exp() * log_probability).sum(-1)
    return log_probability.gather(-1, targets[:, None])[:, 0], entropy


def both_gradients(outputs: tuple[Tensor, Tensor], leaf: Tensor) -> Tensor:
    """Of one fixed sum of both outputs."""
    ramp = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)
    gradient: Tensor = torch.autograd.grad((outputs[0] * ramp + outputs[1] * ramp.flip(0)).sum(), leaf)[0]
    return gradient


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_outputs_and_gradients_equal_torch(chunk: int) -> None:
    logits, targets = inputs()
    logits.requires_grad_()
    outputs = vocab_parallel_logprobs(logits, targets, None, REAL, TEMPERATURE, chunk)
    reference = logits.detach().clone().requires_grad_()
    wanted = expected(reference, targets)
    for got, want in zip(outputs, wanted, strict=True):
        assert torch.allclose(got, want, rtol=1e-12, atol=1e-12)
    gradient = both_gradients(outputs, logits)
    assert not gradient[:, REAL:].any(), "padding has no gradient"
    finite = reference.detach() > -torch.inf
    assert torch.allclose(gradient[finite], both_gradients(wanted, reference)[finite], rtol=1e-10, atol=1e-12)


def test_gradcheck() -> None:
    logits, targets = inputs()
    finite = logits[3:].clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda z: vocab_parallel_logprobs(z, targets[3:], None, REAL, TEMPERATURE, 2), (finite,)
    )


@pytest.mark.parametrize("target", [-100, -1, REAL, PADDED, 10**6])
def test_a_target_outside_the_vocabulary_gives_nan(target: int) -> None:
    logits, targets = inputs()
    targets[1] = target
    logprobs, entropy = vocab_parallel_logprobs(logits, targets, None, REAL)
    assert torch.isnan(logprobs).tolist() == [index == 1 for index in range(TOKENS)]
    assert torch.isfinite(entropy).all()


def test_bfloat16_logits_are_reduced_in_float32() -> None:
    logits, targets = inputs()
    half = logits.bfloat16().requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(half, targets, None, REAL, TEMPERATURE)
    assert logprobs.dtype == entropy.dtype == torch.float32
    wanted = expected(half.detach().double(), targets)
    assert torch.allclose(logprobs.double(), wanted[0], atol=1e-5)
    assert both_gradients((logprobs, entropy), half).dtype == torch.bfloat16


def test_no_tokens() -> None:
    logits = torch.zeros(0, PADDED, requires_grad=True)
    logprobs, entropy = vocab_parallel_logprobs(logits, torch.zeros(0, dtype=torch.long), None, REAL)
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == entropy.shape == (0,)


def one_shard(columns: int) -> dict[str, Any]:
    """What a rank gets from its columns; the last rank has padding, and with 3 ranks nothing else."""
    logits, targets = inputs()
    logits = torch.nn.functional.pad(logits, (0, columns * dist.get_world_size() - PADDED), value=50.0)
    start = dist.get_rank() * columns
    shard = logits[:, start : start + columns].clone().requires_grad_()
    outputs = vocab_parallel_logprobs(shard, targets, dist.group.WORLD, REAL, TEMPERATURE, 3)
    return {"outputs": [output.tolist() for output in outputs], "gradient": both_gradients(outputs, shard).tolist()}


def test_cut_over_ranks_equals_whole() -> None:
    logits, targets = inputs()
    reference = logits.clone().requires_grad_()
    wanted = expected(reference, targets)
    gradient = both_gradients(wanted, reference)
    finite = logits[:, :REAL] > -torch.inf
    results = run_ranks(one_shard, world_size=3, arguments={"columns": 6})
    for result in results:
        for got, want in zip(result["outputs"], wanted, strict=True):
            assert torch.allclose(torch.tensor(got, dtype=torch.float64), want, rtol=1e-12, atol=1e-12)
    joined = torch.cat([torch.tensor(result["gradient"], dtype=torch.float64) for result in results], dim=1)
    assert not joined[:, REAL:].any()
    assert torch.allclose(joined[:, :REAL][finite], gradient[:, :REAL][finite], rtol=1e-10, atol=1e-12)
