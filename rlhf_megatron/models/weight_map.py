"""Where every weight lives: one table from Hugging Face tensors to Megatron's shards and to vLLM's.

A ``Block`` says that a rectangle of one Hugging Face tensor is stored at an offset of one local parameter. The blocks
of a rank, in either framework's layout, follow from the architecture and the rank's place alone; loading, export and
regathering are all made from them. Nothing here touches a tensor.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.topology.layout import Layout

Region = tuple[tuple[int, int], ...]  # (start, stop) in each dimension of a Hugging Face tensor
Implementation = Literal["local", "transformer_engine"]


class Block(NamedTuple):
    """``parameter[offset : offset + extent]`` holds ``tensor[region]``; extents are the region's.

    A parameter that stacks the matrices of experts counts as one matrix, with one expert's rows behind another's.
    """

    tensor: str
    region: Region
    parameter: str
    offset: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Slot:
    """The place of one Hugging Face tensor in a fused parameter, cut by rows or columns over the tensor ranks.

    ``cut``: "columns", "whole" (replicated), "vocabulary" (rows, padded), "gate" and "up" (rows, one behind the other)
    or a role in attention ("query", "key", "value").
    """

    tensor: str
    cut: str
    parameter: str


SCORE = "score.weight"  # the scalar head, as in Hugging Face's sequence classification

# Megatron's names, which differ where Transformer Engine fuses a norm with the linear layer after it and where it keeps
# the experts of a rank together.
_MEGATRON_NORMS: dict[Implementation, tuple[str, str]] = {
    "local": ("input_layernorm.weight", "pre_mlp_layernorm.weight"),
    "transformer_engine": ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"),
}
_MEGATRON_EXPERTS: dict[Implementation, str] = {
    "local": "mlp.experts.local_experts.{expert}.{linear}.weight",
    "transformer_engine": "mlp.experts.{linear}.weight{expert}",
}
_ROUTER_NORM = "pre_mlp_layernorm.weight"  # in front of a router there is no linear layer to fuse it with


def is_expert(parameter: str) -> bool:
    """Whether a parameter of Megatron's is one of an expert, which is cut over other ranks than the rest."""
    return ".mlp.experts." in parameter


def layer_of(tensor: str) -> int | None:
    """The decoder layer that a Hugging Face tensor belongs to, if it belongs to one."""
    return int(tensor.split(".")[2]) if tensor.startswith("model.layers.") else None


