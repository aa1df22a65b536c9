"""Functions that ranks run in the tests of training in 8 bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional

from parallel.whole_batches import logprobs, update
from rlhf_megatron.compat import megatron
from rlhf_megatron.rollout.vllm.process_environment import prepare_environment
from rounded_numbers import rounded_blocks

prepare_environment()
megatron.install()

from rlhf_megatron.algorithms.aggregation import token_weights  # noqa: E402
from rlhf_megatron.data.packing import MicroBatch  # noqa: E402
from rlhf_megatron.data.rollout_batch import RolloutBatch, batch_from_rows  # noqa: E402
from rlhf_megatron.loops.sft import negative_log_likelihood  # noqa: E402
from rlhf_megatron.models.architecture import read_architecture  # noqa: E402
from rlhf_megatron.models.hf_files import CheckpointFiles  # noqa: E402
from rlhf_megatron.recipe import ActorSection, OptimizerSection  # noqa: E402
from rlhf_megatron.roles.passes import Passes  # noqa: E402
from rlhf_megatron.roles.role import Role  # noqa: E402
from rlhf_megatron.topology.layout import Layout  # noqa: E402

STEPS = 3


def learn_in_longer_micro_batches(
    model: str, rows: list[Any], cases: dict[str, tuple[dict[str, int], dict[str, Any]]], shares_prompts: bool = False
) -> dict[str, Any]:
    """Return for each case, a layout and a section: what a role computes and learns with and without the padding of
    fp8."""
    batch = batch_from_rows(*rows)
    found = {}
    for name, (layout, section) in cases.items():
        found[name] = [_learned(_role(model, layout, section, "float32"), batch, None)]
        role = _role(model, layout, section, "float32", shares_prompts)
        config = copy.copy(role.shard.config)
        config.fp8 = "e4m3"
        chunks = role.trainer.chunks if role.trainer else []
        role._passes = Passes(
            role.architecture, role.layout, config, role.groups, chunks, shares_prompts=shares_prompts
        )
        sizes: list[int] = []
        role._passes._micro_batch = _recorded(role._passes._micro_batch, sizes)  # type: ignore[method-assign]
        found[name].append(_learned(role, batch, sizes))
    return found


def _recorded(make: Callable[..., MicroBatch], sizes: list[int]) -> Callable[..., MicroBatch]:
    def recorded(*given: Any, **named: Any) -> MicroBatch:
        micro = make(*given, **named)
        sizes.append(len(micro.tokens))
        return micro

    return recorded


def _role(
    model: str, layout: dict[str, int], section: dict[str, Any], dtype: str, shares_prompts: bool = False
) -> Role:
    learning = OptimizerSection(learning_rate=1e-3, weight_decay=0.0)
    architecture = read_architecture(model).for_rows(256)
    actor = ActorSection(**section, optimizer=learning)
    role = Role(
        "actor", architecture, Layout(**layout), range(dist.get_world_size()), actor, dtype=dtype, seed=1,
        optimizer=learning, training_steps=STEPS, shares_prompts=shares_prompts,
    )  # fmt: skip
    with CheckpointFiles(model, architecture) as files:
        role.load(files)
    return role


def _learned(role: Role, batch: RolloutBatch, sizes: list[int] | None) -> dict[str, Any]:
    """Return logprobs, then losses and gradient norms of updates."""
    outputs = logprobs(role, batch)
    weights = token_weights(batch.response_mask, batch.cu_seqlens, "token_mean")
    steps = [update(role, batch, {"weights": weights}, negative_log_likelihood) for _ in range(STEPS)]
    return {
        "logprobs": outputs.logprobs[batch.response_mask].tolist(),
        "losses": [step["loss"] for step in steps],
        "grad_norms": [step["grad_norm"] for step in steps],
        "sizes": sizes,
    }


# ---- on a GPU


def compare_with_bfloat16(model: str, rows: list[Any], section: dict[str, Any]) -> dict[str, Any]:
    """Return gradients of a first update in fp8 beside those in bfloat16, as cosines; its copies of weights at each
    point."""
    batch = batch_from_rows(*rows)
    weights = token_weights(batch.response_mask, batch.cu_seqlens, "token_mean")
    gradients, copies = [], []
    for fp8 in (None, "blockwise"):
        role = _role(model, {}, section | {"fp8": fp8}, "bfloat16")

        def objective(*given: Any, of_role: Role = role) -> Any:
            copies.append(_quantized_weights(of_role))
            return negative_log_likelihood(*given)

        copies.clear()
        logprobs(role, batch)
        copies.append(_quantized_weights(role))
        update(role, batch, {"weights": weights}, objective)
        copies.append(_quantized_weights(role))
        of_role = dict(role.shard.module.named_parameters())
        gradients.append({name: parameter.main_grad.float().flatten() for name, parameter in of_role.items()})
        dtypes = sorted({str(parameter.dtype) for parameter in of_role.values()})
    of_types, of_fp8 = gradients
    return {
        "cosines": {name: float(functional.cosine_similarity(of_types[name], of_fp8[name], 0)) for name in of_types},
        "cosine": float(functional.cosine_similarity(*(torch.cat(list(each.values())) for each in gradients), 0)),
        "copies": copies,
        "dtypes": dtypes,
    }


def _quantized_weights(role: Role) -> int:
    return sum(len(getattr(module, "_fp8_workspaces", ())) for module in role.shard.module.modules())


def multiply_in_fp8(model: str, tokens: int) -> dict[str, Any]:
    """Return (largest difference from the formula, from the product in float32, largest number) of a layer's output,
    and of both of its gradients; and the kernels of DeepGEMM that ran."""
    from megatron.core.fp8_utils import get_fp8_context
    from torch.profiler import ProfilerActivity, profile

    role = _role(model, {}, {"tokens_per_gpu": 512, "fp8": "blockwise"}, "bfloat16")
    layer = role.shard.module.decoder.layers[0].mlp.linear_fc2  # type: ignore[union-attr, index]
    generator = torch.Generator().manual_seed(5)
    weight: Any = layer.weight
    x, gradient = (
        (torch.randn(tokens, width, generator=generator) * torch.randn(tokens, width, generator=generator).exp())
        .bfloat16().cuda() for width in reversed(weight.shape)
    )  # fmt: skip
    x.requires_grad_()
    weight.main_grad.zero_()
    with profile(activities=[ProfilerActivity.CUDA]) as kernels:
        with get_fp8_context(role.shard.config):
            out, _ = layer(x[:, None])
        out.backward(gradient[:, None])
        torch.cuda.synchronize()
    w, given, back = weight.detach().float(), x.detach().float(), gradient.float()
    assert x.grad is not None
    found = {"output": out[:, 0], "of input": x.grad, "of weight": weight.main_grad}
    expected = {
        "output": (rounded_blocks(given, 1) @ rounded_blocks(w).t(), given @ w.t()),
        "of input": (rounded_blocks(back, 1) @ rounded_blocks(w), back @ w),
        "of weight": (rounded_blocks(back.t(), 1) @ rounded_blocks(given.t(), 1).t(), back.t() @ given),
    }
    apart = {
        name: [float((value.float() - other).abs().max()) for other in expected[name]] + [float(value.abs().max())]
        for name, value in found.items()
    }
    return {"apart": apart, "kernels": [each.key for each in kernels.key_averages() if "sm90_fp8_gemm" in each.key]}
