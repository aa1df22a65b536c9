"""The kernel for sampled tokens on the hardware that it is for, and in vLLM's sampler."""

from __future__ import annotations

import types

import torch

from rlhf_megatron.compat.vllm import logprobs
from rlhf_megatron.rollout.vllm.process_environment import prepare_environment
from token_logprobs import check, check_kernel


def test_the_kernel_equals_float64() -> None:
    check_kernel("cuda")


def test_vllm_takes_it_for_sampled_tokens_while_it_generates_and_its_own_for_more() -> None:
    prepare_environment()
    from vllm.v1.worker.gpu.sample import sampler

    generator = torch.Generator("cuda").manual_seed(1)
    logits = torch.randn(9, 5000, device="cuda", generator=generator)
    tokens = torch.randint(5000, (9,), device="cuda", generator=generator)
    scheduler = types.SimpleNamespace(update_from_output=None)
    before = sampler.compute_topk_logprobs
    with logprobs.kept_as_numbers(scheduler, on_gpu=True):
        one, several = (
            sampler.compute_topk_logprobs(logits, count, tokens, max_per_req_token_ids=0) for count in (0, 3)
        )
    assert sampler.compute_topk_logprobs is before
    torch.cuda.synchronize()
    on_host = one.to_cpu_nonblocking()
    torch.cuda.synchronize()
    numbers = on_host.tolists()
    check(torch.tensor([numbers.slice_request(row, 1) for row in range(9)])[:, 0], logits, tokens.cpu())
    torch.testing.assert_close(several.logprobs[:, 0].cpu(), on_host.values, rtol=0, atol=1e-5)