@functools.cache
def tensor_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor of the Hugging Face checkpoint and its shape; tied embeddings are listed once."""
    a = architecture
    query, key_value = a.heads * a.head_dim, a.key_value_heads * a.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (a.vocabulary, a.hidden)}
    for index in range(a.layers):
        layer = f"model.layers.{index}."
        shapes[layer + "input_layernorm.weight"] = (a.hidden,)
        for part, rows in (("q", query), ("k", key_value), ("v", key_value)):
            shapes[f"{layer}self_attn.{part}_proj.weight"] = (rows, a.hidden)
            if a.qkv_bias:
                shapes[f"{layer}self_attn.{part}_proj.bias"] = (rows,)
            if a.query_key_norm and part != "v":
                shapes[f"{layer}self_attn.{part}_norm.weight"] = (a.head_dim,)
        shapes[layer + "self_attn.o_proj.weight"] = (a.hidden, query)
        shapes[layer + "post_attention_layernorm.weight"] = (a.hidden,)
        blocks, width = [layer + "mlp."], a.feed_forward
        if a.experts is not None:
            shapes[layer + "mlp.gate.weight"] = (a.experts.count, a.hidden)
            blocks = [f"{layer}mlp.experts.{expert}." for expert in range(a.experts.count)]
            width = a.experts.feed_forward
        for block in blocks:
            shapes[block + "gate_proj.weight"] = (width, a.hidden)
            shapes[block + "up_proj.weight"] = (width, a.hidden)
            shapes[block + "down_proj.weight"] = (a.hidden, width)
    shapes["model.norm.weight"] = (a.hidden,)
    if a.head == "scalar":
        shapes[SCORE] = (1, a.hidden)
    elif not a.tied_embeddings:
        shapes["lm_head.weight"] = (a.vocabulary, a.hidden)
    return shapes


def _layer_slots(a: Architecture, tensor_prefix: str, names: dict[str, str]) -> Iterator[_Slot]:
    """The slots of one decoder layer; ``names`` gives the parameter of each part, in either framework."""
    yield _Slot(tensor_prefix + "input_layernorm.weight", "whole", names["input_norm"])
    for part, cut in (("q", "query"), ("k", "key"), ("v", "value")):
        yield _Slot(f"{tensor_prefix}self_attn.{part}_proj.weight", cut, names["qkv"] + ".weight")
        if a.qkv_bias:
            yield _Slot(f"{tensor_prefix}self_attn.{part}_proj.bias", cut, names["qkv"] + ".bias")
    if a.query_key_norm:
        yield _Slot(tensor_prefix + "self_attn.q_norm.weight", "whole", names["query_norm"])
        yield _Slot(tensor_prefix + "self_attn.k_norm.weight", "whole", names["key_norm"])
    yield _Slot(tensor_prefix + "self_attn.o_proj.weight", "columns", names["output"])
    yield _Slot(tensor_prefix + "post_attention_layernorm.weight", "whole", names["mlp_norm"])
    if a.experts is not None:
        yield _Slot(tensor_prefix + "mlp.gate.weight", "whole", names["router"])
        return  # the experts are cut over other ranks than the rest of the layer
    yield _Slot(tensor_prefix + "mlp.gate_proj.weight", "gate", names["gate_up"])
    yield _Slot(tensor_prefix + "mlp.up_proj.weight", "up", names["gate_up"])
    yield _Slot(tensor_prefix + "mlp.down_proj.weight", "columns", names["down"])


def _split(size: int, parts: int, part: int) -> tuple[int, int]:
    return size // parts * part, size // parts * (part + 1)


def _attention_blocks(
    a: Architecture, cut: str, parts: int, part: int, repeats: bool
) -> Iterator[tuple[int, int, int]]:
    """(start row, stop row, offset) of the pieces of q, k or v on tensor rank ``part`` of ``parts``.

    A rank has all its queries first, then its keys, then its values: vLLM's order, and that of our own attention in
    Megatron (``self_attention``). With fewer key-value heads than ranks vLLM ``repeats`` them; Megatron then
    interleaves by group (the queries of a group, its key, its value, the next group) and cuts evenly through groups.
    """
    d, per_group = a.head_dim, a.heads // a.key_value_heads
    if a.key_value_heads < parts and not repeats:
        start, stop = _split((a.heads + 2 * a.key_value_heads) * d, parts, part)
        size = per_group * d if cut == "query" else d
        behind = {"query": 0, "key": per_group * d, "value": (per_group + 1) * d}[cut]
        for group in range(a.key_value_heads):
            first = group * (per_group + 2) * d + behind
            low, high = max(first, start), min(first + size, stop)
            if low < high:
                yield group * size + low - first, group * size + high - first, low - start
        return
    queries = a.heads // parts * d
    if cut == "query":
        yield part * queries, (part + 1) * queries, 0
        return
    kept = max(1, a.key_value_heads // parts)
    first = part * a.key_value_heads // parts
    yield first * d, (first + kept) * d, queries + (kept * d if cut == "value" else 0)


def _blocks_of(a: Architecture, slot: _Slot, parts: int, part: int, repeats: bool) -> Iterator[Block]:
    """The blocks of one Hugging Face tensor on tensor rank ``part`` of ``parts``."""
    shape = tensor_shapes(a)[slot.tensor]
    rest: Region = tuple((0, size) for size in shape[1:])
    tail = (0,) * len(rest)
    match slot.cut:
        case "whole":
            yield Block(slot.tensor, ((0, shape[0]), *rest), slot.parameter, (0, *tail))
        case "columns":
            yield Block(slot.tensor, ((0, shape[0]), _split(shape[1], parts, part)), slot.parameter, (0, 0))
        case "gate" | "up":
            offset = shape[0] // parts if slot.cut == "up" else 0
            yield Block(slot.tensor, (_split(shape[0], parts, part), *rest), slot.parameter, (offset, *tail))
        case "vocabulary":
            start, stop = _split(a.padded_vocabulary(parts), parts, part)
            if start < a.vocabulary:
                rows = (start, min(stop, a.vocabulary))
                yield Block(slot.tensor, (rows, *rest), slot.parameter, (0, *tail))
        case _:
            for start, stop, offset in _attention_blocks(a, slot.cut, parts, part, repeats):
                yield Block(slot.tensor, ((start, stop), *rest), slot.parameter, (offset, *tail))


def _expert_blocks(
    a: Architecture, layer: str, expert: int, parts: int, part: int, gate_up: tuple[str, int], down: tuple[str, int]
) -> Iterator[Block]:
    """One expert on rank ``part`` of the ``parts`` that it is cut over; ``gate_up``, ``down``: parameter, first row."""
    prefix = f"{layer}mlp.experts.{expert}."
    assert a.experts is not None
    width, hidden = a.experts.feed_forward, a.hidden
    mine = _split(width, parts, part)
    for number, name in enumerate(("gate_proj", "up_proj")):
        offset = (gate_up[1] + number * (width // parts), 0)
        yield Block(f"{prefix}{name}.weight", (mine, (0, hidden)), gate_up[0], offset)
    yield Block(prefix + "down_proj.weight", ((0, hidden), mine), down[0], (down[1], 0))


def _megatron_experts(
    a: Architecture, layout: Layout, position: int, implementation: Implementation
) -> Iterator[Block]:
    """The experts of the rank at ``position``; each is a parameter of its own."""
    if a.experts is None:
        return
    place, held = layout.expert_coordinates(position), a.experts.count // layout.expert
    name = _MEGATRON_EXPERTS[implementation]
    for prefix, index in _held_layers(a, layout, place.pipeline):
        for number in range(held):
            gate_up, down = (
                prefix + name.format(expert=number, linear=linear) for linear in ("linear_fc1", "linear_fc2")
            )
            expert = place.expert * held + number
            layer = f"model.layers.{index}."
            yield from _expert_blocks(a, layer, expert, layout.expert_parts, place.tensor, (gate_up, 0), (down, 0))


def _rollout_experts(
    a: Architecture, tensor: int, tensor_rank: int, whole: bool, layers: Iterable[int]
) -> Iterator[Block]:
    """The experts of one rank of a vLLM replica, stacked: a part of each, or some of them ``whole``."""
    if a.experts is None:
        return
    held = a.experts.count // tensor if whole else a.experts.count
    first, parts, part = (tensor_rank * held, 1, 0) if whole else (0, tensor, tensor_rank)
    rows = 2 * a.experts.feed_forward // parts
    for index in layers:
        layer = f"model.layers.{index}."
        stacked = layer + "mlp.experts.routed_experts."
        for number in range(held):
            gate_up, down = (stacked + "w13_weight", number * rows), (stacked + "w2_weight", number * a.hidden)
            yield from _expert_blocks(a, layer, first + number, parts, part, gate_up, down)


def _chunk_prefix(layout: Layout, chunk: int) -> str:
    """What the names of a chunk's parameters begin with, where a pipeline stage has several."""
    return f"{chunk}." if layout.virtual_pipeline > 1 else ""


