"""Changes of Transformer Engine, private names of it that are used, and the versions that were run."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.compat.patches import NONE_FOUND, patch
from rlhf_megatron.compat.private_names import REGISTRY, PrivateName
from rlhf_megatron.kernels.block_quantization import BLOCK, TYPE

PACKAGES = ("transformer-engine",)
KNOWN = {"first": "2.20.2", "last": "2.20.2"}
"""The versions that were run."""
_MODULES = "transformer_engine.pytorch.module"
_STORAGE = "transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage"
_LAYERS = ("linear", "layernorm_linear")
_LARGE = 2**25  # weights; with fewer DeepGEMM is not faster (tools/bench/fp8_training_products.py)
_OTHERWISE = "training in 8 bits multiplies by Transformer Engine's own kernels"

NAMES = (
    PrivateName(
        _MODULES + ".base",
        "TransformerEngineBaseModule._fp8_workspaces",
        "weights in 8 bits between passes",
        absent="they stay on the GPU",
    ),
    *(PrivateName(f"{_MODULES}.{layer}", "general_gemm", "products") for layer in _LAYERS),
    *(
        PrivateName(
            _STORAGE,
            f"Float8BlockwiseQTensorStorage.{name}",
            "numbers in 8 bits and their scales",
        )
        for name in (
            "_rowwise_data",
            "_rowwise_scale_inv",
            "_columnwise_data",
            "_columnwise_scale_inv",
            "_is_2D_scaled",
        )
    ),
)

REGISTRY[PACKAGES] = NAMES


def forget_quantized_weights(model: torch.nn.Module) -> None:
    """Free the copies in 8 bits that layers keep of their weights, and of the transposes; the next pass makes them.

    They serve all micro-batches between two optimizer steps. Kept longer they would take two bytes a weight from the
    rollout, and be those of weights before a step.
    """
    for module in model.modules():
        getattr(module, "_fp8_workspaces", {}).clear()


@patch(
    *PACKAGES,
    **KNOWN,
    why="cuBLAS takes longer for products of large layers by blocks than DeepGEMM, to the same bits",
    upstream=NONE_FOUND,
)
def multiply_by_deep_gemm() -> None:
    """Have linear layers with 2^25 weights or more multiply in 8 bits by blocks with DeepGEMM, where that runs."""
    for name in _LAYERS:
        layer: Any = importlib.import_module(f"{_MODULES}.{name}")
        layer.general_gemm = with_deep_gemm(layer.general_gemm, _LARGE)


def with_deep_gemm(usual: Callable[..., Any], large: int) -> Callable[..., Any]:
    """Return Transformer Engine's product, with DeepGEMM for ``large`` weights or more where it can be.

    ``layout`` is "TN" for the output of a layer, "NN" for the gradient of its input; that of its weights stays with
    Transformer Engine.
    """
    in_blocks = importlib.import_module(_STORAGE).Float8BlockwiseQTensorStorage

    @functools.wraps(usual)
    def product(a: Any, b: Any, *unnamed: Any, **named: Any) -> Any:
        if not unnamed and isinstance(a, in_blocks) and isinstance(b, in_blocks) and _is_plain(named):
            output = _product(a, b, large, **named)
            if output is not None:
                return output, None, None, None
        return usual(a, b, *unnamed, **named)

    return product


def _is_plain(named: dict[str, Any]) -> bool:
    """Say whether a product is one of weights and nothing more: no bias or activation, no exchange with other GPUs, not
    added to anything, in bfloat16."""
    more = ("quantization_params", "bias", "gelu_in", "ub", "extra_output")
    return (
        named.get("layout", "TN") in ("TN", "NN")
        and named.get("out_dtype") == torch.bfloat16
        and named.get("alpha", 1.0) == 1.0
        and all(named.get(name) is None for name in more)
        and not any(named.get(name) for name in ("gelu", "accumulate", "bulk_overlap"))
    )


def _product(
    weight: Any, values: Any, large: int, *, layout: str = "TN", out: Tensor | None = None, **_: Any
) -> Tensor | None:
    """Return the output of a layer, or the gradient of its input; None where Transformer Engine has to multiply."""
    from rlhf_megatron.compat.deep_gemm import multiply

    side = "rowwise" if layout == "TN" else "columnwise"
    matrix, tokens = _numbers(weight, side), _numbers(values, "rowwise")
    large_blocks = matrix.numel() >= large and all(width % BLOCK == 0 for width in matrix.shape)
    if not large_blocks or not weight._is_2D_scaled or values._is_2D_scaled:
        return None
    scales = getattr(weight, f"_{side}_scale_inv")[:, : matrix.shape[1] // BLOCK].contiguous()  # they are padded to 4
    of_tokens = values._rowwise_scale_inv.t()[: len(tokens)]  # as [blocks, tokens], which are padded to 4
    output = tokens.new_empty(len(tokens), len(matrix), dtype=torch.bfloat16) if out is None else out
    shaped = output.view(len(tokens), len(matrix))
    return output if multiply((tokens, of_tokens), (matrix, scales), shaped, _OTHERWISE) else None


def _numbers(values: Any, side: str) -> Tensor:
    """Return [n, m] in 8 bits; of the "columnwise" side the transpose, [m, n], with blocks of its rows."""
    stored: Tensor = getattr(values, f"_{side}_data")
    return stored.view(-1, stored.shape[-1]).view(TYPE)
