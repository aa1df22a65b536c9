"""Mixtures of experts: the fields of config.json, Megatron's settings, rectangles and cost. For files of families."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.config_fields import flag, size
from rlhf_megatron.models.description import Architecture, Experts
from rlhf_megatron.models.rectangles import Block, Slot, held_layers, split
from rlhf_megatron.topology.layout import Layout
from rlhf_megatron.untrusted import shown

EXPERT_FIELDS = frozenset(
    {"moe_intermediate_size", "norm_topk_prob", "num_experts", "num_experts_per_tok", "num_local_experts"}
)
EXPERT_TYPES: dict[str, tuple[type, ...]] = {"output_router_logits": (bool,), "router_aux_loss_coef": (float,)}


@dataclasses.dataclass(frozen=True)
class ExpertNames:
    """Names in a checkpoint and in vLLM: the module of router and experts in a layer, and an expert's matrices.

    ``shared``: the module of the shared expert within it. ``correction``: the router's correction biases.
    ``gate_up``: one matrix of gate and up, whose rows are a gate's, its up's, the next gate's and so on.
    ``module`` is empty where the layer itself has them.
    """

    module: str = "mlp"
    router: str = "gate"
    gate_up: str | None = None
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"
    correction: str = "gate.e_score_correction_bias"

    @property
    def prefix(self) -> str:
        """The beginning of the names of a layer's router and experts, within the layer."""
        return f"{self.module}." if self.module else ""


USUAL_NAMES = ExpertNames()
# Of experts beside a dense layer: vectors of a layer in a checkpoint, and Megatron's parameters. The norm before the
# dense layer is one that other families have too.
_BESIDE_DENSE = {
    "router.scale": "mlp.router.scale",
    "router.per_expert_scale": "mlp.router.expert_scale",
    "post_feedforward_layernorm_1.weight": "mlp.after_dense.weight",
    "pre_feedforward_layernorm_2.weight": "mlp.before_experts.weight",
    "post_feedforward_layernorm_2.weight": "mlp.after_experts.weight",
}
STACK_ELEMENTS = 2**26  # of a parameter at most, unless one matrix has more: optimizers stream whole parameters