def _held_layers(a: Architecture, layout: Layout, stage: int) -> Iterator[tuple[str, int]]:
    """(what its parameters' names begin with, index in the model) of each decoder layer of a pipeline stage."""
    for chunk, layers in enumerate(layout.stage_chunks(a.layers)[stage]):
        for local, index in enumerate(layers):
            yield f"{_chunk_prefix(layout, chunk)}decoder.layers.{local}.", index


def megatron_blocks(
    architecture: Architecture, layout: Layout, position: int, implementation: Implementation
) -> list[Block]:
    """What the rank at ``position`` of a Megatron layout holds. Data-parallel ranks hold the same."""
    a, place = architecture, layout.coordinates(position)
    first, last = _chunk_prefix(layout, 0), _chunk_prefix(layout, layout.virtual_pipeline - 1)
    input_norm, mlp_norm = _MEGATRON_NORMS[implementation]
    if a.experts is not None:
        mlp_norm = _ROUTER_NORM
    slots: list[_Slot] = []
    if place.pipeline == 0:
        slots.append(_Slot("model.embed_tokens.weight", "vocabulary", first + "embedding.word_embeddings.weight"))
    for prefix, index in _held_layers(a, layout, place.pipeline):
        names = {
            "input_norm": prefix + input_norm,
            "qkv": prefix + "self_attention.linear_qkv",
            "query_norm": prefix + "self_attention.q_layernorm.weight",
            "key_norm": prefix + "self_attention.k_layernorm.weight",
            "output": prefix + "self_attention.linear_proj.weight",
            "mlp_norm": prefix + mlp_norm,
            "router": prefix + "mlp.router.weight",
            "gate_up": prefix + "mlp.linear_fc1.weight",
            "down": prefix + "mlp.linear_fc2.weight",
        }
        slots.extend(_layer_slots(a, f"model.layers.{index}.", names))
    if place.pipeline == layout.pipeline - 1:
        slots.append(_Slot("model.norm.weight", "whole", last + "decoder.final_layernorm.weight"))
        if a.head == "scalar":
            slots.append(_Slot(SCORE, "whole", last + "output_layer.weight"))
        elif not a.tied_embeddings:
            slots.append(_Slot("lm_head.weight", "vocabulary", last + "output_layer.weight"))
        elif layout.pipeline > 1:  # the last stage has a copy of its own; its gradients are added to the first's
            slots.append(_Slot("model.embed_tokens.weight", "vocabulary", last + "output_layer.weight"))
    blocks = [block for slot in slots for block in _blocks_of(a, slot, layout.tensor, place.tensor, repeats=False)]
    return [*blocks, *_megatron_experts(a, layout, position, implementation)]


