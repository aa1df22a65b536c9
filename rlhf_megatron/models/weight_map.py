"""Locations of every weight: one table from Hugging Face tensors to Megatron's shards and to vLLM's.

The blocks of a rank, in either framework's layout, follow from the architecture and the rank's place alone; loading,
export and regathering are all made from them. The files of ``families`` have the tables. Nothing here touches a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.families import FAMILIES
from rlhf_megatron.models.rectangles import SCORE, Block, Implementation, Region, Shapes
from rlhf_megatron.models.stacked import Stacked
from rlhf_megatron.topology.layout import Layout

__all__ = [
    "SCORE",
    "Block",
    "Implementation",
    "Region",
    "expert_of",
    "has_rollout_table",
    "is_expert",
    "joins_adapters",
    "layer_of",
    "megatron_blocks",
    "rollout_blocks",
    "stacked_tensors",
    "stays_float32",
    "tensor_shapes",
    "whole_blocks",
]


def is_expert(name: str) -> bool:
    """Return whether a parameter, or a checkpoint's tensor, is of an expert, which other ranks than the rest share.

    An expert that all tokens reach is none. Parameters of adapters have slashes for dots.
    """
    return ".experts." in name.replace("/", ".")


def expert_of(tensor: str) -> int | None:
    """Return the number of the expert that a Hugging Face tensor belongs to, if it belongs to one."""
    _, is_there, behind = tensor.partition(".experts.")
    return int(behind.split(".")[0]) if is_there else None


def stays_float32(name: str) -> bool:
    """Return whether a parameter, or a checkpoint's tensor, is float32 whatever the model's type: correction biases
    of experts, which decide between scores that bfloat16 would make equal."""
    return name.endswith(("e_score_correction_bias", ".expert_bias"))


def layer_of(tensor: str) -> int | None:
    """Return the decoder layer that a Hugging Face tensor belongs to, if it belongs to one."""
    return int(tensor.split(".")[2]) if tensor.startswith("model.layers.") else None


def tensor_shapes(architecture: Architecture) -> Shapes:
    """Return every tensor of the model and its shape, by the checkpoint's names; tied embeddings are listed once.

    What ``stacked_tensors`` has is one in checkpoints.
    """
    return FAMILIES[architecture.family].tensor_shapes(architecture)


def stacked_tensors(architecture: Architecture) -> Mapping[str, Stacked]:
    """Return those tensors of a checkpoint that stack several of ``tensor_shapes``; the others have these' own
    names."""
    return FAMILIES[architecture.family].stacked_tensors(architecture)


def megatron_blocks(
    architecture: Architecture, layout: Layout, position: int, implementation: Implementation
) -> list[Block]:
    """Return the blocks of the rank at ``position`` of a Megatron layout. Data-parallel ranks hold the same."""
    return FAMILIES[architecture.family].megatron_blocks(architecture, layout, position, implementation)


def joins_adapters(architecture: Architecture) -> bool:
    """Return whether PEFT reads the adapters of a layer's experts joined alone (``families.contract``)."""
    return FAMILIES[architecture.family].joint_adapters


def has_rollout_table(architecture: Architecture) -> bool:
    """Return whether ``rollout_blocks`` knows the model; other blocks are learned from vLLM (``learned_map``)."""
    return FAMILIES[architecture.family].has_rollout_table


def rollout_blocks(
    architecture: Architecture,
    tensor: int,
    tensor_rank: int,
    expert_parallel: bool = False,
    only_layers: Iterable[int] | None = None,
) -> list[Block]:
    """Return the blocks of tensor rank ``tensor_rank`` of ``tensor`` of one vLLM replica, always with a language head.

    With ``expert_parallel`` a rank holds some experts whole, else a part of each. ``only_layers`` leaves the other
    decoder layers out, for one who has no business with them.
    """
    layers = range(architecture.layers) if only_layers is None else sorted(only_layers)
    family = FAMILIES[architecture.family]
    if not family.has_rollout_table:
        raise ValueError(f"{architecture.family}: what vLLM's ranks hold is learned, and not in a table")
    return family.rollout_blocks(architecture, tensor, tensor_rank, expert_parallel, layers)


def whole_blocks(architecture: Architecture) -> list[Block]:
    """Return every tensor whole, under its own name: the destination of an export."""
    return [
        Block(name, tuple((0, size) for size in shape), name, (0,) * len(shape))
        for name, shape in tensor_shapes(architecture).items()
    ]
