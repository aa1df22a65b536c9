"""The grouped products of experts that every run asks Transformer Engine for: also where experts have no tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhf_megatron.rollout.vllm.process_environment import prepare_environment

EXPERTS, INPUTS, OUTPUTS = 8, 2048, 1536
TOKENS = {
    "some": [700, 0, 1, 9, 0, 64, 128, 2000],
    "one": [0, 0, 0, 0, 0, 0, 0, 1],
    "none": [0] * EXPERTS,
}


def multiply(tokens: list[int]) -> dict[str, Any]:
    """How far the products and gradients of a layer are from those of one expert after the other, in float32."""
    prepare_environment()
    import transformer_engine.pytorch as te

    torch.manual_seed(1)
    layer = te.GroupedLinear(EXPERTS, INPUTS, OUTPUTS, bias=False, params_dtype=torch.bfloat16, device="cuda")
    weights = [getattr(layer, f"weight{expert}") for expert in range(EXPERTS)]
    inputs = torch.randn(sum(tokens), INPUTS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(sum(tokens), OUTPUTS, device="cuda", dtype=torch.bfloat16)
    outputs = layer(inputs, tokens)
    outputs.backward(upstream)
    ours = [outputs, inputs.grad, *[weight.grad for weight in weights]]

    exact = [tensor.detach().float().requires_grad_() for tensor in (inputs, *weights)]
    parts = [part @ weight.t() for part, weight in zip(exact[0].split(tokens), exact[1:], strict=True)]
    whole = torch.cat(parts)
    whole.backward(upstream.float())
    theirs = [whole, *[tensor.grad for tensor in exact]]
    return {
        "differences": [
            float((one.float() - other).abs().max() / other.abs().max())
            for one, other in zip(ours, theirs, strict=True)
            if one is not None and other is not None and other.numel() and other.abs().max() > 0
        ],
        "shape": list(outputs.shape),
    }


@pytest.mark.parametrize("name", TOKENS)
def test_experts_may_have_no_tokens(name: str) -> None:
    found = multiply(TOKENS[name])
    assert found["shape"] == [sum(TOKENS[name]), OUTPUTS]
    assert max(found["differences"], default=0.0) < 2**-7
    assert len(found["differences"]) == (2 + sum(map(bool, TOKENS[name])) if name != "none" else 0)