def stack_sizes(experts: int, rows: int, columns: int) -> list[int]:
    """Return how many of a rank's ``experts``, each a matrix [rows, columns], each parameter of a linear layer holds.

    They follow each other, about equally many in each: products and gradients of hundreds of parameters would keep the
    host busier than the GPU, and one parameter of them all would be too large to be in memory in several copies.
    """
    together = max(1, STACK_ELEMENTS // (rows * columns))
    stacks = -(-experts // together)
    return [experts * (stack + 1) // stacks - experts * stack // stacks for stack in range(stacks)]


def read_experts(path: Path, config: Mapping[str, Any]) -> Experts:
    """Return the mixture of a config; raises ModelError where a token would reach more experts than there are."""
    names = [name for name in ("num_local_experts", "num_experts") if config.get(name) is not None] or ["num_experts"]
    counts = {size(path, name, config) for name in names}
    experts = Experts(
        count=max(counts),
        chosen=size(path, "num_experts_per_tok", config),
        feed_forward=size(path, "moe_intermediate_size", config),
        normalized=flag(path, "norm_topk_prob", config),
    )
    if len(counts) > 1:
        raise ModelError(f"{shown(path)}: num_experts and num_local_experts differ, and are one field; remove one")
    if experts.chosen > experts.count:
        raise ModelError(f"{shown(path)}: num_experts_per_tok is {experts.chosen}, of {experts.count} experts")
    return experts


def expert_shapes(a: Architecture, layer: str, names: ExpertNames) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (tensor, shape) of router and experts of the layer whose tensors' names begin with ``layer``."""
    assert a.experts is not None
    module = layer + names.prefix
    yield f"{module}{names.router}.weight", (a.experts.count, a.hidden)
    if a.experts.biased:
        yield f"{module}{names.router}.bias", (a.experts.count,)
    if a.experts.routing and a.experts.routing.corrected:
        yield module + names.correction, (a.experts.count,)
    for tensor in _BESIDE_DENSE if a.experts.beside_dense else ():
        yield layer + tensor, (a.experts.count if tensor.endswith("per_expert_scale") else a.hidden,)
    widths = {f"{module}experts.{expert}.": a.experts.feed_forward for expert in range(a.experts.count)}
    if a.experts.shared:
        widths[f"{module}{names.shared}."] = a.experts.shared.feed_forward
    for expert, width in widths.items():
        of_gate_up = {names.gate_up: 2 * width} if names.gate_up else {names.gate: width, names.up: width}
        for matrix, (rows, columns) in {
            **{name: (rows, a.hidden) for name, rows in of_gate_up.items()},
            names.down: (a.hidden, width),
        }.items():
            yield f"{expert}{matrix}.weight", (rows, columns)
            if a.experts.biased:
                yield f"{expert}{matrix}.bias", (rows,)
    if a.experts.shared and a.experts.shared.gated:
        yield module + "shared_expert_gate.weight", (1, a.hidden)


def common_slots(experts: Experts, names: ExpertNames, tensor_prefix: str, prefix: str) -> Iterator[Slot]:
    """Yield the slots of what all tokens of a layer reach beside the router's matrix, in Megatron's parameters.

    A shared expert is cut over the tensor ranks.
    """
    module = tensor_prefix + names.prefix
    if experts.biased:
        yield Slot(f"{module}{names.router}.bias", "whole", prefix + "mlp.router.bias")
    if experts.routing and experts.routing.corrected:
        yield Slot(module + names.correction, "whole", prefix + "mlp.router.expert_bias")
    for tensor, parameter in _BESIDE_DENSE.items() if experts.beside_dense else ():
        yield Slot(tensor_prefix + tensor, "whole", prefix + parameter)
    if experts.shared is None:
        return
    expert, parameters = f"{module}{names.shared}.", prefix + "mlp.shared_experts."
    yield Slot(f"{expert}{names.gate}.weight", "gate", parameters + "linear_fc1.weight")
    yield Slot(f"{expert}{names.up}.weight", "up", parameters + "linear_fc1.weight")
    yield Slot(f"{expert}{names.down}.weight", "columns", parameters + "linear_fc2.weight")
    if experts.shared.gated:
        yield Slot(module + "shared_expert_gate.weight", "whole", parameters + "gate_weight")


def _expert_blocks(
    a: Architecture,
    names: ExpertNames,
    layer: int,
    expert: int,
    parts: int,
    part: int,
    gate_up: tuple[str, int],
    down: tuple[str, int],
) -> Iterator[Block]:
    """Yield an expert on rank ``part`` of the ``parts`` that it is cut over; ``gate_up``, ``down``: parameter, row."""
    prefix = f"model.layers.{layer}.{names.prefix}experts.{expert}."
    assert a.experts is not None
    width, hidden = a.experts.feed_forward, a.hidden
    mine = split(width, parts, part)
    if names.gate_up:
        pairs = (2 * mine[0], 2 * mine[1])
        yield Block(f"{prefix}{names.gate_up}.weight", (pairs, (0, hidden)), gate_up[0], (gate_up[1], 0))
        yield Block(f"{prefix}{names.down}.weight", ((0, hidden), mine), down[0], (down[1], 0))
        return
    for number, name in enumerate((names.gate, names.up)):
        offset = (gate_up[1] + number * (width // parts), 0)
        yield Block(f"{prefix}{name}.weight", (mine, (0, hidden)), gate_up[0], offset)
    yield Block(f"{prefix}{names.down}.weight", ((0, hidden), mine), down[0], (down[1], 0))


def _bias_blocks(
    a: Architecture, names: ExpertNames, layer: int, expert: int, gate_up: tuple[str, int], down: tuple[str, int]
) -> Iterator[Block]:
    """Yield the biases of an expert that is whole and has gate and up in one matrix; parameter, row of each."""
    prefix = f"model.layers.{layer}.{names.prefix}experts.{expert}."
    assert a.experts is not None
    yield Block(f"{prefix}{names.gate_up}.bias", ((0, 2 * a.experts.feed_forward),), gate_up[0], (gate_up[1],))
    yield Block(f"{prefix}{names.down}.bias", ((0, a.hidden),), down[0], (down[1],))


def megatron_experts(a: Architecture, names: ExpertNames, layout: Layout, position: int) -> Iterator[Block]:
    """Yield the experts of the rank at ``position``, as ``ExpertLinear`` holds them."""
    if a.experts is None:
        return
    coordinates, held = layout.expert_coordinates(position), a.experts.count // layout.expert
    parts, part = layout.expert_parts, coordinates.tensor
    width = a.experts.feed_forward // parts
    gate_ups, downs = list(_places(held, 2 * width, a.hidden)), list(_places(held, a.hidden, width))
    for prefix, index in held_layers(a, layout, coordinates.pipeline):
        if a.layer_kinds[index].feed_forward != "experts":
            continue
        first, second = (f"{prefix}mlp.experts.{linear}." for linear in ("linear_fc1", "linear_fc2"))
        for number, ((gate_up, row), (down, down_row)) in enumerate(zip(gate_ups, downs, strict=True)):
            expert = coordinates.expert * held + number
            yield from _expert_blocks(
                a, names, a.first_layer + index, expert, parts, part, (first + gate_up, row), (second + down, down_row)
            )
            if a.experts.biased:
                rows = (number * 2 * width, number * a.hidden)
                yield from _bias_blocks(
                    a, names, a.first_layer + index, expert, (first + "bias", rows[0]), (second + "bias", rows[1])
                )


def _places(experts: int, rows: int, columns: int) -> Iterator[tuple[str, int]]:
    """Yield the parameter of each expert's matrix in its linear layer, and the row where it begins."""
    for stack, count in enumerate(stack_sizes(experts, rows, columns)):
        for number in range(count):
            yield f"weight{stack}", number * rows


def rollout_experts(
    a: Architecture, names: ExpertNames, tensor: int, tensor_rank: int, whole: bool, layers: Iterable[int]
) -> Iterator[Block]:
    """Yield the experts of one rank of a vLLM replica, stacked: a part of each, or some of them ``whole``."""
    if a.experts is None:
        return
    held = a.experts.count // tensor if whole else a.experts.count
    first, parts, part = (tensor_rank * held, 1, 0) if whole else (0, tensor, tensor_rank)
    rows = 2 * a.experts.feed_forward // parts
    for index in layers:
        stacked = f"model.layers.{index}.{names.prefix}experts.routed_experts."
        for number in range(held):
            gate_up, down = (stacked + "w13_weight", number * rows), (stacked + "w2_weight", number * a.hidden)
            yield from _expert_blocks(a, names, index, first + number, parts, part, gate_up, down)


def mixture_settings(experts: Experts | None, layout: Layout, float32: bool, fused: bool) -> dict[str, Any]:
    """Return Megatron's settings of a mixture: no token is dropped, no loss is added that would balance the experts."""
    if experts is None:
        return {}
    shared: dict[str, Any] = {}
    if experts.shared:
        shared["moe_shared_expert_intermediate_size"] = experts.shared.feed_forward
        shared["moe_shared_expert_gate"] = experts.shared.gated
    return shared | {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.feed_forward,
        "moe_router_topk": experts.chosen,
        # The softmax of the chosen logits alone is that of all of them made to sum to 1 over the chosen.
        "moe_router_pre_softmax": not experts.normalized,
        # Where Transformer Engine is installed, Megatron's router has it multiply, which takes float32 for TF32.
        "moe_router_dtype": "fp64" if float32 else "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": fused,
        "moe_permute_fusion": fused,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_parts,
    }


def expert_weights(a: Architecture) -> int:
    """Return how many weights of router and experts one token is multiplied with in a layer."""
    assert a.experts is not None
    columns = a.experts.feed_forward * a.experts.chosen
    shared = a.experts.shared
    if shared:
        columns += shared.feed_forward
    return a.hidden * (a.experts.count + 3 * columns + int(shared is not None and shared.gated))
