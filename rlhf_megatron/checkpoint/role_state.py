"""A learning role's state as tensors of this rank, and back from a checkpoint of any layout.

Megatron's distributed optimizer gives each data-parallel rank a range of each parameter, flattened. A rank writes its
ranges of the full-precision weights and of both moments; ``saved`` reads them in any other layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.checkpoint.saved_role import EXPERTS, ROWS_OF_ATTENTION, SavedRole
from rlhf_megatron.checkpoint.storage import TensorFile
from rlhf_megatron.errors import CheckpointError, ForeignCheckpoint
from rlhf_megatron.models.stored_form import stored_form
from rlhf_megatron.models.weight_map import is_expert
from rlhf_megatron.roles.host_memory import pinned_buffers
from rlhf_megatron.roles.optimizer_state import MOMENTS, OwnedRange, is_distributed, moments_of, owned_ranges
from rlhf_megatron.roles.role import Role
from rlhf_megatron.untrusted import shown


def role_tensors(role: Role, held: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (CPU copies of what this rank owns, what a reader must know about them).

    ``held`` keeps the copies' memory for the next call, which overwrites it: page-locked memory takes long to get, and
    without it the copy takes long.
    """
    kept: dict[str, Callable[[], Tensor]] = {}  # one after the other: they may be copies
    sizes: dict[str, tuple[int, torch.dtype]] = {}
    pieces: dict[str, Any] = {}
    distributed = is_distributed(role)
    groups = role.shard.trainable.groups
    for name, parameter in role.shard.trainable.module.named_parameters():
        if not parameter.requires_grad and not groups.dp_cp.rank():  # which no optimizer has
            pieces[name] = {"start": 0, "stop": parameter.numel(), "shape": list(parameter.shape)}
            kept[f"{role.name}/weights/{name}"] = parameter.detach().float
            sizes[f"{role.name}/weights/{name}"] = parameter.numel(), torch.float32
    for owned in owned_ranges(role):
        group = groups.expt_dp if is_expert(owned.name) else groups.dp_cp
        if group.rank() and not distributed:
            continue  # the first data-parallel rank has the same
        pieces[owned.name] = {"start": owned.start, "stop": owned.stop, "shape": list(owned.shape)}
        for kind, value in {"weights": owned.main, **moments_of(owned)}.items():
            kept[f"{role.name}/{kind}/{owned.name}"] = owned.read_weights if kind == "weights" else value.detach
            sizes[f"{role.name}/{kind}/{owned.name}"] = value.numel(), value.dtype
    new = [name for name in kept if name not in held]
    buffers = pinned_buffers([count * dtype.itemsize for count, dtype in (sizes[name] for name in new)])
    for name, buffer in zip(new, buffers, strict=True):
        held[name] = buffer.view(sizes[name][1])
    tensors = {name: held[name].copy_(read().reshape(-1), non_blocking=True) for name, read in kept.items()}
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return tensors, pieces


def role_state(role: Role) -> dict[str, Any]:
    """Return the state that is the same on all ranks of a role (plain JSON): its layout and its counters of steps."""
    shard, trainer = role.shard, role.trainer
    assert trainer is not None, f"{role.name} does not learn"
    return {
        "layout": dataclasses.asdict(shard.trainable.layout),
        "ranks": list(shard.trainable.ranks),
        "architecture": stored_form(role.architecture),
        "implementation": shard.implementation,
        "adapters": dataclasses.asdict(shard.adapters.adaptation) if shard.adapters else None,
        "base": shard.adapters.base if shard.adapters else None,
        "rows_of_attention": ROWS_OF_ATTENTION,
        "experts": EXPERTS,
        "steps_taken": trainer.steps_taken,
        "loss_scale": trainer.loss_scale.state() if trainer.loss_scale else None,
        "optimizer_steps": max((int(owned.counters.get("step", 0)) for owned in owned_ranges(role)), default=0),
    }


def restore_role(role: Role, state: Mapping[str, Any], files: Sequence[TensorFile]) -> None:
    """Fill weights, moments and counters of this rank from the files of the role's ranks that wrote the checkpoint.

    Of a role with adapters these are the adapters'; its weights follow with ``Role.merge_adapters``.
    Raises CheckpointError where they do not hold all of the model, or another one.
    """
    trainer, adapters = role.trainer, role.shard.adapters
    assert trainer is not None, f"{role.name} does not learn"
    adaptation = adapters.adaptation if adapters else None
    saved = SavedRole(role.name, role.architecture, state, files, adaptation)
    if adapters and state.get("base") != adapters.base:
        raise ForeignCheckpoint(
            f"the checkpoint's adapters of {role.name} belong to other weights than those of model.path; name the "
            "folder that the run began with, give --resume none, or the run another name"
        )
    steps = int(state["optimizer_steps"])
    owned = {part.name: part for part in owned_ranges(role)}
    live = dict(role.shard.trainable.module.named_parameters())
    with torch.no_grad():
        for name, copies in saved.copies(role.shard.trainable.blocks()).items():
            parameter = live[name]
            whole = parameter.detach().float().cpu()  # the rows of a padded vocabulary stay
            saved.fill(whole, copies, "weights")
            parameter.copy_(whole)
            if name not in owned:
                continue
            part = owned[name]
            part.set_weights(_part_of(whole, part))
            for kind in MOMENTS if steps else moments_of(part):  # those of a checkpoint that was passed over are gone
                moment = torch.zeros(part.stop - part.start)
                if steps:
                    moment = saved.part(whole, copies, kind, part.start, part.stop)
                    if kind == "exp_avg_sq" and bool((moment < 0).any()):  # its root would not be finite
                        raise CheckpointError(f"the checkpoint's {role.name}/{kind}/{shown(name)} is below 0")
                dtype = role.memory.moments_dtype
                part.state[kind] = moment.view(part.main.shape).to(part.device, dtype, copy=True)
            if steps or "step" in part.counters:
                # A tensor of its own for each parameter: torch adds to it in place.
                part.counters["step"] = torch.tensor(float(steps)) if part.counters is part.state else steps
    trainer.steps_taken = int(state["steps_taken"])
    if trainer.loss_scale and state.get("loss_scale"):
        trainer.loss_scale.load(state["loss_scale"])


def _part_of(whole: Tensor, part: OwnedRange) -> Tensor:
    """Return the range of a parameter, in the form that the optimizer has it: flat, or whole where it is not
    distributed."""
    return whole.reshape(-1)[part.start : part.stop].view(part.main.shape)
