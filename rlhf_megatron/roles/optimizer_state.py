"""The part of a role's optimizer state that this rank owns: ranges of the full-precision weights and of both moments.

Megatron's distributed optimizer gives each data-parallel rank a range of each parameter, flattened.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from rlhf_megatron.roles.offload import RoleMemory
from rlhf_megatron.roles.role import Role
from rlhf_megatron.runtime.finite import describe_nonfinite, nonfinite

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclasses.dataclass(frozen=True)
class OwnedRange:
    """The range of one parameter on this rank: elements start to stop of the flattened local parameter."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    main: Tensor  # [stop - start] float32, the optimizer's parameter
    state: dict[str, Any]  # the optimizer's: the moments of the same shape, and torch's step counter
    counters: dict[str, Any]  # where the optimizer counts its steps as "step"
    _memory: RoleMemory

    @property
    def device(self) -> torch.device:
        """The device that the state is on between steps."""
        return self._memory.device_of(self.main)

    def read_weights(self) -> Tensor:
        """Return the full-precision weights [stop - start], perhaps a copy."""
        return self._memory.master_weights(self.main).detach()

    def set_weights(self, values: Tensor) -> None:
        """Set the full-precision weights; the model has them already, rounded."""
        self._memory.set_master_weights(self.main, values)


def owned_ranges(role: Role) -> Iterator[OwnedRange]:
    """Yield the ranges that this rank's optimizer owns; brings its state back to the device, but for what is
    streamed."""
    role.memory.come_to_rest()
    names = {parameter: name for name, parameter in role.shard.trainable.module.named_parameters()}
    for optimizer in _optimizers(role):
        inner = optimizer.optimizer
        for parameter, main, group, (start, stop) in _masters(optimizer):
            state = inner.state[main]
            # torch counts the steps of each parameter, Transformer Engine those of a group.
            counters = state if isinstance(inner, torch.optim.Adam) else group
            yield OwnedRange(names[parameter], tuple(parameter.shape), start, stop, main, state, counters, role.memory)


def nonfinite_state(role: Role, optimizer: bool) -> str:
    """Describe which weights of a role are not finite, and on which ranks; with ``optimizer`` also master weights and
    moments, which come to the device for that.

    Empty where all is. The same on the role's ranks, which it is collective over.
    """

    def tensors() -> Iterator[tuple[str, Tensor]]:
        yield from role.parameters().items()
        for owned in owned_ranges(role) if optimizer else ():
            name = owned.name.replace("/", ".")
            yield f"master weights of {name}", owned.read_weights()
            yield from ((f"{kind} of {name}", value) for kind, value in moments_of(owned).items())

    bad = [each for named in tensors() for each in nonfinite([named])]  # one by one: weights may be copies
    return describe_nonfinite(bad, role.groups.intra_dist_opt)


def is_distributed(role: Role) -> bool:
    """Return whether data-parallel ranks share the optimizer's state; otherwise each has all of it."""
    return all(isinstance(optimizer, DistributedOptimizer) for optimizer in _optimizers(role))


def moments_of(owned: OwnedRange) -> dict[str, Tensor]:
    """Return both moments of a range by their names in the optimizer; none before the first step."""
    return {kind: owned.state[kind] for kind in MOMENTS if kind in owned.state}


def _optimizers(role: Role) -> list[Any]:
    """Return the optimizers that make up Megatron's."""
    assert role.trainer is not None, f"{role.name} does not learn"
    optimizer = role.trainer.optimizer
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _masters(optimizer: Any) -> Iterator[tuple[Any, Tensor, dict[str, Any], tuple[int, int]]]:
    """Yield (model's parameter, the optimizer's own flat or whole copy, its group, range) for Megatron's optimizers."""
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
