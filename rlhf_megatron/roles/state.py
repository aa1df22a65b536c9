"""A learning role's state as tensors of this rank, and back from a checkpoint of any layout.

Megatron's distributed optimizer gives each data-parallel rank a range of each parameter, flattened. A rank writes its
ranges of the full-precision weights and of both moments; ``saved`` reads them in any other layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from rlhf_megatron.models.weight_map import is_expert
from rlhf_megatron.roles.host_memory import pinned_buffers
from rlhf_megatron.roles.role import Role
from rlhf_megatron.roles.saved import ROWS_OF_ATTENTION, SavedRole
from rlhf_megatron.runtime.checkpoint import TensorFile
from rlhf_megatron.runtime.finite import describe_nonfinite, nonfinite
from rlhf_megatron.runtime.manifest import CheckpointError, ForeignCheckpoint
from rlhf_megatron.untrusted import shown

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
    kept: dict[str, Tensor] = {}
    pieces: dict[str, Any] = {}
    distributed = _is_distributed(role)
    for owned in _owned(role):
        groups = role.learning_groups
        group = groups.expt_dp if is_expert(owned.name) else groups.dp_cp
        if group.rank() and not distributed:
            continue  # the first data-parallel rank has the same
        pieces[owned.name] = {"start": owned.start, "stop": owned.stop, "shape": list(owned.shape)}
        for kind, value in {"weights": owned.weights, **_moments(owned)}.items():
            kept[f"{role.name}/{kind}/{owned.name}"] = value.detach().reshape(-1)
    new = [name for name in kept if name not in held]
    for name, buffer in zip(new, pinned_buffers([kept[name].nbytes for name in new]), strict=True):
        held[name] = buffer.view(kept[name].dtype)
    tensors = {name: held[name].copy_(value, non_blocking=True) for name, value in kept.items()}
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return tensors, pieces


def role_state(role: Role) -> dict[str, Any]:
    """What is the same on all ranks of a role (plain JSON): its layout, and how far it has learnt."""
    return {
        "layout": dataclasses.asdict(role.learning_layout),
        "ranks": role.ranks,
        "architecture": dataclasses.asdict(role.architecture),
        "implementation": role.implementation,
        "adapters": dataclasses.asdict(role.adapters.adaptation) if role.adapters else None,
        "base": role.adapters.base if role.adapters else None,
        "rows_of_attention": ROWS_OF_ATTENTION,
        "steps_taken": role.steps_taken,
        "loss_scale": role.loss_scale.state() if role.loss_scale else None,
        "optimizer_steps": max((int(owned.counters.get("step", 0)) for owned in _owned(role)), default=0),
    }


def nonfinite_state(role: Role, optimizer: bool) -> str:
    """What of a role's weights is not finite, and on which ranks; with ``optimizer`` also of its master weights and
    moments, which come to the device for that.

    Empty where all is. The same on the role's ranks, which it is collective over.
    """
    tensors = dict(role.parameters())
    if optimizer:
        for owned in _owned(role):
            for kind, value in {"master weights": owned.weights, **_moments(owned)}.items():
                tensors[f"{kind} of {owned.name.replace('/', '.')}"] = value
    return describe_nonfinite(nonfinite(tensors.items()), role.groups.intra_dist_opt)


def restore_role(role: Role, state: Mapping[str, Any], files: Sequence[TensorFile]) -> None:
    """Fills weights, moments and counters of this rank from the files of the role's ranks that wrote the checkpoint.

    Of a role with adapters these are the adapters'; its weights follow with ``Role.merge_adapters``.
    Raises CheckpointError where they do not hold all of the model, or another one.
    """
    adaptation = role.adapters.adaptation if role.adapters else None
    saved = SavedRole(role.name, role.architecture, state, files, adaptation)
    if role.adapters and state.get("base") != role.adapters.base:
        raise ForeignCheckpoint(
            f"the checkpoint's adapters of {role.name} belong to other weights than those of model.path; name the "
            "folder that the run began with, give --resume none, or the run another name"
        )
    steps = int(state["optimizer_steps"])
    owned = {part.name: part for part in _owned(role)}
    live = dict(role.learning.named_parameters())
    with torch.no_grad():
        for name, copies in saved.copies(role.learning_blocks()).items():
            parameter = live[name]
            whole = parameter.detach().float().cpu()  # the rows of a padded vocabulary stay
            saved.fill(whole, copies, "weights")
            parameter.copy_(whole)
            if name not in owned:
                continue
            part = owned[name]
            part.weights.copy_(whole.reshape(-1)[part.start : part.stop])
            for kind in _MOMENTS if steps else _moments(part):  # those of a checkpoint that was passed over are gone
                moment = torch.zeros_like(whole)
                if steps:
                    saved.fill(moment, copies, kind)
                    if kind == "exp_avg_sq" and bool((moment < 0).any()):  # its root would not be finite
                        raise CheckpointError(f"the checkpoint's {role.name}/{kind}/{shown(name)} is below 0")
                part.state[kind] = moment.reshape(-1)[part.start : part.stop].to(part.weights.device).clone()
            if steps or "step" in part.counters:
                # A tensor of its own for each parameter: torch adds to it in place.
                part.counters["step"] = torch.tensor(float(steps)) if part.counters is part.state else steps
    role.steps_taken = int(state["steps_taken"])
    if role.loss_scale and state.get("loss_scale"):
        role.loss_scale.load(state["loss_scale"])


def _owned(role: Role) -> Iterator[_Owned]:
    """The ranges that this rank's optimizer owns."""
    names = {parameter: name for name, parameter in role.learning.named_parameters()}
    for optimizer in getattr(role.optimizer, "chained_optimizers", [role.optimizer]):
        inner = optimizer.optimizer
        for parameter, main, group, (start, stop) in _masters(optimizer):
            state = inner.state[main]
            # torch counts the steps of each parameter, Transformer Engine those of a group.
            counters = state if isinstance(inner, torch.optim.Adam) else group
            weights = role.master_weights(main)
            yield _Owned(names[parameter], tuple(parameter.shape), start, stop, weights, state, counters)


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
