"""Training in 8 bits by Transformer Engine's block-wise scaling, through Megatron's ``fp8_recipe="blockwise"``.

Activations and gradients have a scale for each 1 x 128 numbers, weights for each 128 x 128 (DeepSeek-V3, arXiv
2412.19437, section 3.3). Here: what machine and model must have for it. Transformer Engine multiplies, or DeepGEMM.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_megatron.errors import UserError
from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.rectangles import Implementation
from rlhf_megatron.recipe.role_sections import Fp8Recipe

BLOCK = 128
"""Rows and columns of weights, or numbers of a token, that have one scale."""
TOKENS = BLOCK
"""Tokens of a rank come in multiples of this: those of one scale in the gradients of weights. With fewer Transformer
Engine gathers sequence-parallel activations unquantized."""
_COLUMNS = 16  # of which every width is a multiple: 16 bytes, asked for by cuBLAS; the last block may be smaller
_HOPPER = 9  # major compute capability


def check_fp8(role: str, recipe: Fp8Recipe, implementation: Implementation) -> None:
    """Have this process train in 8 bits; UserError where it cannot: without Transformer Engine or a GPU that does."""
    import torch  # here, since plans ask below

    key = f"{role}.fp8={recipe}"
    if not torch.cuda.is_available():
        raise UserError(f"{key} needs a Hopper GPU, and there is none; leave it out")
    if torch.cuda.get_device_capability()[0] != _HOPPER:
        raise UserError(f"{key} needs a Hopper GPU; this is {torch.cuda.get_device_name()}: leave it out")
    if implementation != "transformer_engine":
        raise UserError(f"{key} needs Transformer Engine; it is not installed here: install it, or leave fp8 out")
    from transformer_engine.pytorch.quantization import check_fp8_block_scaling_support

    supported, reason = check_fp8_block_scaling_support()
    if not supported:
        raise UserError(f"{key}: {reason}")
    from rlhf_megatron.compat.transformer_engine import multiply_by_deep_gemm

    multiply_by_deep_gemm()


def unsupported_in_fp8(architecture: Architecture, tensor: int) -> str | None:
    """Return why a model whose layers are cut into ``tensor`` parts is not trained in 8 bits; None where it is."""
    present = _part_unlike_dense_layers(architecture)
    if present:
        return f"the model has {present}, for which it is not available in this version"
    return _odd_width(_widths(architecture, tensor), _COLUMNS)


def parts_of_blocks(architecture: Architecture, tensor: int) -> str | None:
    """Return which width of a GPU's linear layers, of ``tensor`` that share them, is not made of whole blocks, as a
    rollout by blocks needs them; None if all are, or layers are of other kinds, which the engine looks at."""
    if _part_unlike_dense_layers(architecture):
        return None
    widths = _widths(architecture, tensor)
    joined = widths["the heads of a GPU"] + 2 * widths.pop("the key-value heads of a GPU")
    widths |= {"the heads of a GPU, queries, keys and values": joined}  # one layer of vLLM's
    return _odd_width(widths, BLOCK)


def _part_unlike_dense_layers(architecture: Architecture) -> str | None:
    """Return which part of the model has other products than a dense layer; None where none has."""
    parts = {
        "experts": architecture.experts,
        "latent attention": architecture.latent,
        "delta nets": architecture.delta_net,
        "heads of two sizes": architecture.full_heads,
    }
    return next((name for name, part in parts.items() if part), None)


def _odd_width(widths: Mapping[str, int], multiple: int) -> str | None:
    """Return the first width that is no such multiple, as words; None where all are."""
    odd = next((f"{name} {width}" for name, width in widths.items() if width % multiple), None)
    return odd and f"widths must be multiples of {multiple}, and {odd} is not"


def _widths(architecture: Architecture, tensor: int) -> dict[str, int]:
    """Return widths of a dense layer's products on one of ``tensor`` GPUs, by name."""
    a = architecture
    return {
        "hidden_size": a.hidden,
        "the heads of a GPU": a.heads * a.head_dim // tensor,
        "the key-value heads of a GPU": max(1, a.key_value_heads // tensor) * a.head_dim,
        "the columns of a GPU (intermediate_size)": a.feed_forward // tensor,
    }
