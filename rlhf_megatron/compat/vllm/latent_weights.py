"""The two halves of latent attention's up projection, which vLLM keeps beside it after loading, for decoding.

They are views of ``kv_b_proj.weight`` where it is of the engine's type, and follow it; where vLLM made copies they are
written anew, in place, since CUDA graphs hold their addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_HALVES = ("W_UK_T", "W_UV")


def is_derived(parameter: str) -> bool:
    """Return whether vLLM makes a parameter of this name of others, so that no weight is written into it."""
    return parameter.rpartition(".")[2] in _HALVES


@torch.no_grad()
def follow(model: torch.nn.Module) -> int:
    """Bring copies up to date with the up projections of ``model``; return how many there were.

    Raises RuntimeError where a half is of another form than was known, such as a quantized one.
    """
    copies = 0
    for name, module in _attentions(model):
        weight = module.kv_b_proj.weight
        for half, wanted in zip(_HALVES, _halves(module, weight), strict=True):
            held: Tensor = getattr(module, half)
            if held.shape != wanted.shape:
                raise RuntimeError(f"vLLM's {name}.{half} has shape {tuple(held.shape)}, and not {tuple(wanted.shape)}")
            if held.data_ptr() != wanted.data_ptr() or held.stride() != wanted.stride():
                held.data.copy_(wanted)
                copies += 1
    return copies


def _attentions(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if all(hasattr(module, attribute) for attribute in (*_HALVES, "kv_b_proj")):
            yield name, module


def _halves(module: Any, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the part of keys [heads, unturned, rank] and that of values [heads, rank, value], as vLLM splits them."""
    by_head = weight.T.view(module.kv_lora_rank, module.num_heads, module.qk_nope_head_dim + module.v_head_dim)
    of_keys, of_values = by_head.split([module.qk_nope_head_dim, module.v_head_dim], dim=-1)
    return of_keys.permute(1, 2, 0), of_values.transpose(0, 1)
