"""A learning role's state as tensors of this rank, and back from a checkpoint of any layout.

Megatron's distributed optimizer gives each data-parallel rank a range of each parameter, flattened. A rank writes its
ranges of the full-precision weights and of both moments. Reading joins the ranges of the data-parallel ranks to whole
parameters of the writer's layout, and goes on like a regathering: by the rectangles of the weight map, so that the
reader's layout may be another.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from rlhf_megatron.models.weight_map import is_expert, megatron_blocks
from rlhf_megatron.regather.plan import Copy, Side, plan_regather
from rlhf_megatron.roles.role import Role
from rlhf_megatron.runtime.checkpoint import CheckpointError, TensorFile
from rlhf_megatron.topology.layout import Layout

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclasses.dataclass(frozen=True)
class _Owned:
    """This rank's range of one parameter: elements start to stop of the flattened local parameter."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    weights: Tensor  # [stop - start] float32
    state: dict[str, Any]  # the optimizer's: the moments of the same shape, and torch's step counter
    counters: dict[str, Any]  # where the optimizer counts its steps as "step"


def role_tensors(role: Role, held: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(CPU copies of what this rank owns, what a reader must know about them).

    ``held`` keeps the copies' memory for the next call, which overwrites it: page-locked memory takes long to get, and
    without it the copy takes long.
    """
    tensors: dict[str, Tensor] = {}
    pieces: dict[str, Any] = {}
    distributed = _is_distributed(role)
    for owned in _owned(role):
        group = role.groups.expt_dp if is_expert(owned.name) else role.groups.dp_cp
        if group.rank() and not distributed:
            continue  # the first data-parallel rank has the same
        pieces[owned.name] = {"start": owned.start, "stop": owned.stop, "shape": list(owned.shape)}
        for kind, value in {"weights": owned.weights, **_moments(owned)}.items():
            name, flat = f"{role.name}/{kind}/{owned.name}", value.detach().reshape(-1)
            if name not in held:
                held[name] = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=flat.is_cuda)
            tensors[name] = held[name].copy_(flat, non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return tensors, pieces


def role_state(role: Role) -> dict[str, Any]:
    """What is the same on all ranks of a role (plain JSON): its layout, and how far it has learnt."""
    return {
        "layout": dataclasses.asdict(role.layout),
        "ranks": role.ranks,
        "architecture": dataclasses.asdict(role.architecture),
        "implementation": role.implementation,
        "steps_taken": role.steps_taken,
        "optimizer_steps": max((int(owned.counters.get("step", 0)) for owned in _owned(role)), default=0),
    }


def restore_role(role: Role, state: Mapping[str, Any], files: Sequence[TensorFile]) -> None:
    """Fills weights, moments and counters of this rank from the files of the role's ranks that wrote the checkpoint.

    Raises CheckpointError where they do not hold all of the model.
    """
    _check_architecture(role, state["architecture"])
    written = Layout(**state["layout"])
    reader = _Reader(role.name, written, files)
    steps = int(state["optimizer_steps"])
    owned = {part.name: part for part in _owned(role)}
    live = dict(role.module.named_parameters())
    sources = {
        position: megatron_blocks(role.architecture, written, position, state["implementation"])
        for position in reader.positions
    }
    by_parameter: dict[str, list[Copy]] = defaultdict(list)
    for copy in plan_regather(Side.of(sources), Side.of({-1: role.blocks()}), rank=-1).receives:
        by_parameter[copy.destination_parameter].append(copy)
    with torch.no_grad():
        for name, copies in by_parameter.items():
            parameter = live[name]
            whole = parameter.detach().float().cpu()  # the rows of a padded vocabulary stay
            reader.fill(whole, copies, "weights")
            parameter.copy_(whole)
            if name not in owned:
                continue
            part = owned[name]
            part.weights.copy_(whole.reshape(-1)[part.start : part.stop])
            if steps:
                for kind in _MOMENTS:
                    moment = torch.zeros_like(whole)
                    reader.fill(moment, copies, kind)
                    part.state[kind] = moment.reshape(-1)[part.start : part.stop].to(part.weights.device).clone()
                # A tensor of its own for each parameter: torch adds to it in place.
                part.counters["step"] = torch.tensor(float(steps)) if part.counters is part.state else steps
    role.steps_taken = int(state["steps_taken"])


def _check_architecture(role: Role, saved: Mapping[str, Any]) -> None:
    # Through JSON, as the saved one went: tuples become lists.
    own = json.loads(json.dumps(dataclasses.asdict(role.architecture)))
    del own["end_token_ids"]  # a matter of generation
    different = [f"{key} {saved.get(key)} and not {value}" for key, value in own.items() if saved.get(key) != value]
    if different:
        raise CheckpointError(
            f"the checkpoint is of another model than {role.name}'s: it has {'; '.join(different)}; give "
            "--resume none, or the run another name"
        )


_Place = tuple[str, int, int, int]


def _places(layout: Layout, position: int) -> tuple[_Place, _Place]:
    """What tells the shards of most parameters apart, and what those of experts; data-parallel ranks have the same."""
    place, of_experts = layout.coordinates(position), layout.expert_coordinates(position)
    return (
        ("layer", place.pipeline, place.tensor, 0),
        ("experts", of_experts.pipeline, of_experts.tensor, of_experts.expert),
    )


class _Reader:
    """Whole parameters of the layout that wrote a checkpoint, joined from the ranges of its data-parallel ranks."""

    def __init__(self, role: str, layout: Layout, files: Sequence[TensorFile]) -> None:
        self._role, self._files = role, files
        if len(files) != layout.size:
            raise CheckpointError(f"the checkpoint has files of {len(files)} ranks; its {role} had {layout.size}")
        self._peers: dict[_Place, list[int]] = defaultdict(list)
        self._places = [_places(layout, position) for position in range(layout.size)]
        first: dict[tuple[_Place, _Place], int] = {}
        for position, places in enumerate(self._places):
            first.setdefault(places, position)
            for place in places:
                self._peers[place].append(position)
        self.positions = list(first.values())
        self.parameter = lru_cache(maxsize=2)(self._parameter)

    def fill(self, whole: Tensor, copies: Sequence[Copy], kind: str) -> None:
        """Writes the rectangles of ``copies`` into the reader's parameter."""
        for copy in copies:
            source = self.parameter(copy.source, copy.source_parameter, kind)
            extent = [stop - start for start, stop in copy.region]
            target = tuple(slice(at, at + size) for at, size in zip(copy.destination_offset, extent, strict=True))
            window = tuple(slice(at, at + size) for at, size in zip(copy.source_offset, extent, strict=True))
            whole[target] = source[window]

    def _parameter(self, position: int, name: str, kind: str) -> Tensor:
        found = 0
        whole: Tensor | None = None
        of_layer, of_experts = self._places[position]
        for peer in self._peers[of_experts if is_expert(name) else of_layer]:
            piece = self._files[peer].about["pieces"][self._role].get(name)
            if piece is None:
                continue
            if whole is None:
                whole = torch.zeros(piece["shape"])
            whole.view(-1)[piece["start"] : piece["stop"]] = self._files[peer].tensor(f"{self._role}/{kind}/{name}")
            found += piece["stop"] - piece["start"]
        if whole is None or found != whole.numel():
            count = "nothing" if whole is None else f"{found} of {whole.numel()} elements"
            raise CheckpointError(f"the checkpoint holds {count} of {self._role}'s {kind} of {name}")
        return whole


def _owned(role: Role) -> Iterator[_Owned]:
    """The ranges that this rank's optimizer owns."""
    names = {parameter: name for name, parameter in role.module.named_parameters()}
    for optimizer in getattr(role.optimizer, "chained_optimizers", [role.optimizer]):
        inner = optimizer.optimizer
        for parameter, main, group, (start, stop) in _masters(optimizer):
            state = inner.state[main]
            # torch counts the steps of each parameter, Transformer Engine those of a group.
            counters = state if isinstance(inner, torch.optim.Adam) else group
            yield _Owned(names[parameter], tuple(parameter.shape), start, stop, main, state, counters)


def _is_distributed(role: Role) -> bool:
    chained = getattr(role.optimizer, "chained_optimizers", [role.optimizer])
    return all(isinstance(optimizer, DistributedOptimizer) for optimizer in chained)


def _masters(optimizer: Any) -> Iterator[tuple[Any, Tensor, dict[str, Any], tuple[int, int]]]:
    """(model's parameter, the optimizer's own flat or whole copy, its group, range) for Megatron's optimizers."""
    inner = optimizer.optimizer
    if isinstance(optimizer, DistributedOptimizer):
        for parameter, (index, order) in optimizer.model_param_group_index_map.items():
            span = optimizer._get_model_param_range_map(parameter)["param"]
            group = inner.param_groups[index]
            yield parameter, group["params"][order], group, (span.start, span.end)
        return
    # Every data-parallel rank has all of it; bfloat16 parameters have a float32 copy.
    for group in inner.param_groups:
        for main in group["params"]:
            yield _model_parameter(optimizer, main), main, group, (0, main.numel())


def _model_parameter(optimizer: Any, main: Tensor) -> Any:
    pairs = zip(
        getattr(optimizer, "float16_groups", []), getattr(optimizer, "fp32_from_float16_groups", []), strict=True
    )
    for models, mains in pairs:
        for model, copy in zip(models, mains, strict=True):
            if copy is main:
                return model
    return main


def _moments(owned: _Owned) -> dict[str, Tensor]:
    return {kind: owned.state[kind] for kind in _MOMENTS if kind in owned.state}