def rollout_blocks(
    architecture: Architecture,
    tensor: int,
    tensor_rank: int,
    expert_parallel: bool = False,
    only_layers: Iterable[int] | None = None,
) -> list[Block]:
    """What tensor rank ``tensor_rank`` of ``tensor`` of one vLLM replica holds, always with a language head.

    With ``expert_parallel`` a rank holds some experts whole, else a part of each. ``only_layers`` leaves the other
    decoder layers out, for one who has no business with them.
    """
    a = architecture
    layers = range(a.layers) if only_layers is None else sorted(only_layers)
    slots = [_Slot("model.embed_tokens.weight", "vocabulary", "model.embed_tokens.weight")]
    for index in layers:
        prefix = f"model.layers.{index}."
        names = {
            "input_norm": prefix + "input_layernorm.weight",
            "qkv": prefix + "self_attn.qkv_proj",
            "query_norm": prefix + "self_attn.q_norm.weight",
            "key_norm": prefix + "self_attn.k_norm.weight",
            "output": prefix + "self_attn.o_proj.weight",
            "mlp_norm": prefix + "post_attention_layernorm.weight",
            "router": prefix + "mlp.gate.weight",
            "gate_up": prefix + "mlp.gate_up_proj.weight",
            "down": prefix + "mlp.down_proj.weight",
        }
        slots.extend(_layer_slots(a, prefix, names))
    slots.append(_Slot("model.norm.weight", "whole", "model.norm.weight"))
    if not a.tied_embeddings:
        slots.append(_Slot("lm_head.weight", "vocabulary", "lm_head.weight"))
    blocks = [block for slot in slots for block in _blocks_of(a, slot, tensor, tensor_rank, repeats=True)]
    return [*blocks, *_rollout_experts(a, tensor, tensor_rank, expert_parallel, layers)]


def whole_blocks(architecture: Architecture) -> list[Block]:
    """Every Hugging Face tensor whole, under its own name: the destination of an export."""
    return [
        Block(name, tuple((0, size) for size in shape), name, (0,) * len(shape))
        for name, shape in tensor_shapes(architecture).items()
    ]
