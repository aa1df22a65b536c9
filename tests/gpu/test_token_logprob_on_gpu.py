"""The kernel for sampled tokens on the hardware that it is for, and in vLLM's sampler."""

from __future__ import annotations

import pytest
import torch

from rlhf_megatron.rollout import sampled_logprobs
from rlhf_megatron.rollout.environment import prepare_environment
from token_logprobs import check, check_kernel


def test_the_kernel_equals_float64() -> None:
    check_kernel("cuda")


def test_vllm_takes_it_for_sampled_tokens_and_its_own_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_environment()
    from vllm.v1.worker.gpu.sample import logprob

    generator = torch.Generator("cuda").manual_seed(1)
    logits = torch.randn(9, 5000, device="cuda", generator=generator)
    tokens = torch.randint(5000, (9,), device="cuda", generator=generator)
    sampled_logprobs.install()
    one, several = (logprob.compute_topk_logprobs(logits, count, tokens) for count in (0, 3))
    check(one.logprobs[:, 0], logits, tokens.cpu())
    torch.testing.assert_close(several.logprobs[:, :1], one.logprobs, rtol=0, atol=1e-5)
    assert torch.equal(one.logprob_token_ids, tokens[:, None])

    monkeypatch.setattr(sampled_logprobs, "token_logprobs", lambda _, of: of.float())
    one, others = (logprob.compute_topk_logprobs(logits, count, tokens) for count in (0, 3))
    assert torch.equal(one.logprobs[:, 0], tokens.float()) and torch.equal(others.logprobs, several.logprobs)
