"""Checkpoints of earlier versions, in which each expert was a parameter of its own."""

from __future__ import annotations

from collections.abc import Iterable

from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.rectangles import Implementation
from rlhf_megatron.models.weight_map import Block, expert_of
from rlhf_megatron.topology.layout import Layout

_NAMES: dict[Implementation, str] = {
    "local": "local_experts.{expert}.{linear}.{kind}",
    "transformer_engine": "{linear}.{kind}{expert}",
}


def experts_apart(
    a: Architecture, layout: Layout, blocks: Iterable[Block], implementation: Implementation
) -> list[Block]:
    """Return Megatron's ``blocks`` in the parameters that such a version had."""
    if a.experts is None:
        return list(blocks)
    held, width = a.experts.count // layout.expert, a.experts.feed_forward // layout.expert_parts
    rows = {"linear_fc1": 2 * width, "linear_fc2": a.hidden}
    separate = []
    for block in blocks:
        expert = expert_of(block.tensor)
        if expert is not None:
            module, _, name = block.parameter.partition(".experts.")
            linear, parameter = name.split(".")
            kind, (row, *columns) = parameter.rstrip("0123456789"), block.offset
            name = _NAMES[implementation].format(expert=expert % held, linear=linear, kind=kind)
            block = block._replace(parameter=f"{module}.experts.{name}", offset=(row % rows[linear], *columns))
        separate.append(block)
    return separate
