"""Low-rank adapters (LoRA, arXiv 2106.09685) by the names and shapes of Hugging Face's tensors, as PEFT has them.

The adapter of a weight W [rows, columns] is A [rank, columns] and B [rows, rank], for W + scale x B A. Both are whole
on every rank that holds a part of the layer, or of the expert; which windows of them a rank's part of W needs follows
from the weight map. PEFT's files are the matter of ``peft_files``. Free of torch, since plans count adapters too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.weight_map import Block, expert_of, layer_of, tensor_shapes
from rlhf_megatron.recipe import LoraSection
from rlhf_megatron.topology.layout import Layout

Factor = Literal["A", "B"]
FACTORS: tuple[Factor, Factor] = ("A", "B")
_FUSED = (
    ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"),
    ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Adaptation:
    """The layers that have adapters, their rank, and the factor of B A."""

    rank: int
    scale: float
    modules: tuple[str, ...]

    @classmethod
    def of(cls, section: LoraSection) -> Adaptation:
        """Return it as a recipe asks for it."""
        return cls(section.rank, section.scale, section.modules)


def factor_of(tensor: str, factor: Factor) -> str:
    """Return the name of A or B for a Hugging Face weight."""
    return f"{tensor.removesuffix('weight')}lora_{factor}.weight"


def adapted_shapes(architecture: Architecture, adaptation: Adaptation) -> dict[str, tuple[int, int]]:
    """Return the Hugging Face weights that have adapters, and their (rows, columns), in the order of the model."""
    return {
        name: (shape[0], shape[1])
        for name, shape in tensor_shapes(architecture).items()
        if layer_of(name) is not None and len(shape) == 2 and module_of(name) in adaptation.modules
    }


def module_of(tensor: str) -> str:
    """Return the name of the linear layer that a Hugging Face weight is of, as recipes and PEFT have it."""
    return tensor.split(".")[-2]


def adaptation_in(architecture: Architecture, adaptation: Adaptation) -> Adaptation:
    """Return ``adaptation`` with those modules alone that the model has."""
    there = {module_of(tensor) for tensor in adapted_shapes(architecture, adaptation)}
    return dataclasses.replace(adaptation, modules=tuple(name for name in adaptation.modules if name in there))


def fused_with(tensor: str) -> list[str]:
    """Return the Hugging Face weights of the linear layer of Megatron's that has ``tensor``, in its order."""
    if layer_of(tensor) is None:
        return [tensor]
    before, module, kind = tensor.rsplit(".", 2)
    layer = next((names for names in _FUSED if module in names), (module,))
    return [f"{before}.{name}.{kind}" for name in layer]


def factor_shapes(architecture: Architecture, adaptation: Adaptation) -> dict[str, tuple[int, ...]]:
    """Return every A and B, and its shape."""
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor, (rows, columns) in adapted_shapes(architecture, adaptation).items():
        shapes[factor_of(tensor, "A")] = (adaptation.rank, columns)
        shapes[factor_of(tensor, "B")] = (rows, adaptation.rank)
    return shapes


def adapter_layout(layout: Layout) -> Layout:
    """Return the layout of adapters on the ranks of a model in ``layout``, in the order of ``adapter_ranks``.

    A stage's ranks all have those of its layers, and of its experts those that they hold in the model, or a part of.
    """
    return Layout(
        pipeline=layout.pipeline,
        data=layout.size // layout.pipeline,
        virtual_pipeline=layout.virtual_pipeline,
        first_stage_layers=layout.first_stage_layers,
        last_stage_layers=layout.last_stage_layers,
        expert=layout.expert,
    )


def adapter_ranks(layout: Layout, ranks: Sequence[int]) -> list[int]:
    """Return the ``ranks`` of a model in ``layout`` in an order in which those that share the experts are neighbours.

    That is their own order, unless an expert is cut over several ranks, which then have all of its adapters.
    """

    def order(position: int) -> tuple[int, ...]:
        at = layout.expert_coordinates(position)
        return at.pipeline, at.data, at.tensor, at.expert

    return [ranks[position] for position in sorted(range(layout.size), key=order)]


def parameter_name(factor: str) -> str:
    """Return the name of A or B as a parameter of torch's, which has no dots."""
    return factor.replace(".", "/")


def adapter_blocks(architecture: Architecture, adaptation: Adaptation, layout: Layout, position: int) -> list[Block]:
    """Return the blocks of the rank at ``position`` of an ``adapter_layout``, as ``megatron_blocks`` gives them for a
    model.

    The names of parameters begin with the chunk's number where a pipeline stage has several.
    """
    chunks = layout.stage_chunks(architecture.layers)[layout.coordinates(position).pipeline]
    chunk_of = {layer: chunk for chunk, layers in enumerate(chunks) for layer in layers}
    several, held = layout.virtual_pipeline > 1, _held_experts(architecture, layout, position)
    blocks = []
    for factor, shape in factor_shapes(architecture, adaptation).items():
        chunk, expert = chunk_of.get(layer_of(factor) or 0), expert_of(factor)
        if chunk is not None and (expert is None or expert in held):
            name = f"{chunk}." * several + parameter_name(factor)
            blocks.append(Block(factor, tuple((0, size) for size in shape), name, (0, 0)))
    return blocks


def _held_experts(architecture: Architecture, layout: Layout, position: int) -> range:
    if architecture.experts is None:
        return range(0)
    count, first = architecture.experts.count // layout.expert, layout.expert_coordinates(position).expert
    return range(first * count, (first + 1) * count)


def whole_adapter_blocks(architecture: Architecture, adaptation: Adaptation) -> list[Block]:
    """Return every A and B whole, under its own name: the destination of an export."""
    shapes = factor_shapes(architecture, adaptation).items()
    return [Block(name, tuple((0, size) for size in shape), name, (0, 0)) for name, shape in shapes]
