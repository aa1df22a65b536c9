"""Logprob and entropy from hidden states against torch's own softmax, with gradients; over ranks, and in Triton."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel.ranks import run_ranks
from rlhf_megatron.kernels import linear_logprob
from rlhf_megatron.kernels.linear_logprob import linear_logprobs, reduce
from triton_kernels import assembly_for_hopper, run_in_interpreter

TOKENS, HIDDEN, REAL, PADDED, TEMPERATURE = 7, 5, 300, 384, 0.7
TARGETS = torch.tensor([0, 127, 128, 299, 64, 255, 1])
BLOCKS = [128, 256, 1 << 30]  # columns
ALL_BYTES = 8 * TOKENS * PADDED


def inputs() -> tuple[Tensor, Tensor]:
    """Return hidden states [7, 5] and weight [384, 5], whose padding from row 300 on is large to be found out."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, generator=generator)
    weight = torch.randn(PADDED, HIDDEN, dtype=torch.float64, generator=generator)
    weight[REAL:] *= 50
    return hidden, weight


def expected(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return torch's own."""
    log_probability = (hidden @ weight[:REAL].T / TEMPERATURE).log_softmax(-1)
    entropy = -(log_probability.exp() * log_probability).sum(-1)
    return log_probability.gather(-1, TARGETS[:, None])[:, 0], entropy


def gradients(outputs: tuple[Tensor, Tensor], leaves: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return those of one fixed sum of both outputs."""
    ramp = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)
    return torch.autograd.grad((outputs[0] * ramp + outputs[1] * ramp.flip(0)).sum(), leaves)


def wanted() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    hidden, weight = (part.requires_grad_() for part in inputs())
    outputs = expected(hidden, weight)
    return outputs, gradients(outputs, (hidden, weight))


@pytest.mark.parametrize(("block_columns", "kept_bytes"), [*((columns, 0) for columns in BLOCKS), (128, ALL_BYTES)])
def test_outputs_and_gradients_equal_torch(block_columns: int, kept_bytes: int) -> None:
    hidden, weight = (part.requires_grad_() for part in inputs())
    outputs = linear_logprobs(hidden, weight, TARGETS, None, REAL, TEMPERATURE, block_columns, kept_bytes)
    found, (values, slopes) = gradients(outputs, (hidden, weight)), wanted()
    for got, want in zip((*outputs, *found), (*values, *slopes), strict=True):
        assert torch.allclose(got, want, rtol=1e-11, atol=1e-12)
    assert not found[1][REAL:].any(), "padding has no gradient"


@pytest.mark.parametrize("kept_bytes", [0, ALL_BYTES])
def test_a_soft_cap_is_that_of_torchs_tanh(kept_bytes: int) -> None:
    hidden, weight = (part.requires_grad_() for part in inputs())
    outputs = linear_logprobs(hidden, weight, TARGETS, None, REAL, TEMPERATURE, 128, kept_bytes, soft_cap=1.5)
    log_probability = (1.5 * torch.tanh(hidden @ weight[:REAL].T / 1.5) / TEMPERATURE).log_softmax(-1)
    entropy = -(log_probability.exp() * log_probability).sum(-1)
    theirs = log_probability.gather(-1, TARGETS[:, None])[:, 0], entropy
    found, slopes = gradients(outputs, (hidden, weight)), gradients(theirs, (hidden, weight))
    for got, want in zip((*outputs, *found), (*theirs, *slopes), strict=True):
        assert torch.allclose(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kept_bytes", [0, ALL_BYTES])
def test_gradcheck(kept_bytes: int) -> None:
    """Which goes back through one forward pass again and again."""
    hidden, weight = inputs()
    leaves = hidden[3:5].requires_grad_(), weight[:20].clone().requires_grad_()
    targets = torch.tensor([3, 11])
    assert torch.autograd.gradcheck(
        lambda h, w: linear_logprobs(h, w, targets, None, 17, TEMPERATURE, kept_bytes=kept_bytes), leaves
    )


@pytest.mark.parametrize("target", [-100, -1, REAL, PADDED, 10**6])
def test_a_target_outside_the_vocabulary_gives_nan(target: int) -> None:
    targets = TARGETS.clone()
    targets[1] = target
    logprobs, entropy = linear_logprobs(*inputs(), targets, None, REAL)
    assert torch.isnan(logprobs).tolist() == [index == 1 for index in range(TOKENS)]
    assert torch.isfinite(entropy).all()


def test_bfloat16_is_reduced_in_float32() -> None:
    hidden, weight = (part.bfloat16().requires_grad_() for part in inputs())
    outputs = linear_logprobs(hidden, weight, TARGETS, None, REAL, TEMPERATURE)
    assert outputs[0].dtype == outputs[1].dtype == torch.float32
    rounded = (hidden @ weight.T).detach()[:, :REAL].double() / TEMPERATURE
    log_probability = rounded.log_softmax(-1)
    assert torch.allclose(outputs[0].double(), log_probability.gather(-1, TARGETS[:, None])[:, 0], atol=1e-5)
    assert all(found.dtype == torch.bfloat16 for found in gradients(outputs, (hidden, weight)))


def test_no_tokens_and_a_frozen_weight() -> None:
    hidden, weight = torch.zeros(0, HIDDEN, requires_grad=True), torch.ones(PADDED, HIDDEN)
    logprobs, entropy = linear_logprobs(hidden, weight, torch.zeros(0, dtype=torch.long), None, REAL)
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == entropy.shape == (0,)


@pytest.mark.parametrize(
    ("learns", "kept_bytes", "widths"),
    [
        (True, 0, [256, REAL - 256]),
        (True, ALL_BYTES - 1, [256, REAL - 256]),
        (True, ALL_BYTES, [REAL]),
        (False, ALL_BYTES, [256, REAL - 256]),
    ],
)
def test_no_more_logits_exist_than_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, learns: bool, kept_bytes: int, widths: list[int]
) -> None:
    seen: list[int] = []

    class Watched(linear_logprob._Torch):
        @staticmethod
        def reduce(logits: Tensor, *rest: Any, **options: Any) -> Tensor:
            seen.append(logits.shape[1])
            return reduce(logits, *rest, **options)

    monkeypatch.setattr(linear_logprob, "_implementation", lambda hidden: Watched)
    hidden, weight = inputs()
    hidden.requires_grad_(learns)
    linear_logprobs(hidden, weight, TARGETS, None, REAL, TEMPERATURE, 256, kept_bytes)
    assert seen == widths


def test_micro_batches_of_about_as_many_tokens_keep_as_much_memory() -> None:
    for tokens in (1, 7, 31, 33, 1000, 52_001, 65_536):
        assert tokens <= linear_logprob._kept_rows(tokens, 1 << 30) <= tokens * 17 / 16
    assert len({linear_logprob._kept_rows(tokens, 1 << 30) for tokens in range(51_300, 53_200)}) == 1
    assert [linear_logprob._kept_rows(tokens, 51_400) for tokens in (51_300, 51_400, 51_401)] == [51_400, 51_400, 0]


def one_shard(columns: int, kept_bytes: int) -> dict[str, Any]:
    """Return what a rank gets from its rows of the weight; the last rank has padding, and with 3 ranks nothing else."""
    hidden, weight = inputs()
    weight = torch.nn.functional.pad(weight, (0, 0, 0, columns * dist.get_world_size() - PADDED), value=50.0)
    start = dist.get_rank() * columns
    leaves = hidden.requires_grad_(), weight[start : start + columns].clone().requires_grad_()
    outputs = linear_logprobs(*leaves, TARGETS, dist.group.WORLD, REAL, TEMPERATURE, 128, kept_bytes)
    found = gradients(outputs, leaves)
    return {"outputs": [part.tolist() for part in outputs], "gradients": [part.tolist() for part in found]}


@pytest.mark.parametrize(("ranks", "columns", "kept_bytes"), [(2, 192, 0), (3, 150, 0), (3, 150, ALL_BYTES)])
def test_cut_over_ranks_equals_whole(ranks: int, columns: int, kept_bytes: int) -> None:
    values, slopes = wanted()
    results = run_ranks(one_shard, world_size=ranks, arguments={"columns": columns, "kept_bytes": kept_bytes})
    for result in results:
        for got, want in zip(result["outputs"], values, strict=True):
            assert torch.allclose(torch.tensor(got, dtype=torch.float64), want, rtol=1e-11, atol=1e-12)
    of_hidden = sum(torch.tensor(result["gradients"][0], dtype=torch.float64) for result in results)
    of_weight = torch.cat([torch.tensor(result["gradients"][1], dtype=torch.float64) for result in results])
    assert torch.allclose(torch.as_tensor(of_hidden), slopes[0], rtol=1e-10, atol=1e-12)
    assert torch.allclose(of_weight[:REAL], slopes[1][:REAL], rtol=1e-10, atol=1e-12)
    assert not of_weight[REAL:].any()


def test_tritons_reductions_equal_torchs() -> None:
    run_in_interpreter("reductions.py")


@pytest.mark.parametrize("kernel", ["_reduce", "_to_gradient"])
@pytest.mark.parametrize("capped", [False, True])
def test_the_kernels_compile_for_a_gpu_with_wide_accesses(kernel: str, capped: bool) -> None:
    pytest.importorskip("triton", reason="the compiler is Triton's")
    from rlhf_megatron.kernels import triton_linear_logprob

    function = getattr(triton_linear_logprob, kernel)
    others = {"logits": "*bf16", "targets": "*i64", "stride": "i32", "columns": "i32"}
    others |= {"per_temperature": "fp32", "soft_cap": "fp32"}
    constants, aligned = {"COLUMNS": linear_logprob.PIECE, "CAPPED": capped}, ["logits", "stride", "columns"]
    types = {name: others.get(name, "*fp32") for name in function.arg_names if name not in constants}
    assembly = assembly_for_hopper(function, types, constants, aligned, triton_linear_logprob.WARPS)
    assert "ld.global.v4.b32" in assembly
