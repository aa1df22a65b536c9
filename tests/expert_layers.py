"""The linear layers of experts against torch's own autograd in float64, one expert after the other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from rlhf_megatron.models.experts import ExpertLinear, ExpertRows

EXPERTS = 8
TOKENS = {"some": [70, 0, 1, 9, 0, 64, 128, 200], "one": [0] * 7 + [1], "none": [0] * 8}


class _Alone:
    def size(self) -> int:
        return 1


def make_layer(
    rows: int, columns: int, dtype: torch.dtype, device: str, bias: bool, apart: bool = False
) -> ExpertLinear:
    """Return one of drawn weights that adds its biases itself; weights, and sums of their gradients, may lie
    ``apart``."""
    sizes = ("expert_model_parallel_size", "expert_tensor_parallel_size", "tensor_model_parallel_size")
    config = SimpleNamespace(use_cpu_initialization=device == "cpu", params_dtype=dtype, **dict.fromkeys(sizes, 1))
    layer = ExpertRows(
        EXPERTS,
        columns,
        rows,
        config=config,
        init_method=torch.nn.init.zeros_,
        bias=bias,
        skip_bias_add=False,
        is_expert=True,
        tp_comm_buffer_name=None,
        pg_collection=SimpleNamespace(expt_tp=_Alone()),
    )
    generator = torch.Generator(device).manual_seed(1)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    weights: list[Any] = layer.weights()
    sums = torch.empty(sum(map(len, weights)), columns, device=device).split(list(map(len, weights)))
    for weight, total in zip(weights, sums, strict=True):
        weight.main_grad = total.clone() if apart else total
        weight.data = weight.clone() if apart else weight.data
    return layer


def differences(layer: ExpertLinear, tokens: list[int], fused: bool) -> dict[str, float]:
    """Return differences of outputs and gradients from those in float64, relative to the largest number of each.

    ``fused``: a weight's gradient is to be added to what is in its ``main_grad``.
    """
    weights: list[Any] = layer.weights()
    device, dtype = weights[0].device, weights[0].dtype
    inputs = torch.randn(sum(tokens), weights[0].shape[1], device=device, dtype=dtype, requires_grad=True)
    upstream = torch.randn(sum(tokens), layer.rows, device=device, dtype=dtype)
    layer.fuse_wgrad_accumulation = fused
    layer.zero_grad()
    for weight in weights:
        weight.main_grad.fill_(1.0)
        weight.grad_added_to_main_grad = False
    outputs, left_to_caller = layer(inputs, tokens)
    outputs.backward(upstream)
    assert left_to_caller is None and all(weight.grad_added_to_main_grad == fused for weight in weights)
    of_weights = torch.cat([weight.main_grad - 1 if fused else weight.grad for weight in weights])
    found = {"outputs": outputs, "inputs": inputs.grad, "weights": of_weights}

    values, matrices = (each.detach().double().requires_grad_() for each in (inputs, torch.cat(weights)))
    shift = torch.zeros(EXPERTS, layer.rows, dtype=torch.float64, device=device, requires_grad=True)
    if layer.bias is not None:
        found["bias"] = layer.bias.grad
        shift.data += layer.bias.detach().view(shift.shape)
    by_expert = zip(values.split(tokens), matrices.view(EXPERTS, layer.rows, -1), shift, strict=True)
    exact = torch.cat([own @ matrix.T + bias for own, matrix, bias in by_expert])
    exact.backward(upstream.double())
    wanted = {"outputs": exact, "inputs": values.grad, "weights": matrices.grad, "bias": shift.grad}
    return {name: _difference(own, wanted[name]) for name, own in found.items() if own is not None and own.numel()}


def _difference(found: torch.Tensor, wanted: torch.Tensor | None) -> float:
    assert wanted is not None and found.numel() == wanted.numel()
    largest = wanted.abs().max().clamp(min=1e-9)
    return float((found.double().view(wanted.shape) - wanted).abs().max() / largest)
