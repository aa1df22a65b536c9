"""Gated delta nets: the fields of config.json, tensors, rectangles and cost. For files of families."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.config_fields import brief, size, unsupported
from rlhf_megatron.models.description import Architecture, DeltaNet
from rlhf_megatron.models.rectangles import Block, Region, split
from rlhf_megatron.untrusted import shown

_SIZES = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "taps": "linear_conv_kernel_dim",
}
FIELDS = frozenset(_SIZES.values()) | {"full_attention_interval", "layer_types"}
NEVER_NULL = tuple(_SIZES.values())
# What transformers takes for absent fields.
ABSENT = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}
_PREFIX = "linear_attn."
# The factor of a delta net's output, which is plain also where all other norms are zero-centred.
OUTPUT_NORM = f".{_PREFIX}norm.weight"
_IS_DELTA = {"linear_attention": True, "full_attention": False}


def read_delta_net(path: Path, config: Mapping[str, Any], *, by_key_head: bool) -> DeltaNet:
    """Return the delta net of a config; raises ModelError where its heads do not go together."""
    sizes = {name: size(path, field, config, ABSENT[field]) for name, field in _SIZES.items()}
    net = DeltaNet(**sizes, by_key_head=by_key_head)
    if net.value_heads % net.key_heads:
        raise ModelError(
            f"{shown(path)}: linear_num_value_heads is {net.value_heads}, no multiple of linear_num_key_heads, "
            f"{net.key_heads}"
        )
    return net


def delta_layers(path: Path, config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it has a delta net, by ``layer_types``, or else ``full_attention_interval``."""
    types = config.get("layer_types")
    if types is None:
        interval = size(path, "full_attention_interval", config, 4)
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if not isinstance(types, list) or len(types) != layers:
        raise ModelError(
            f"{shown(path)}: layer_types is {brief(types)}; it must be a list of {layers}, one for a layer"
        )
    for kind in types:
        if not isinstance(kind, str) or kind not in _IS_DELTA:
            raise unsupported(path, "layer_types", kind, ", ".join(_IS_DELTA))
    return tuple(_IS_DELTA[kind] for kind in types)


def delta_shapes(a: Architecture, layer: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (tensor, shape) of the delta net of the layer whose tensors' names begin with ``layer``."""
    net, prefix = _of(a), layer + _PREFIX
    keys, values = net.keys, net.values
    yield prefix + "dt_bias", (net.value_heads,)
    yield prefix + "A_log", (net.value_heads,)
    yield prefix + "conv1d.weight", (2 * keys + values, 1, net.taps)
    if net.by_key_head:
        yield prefix + "in_proj_qkvz.weight", (2 * keys + 2 * values, a.hidden)
        yield prefix + "in_proj_ba.weight", (2 * net.value_heads, a.hidden)
    else:
        yield prefix + "in_proj_qkv.weight", (2 * keys + values, a.hidden)
        yield prefix + "in_proj_z.weight", (values, a.hidden)
        yield prefix + "in_proj_b.weight", (net.value_heads, a.hidden)
        yield prefix + "in_proj_a.weight", (net.value_heads, a.hidden)
    yield prefix + "norm.weight", (net.value_dim,)
    yield prefix + "out_proj.weight", (a.hidden, values)


def delta_blocks(a: Architecture, layer: str, parameters: str, parts: int, part: int) -> Iterator[Block]:
    """Yield the rectangles of a layer's delta net on tensor rank ``part`` of ``parts``, in Megatron's parameters.

    Of heads a rank has all of some. In a fused matrix its rows are in vLLM's order: by key head as in the checkpoint,
    or all queries of the rank, then keys, values and gates.
    """
    net, prefix = _of(a), layer + _PREFIX
    names = parameters + "self_attention."
    keys, values, heads = net.keys, net.values, net.value_heads
    columns, taps = ((0, a.hidden),), ((0, 1), (0, net.taps))
    qkvz, ba = names + "in_proj_qkvz.weight", names + "in_proj_ba.weight"

    def rows(tensor: str, sections: Sequence[int], parameter: str, rest: Region, first: int = 0) -> Iterator[Block]:
        """Yield the rank's rows of each section of a tensor, one behind the other from row ``first`` of the
        parameter."""
        for size_, begin in zip(sections, accumulate(sections, initial=0), strict=False):
            start, stop = split(size_, parts, part)
            offset = (first + begin // parts, *(0 for _ in rest))
            yield Block(prefix + tensor, ((begin + start, begin + stop), *rest), parameter, offset)

    yield from rows("dt_bias", [heads], names + "dt_bias", ())
    yield from rows("A_log", [heads], names + "A_log", ())
    yield from rows("conv1d.weight", [keys, keys, values], names + "conv1d.weight", taps)
    if net.by_key_head:
        yield from rows("in_proj_qkvz.weight", [2 * keys + 2 * values], qkvz, columns)
        yield from rows("in_proj_ba.weight", [2 * heads], ba, columns)
    else:
        yield from rows("in_proj_qkv.weight", [keys, keys, values], qkvz, columns)
        yield from rows("in_proj_z.weight", [values], qkvz, columns, (2 * keys + values) // parts)
        yield from rows("in_proj_b.weight", [heads], ba, columns)
        yield from rows("in_proj_a.weight", [heads], ba, columns, heads // parts)
    yield Block(prefix + "norm.weight", ((0, net.value_dim),), names + "out_norm.weight", (0,))
    held = split(values, parts, part)
    yield Block(prefix + "out_proj.weight", ((0, a.hidden), held), names + "out_proj.weight", (0, 0))


def delta_weights(a: Architecture) -> int:
    """Return how many weights of a layer's delta net one token is multiplied with."""
    net = _of(a)
    projections = a.hidden * (2 * net.keys + 3 * net.values + 2 * net.value_heads)
    return projections + net.taps * (2 * net.keys + net.values)


def delta_flops(a: Architecture, tokens: float) -> float:
    """Return the operations of a layer's states over ``tokens``: read by a key, corrected, and read by a query."""
    net = _of(a)
    return 6.0 * net.value_heads * net.key_dim * net.value_dim * tokens


def state_elements(a: Architecture, tensor: int) -> int:
    """Return the numbers that vLLM keeps of a row in a layer on each of ``tensor`` ranks: state and last tokens."""
    net = _of(a)
    convolved = (net.taps - 1) * (2 * net.keys + net.values)
    return (net.value_heads * net.key_dim * net.value_dim + convolved) // tensor


def _of(a: Architecture) -> DeltaNet:
    assert a.delta_net is not None
    return a.delta_net
