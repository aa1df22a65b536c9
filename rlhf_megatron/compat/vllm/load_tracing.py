"""A model of vLLM on the meta device, for any rank of a replica, in a process that is one rank: for tracing of loaders.

vLLM's group objects are stand-ins that know sizes and ranks alone, and no function is replaced but the four that
could not do their work on meta. vLLM has no public way to any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from rlhf_megatron.compat.patches import NONE_FOUND, replacement
from rlhf_megatron.compat.torch import default_dtype
from rlhf_megatron.compat.vllm import internals
from rlhf_megatron.compat.vllm.names import KNOWN, PACKAGES

# The groups of vLLM's parallel_state, by version, that all tensor ranks of a replica are in; others are of one rank.
_TENSOR_GROUPS = ("_WORLD", "_TP", "_ETP", "_EP", "_EPLB")
_OTHER_GROUPS = ("_INNER_DP_WORLD", "_ENGRAM_DP", "_DCP", "_PCP", "_PP", "_DP")


@replacement(
    *PACKAGES,
    **KNOWN,
    why="vLLM builds the shards of a rank only in the process of that rank, with all others beside it",
    upstream="https://github.com/vllm-project/vllm/issues/18009",
)
@contextlib.contextmanager
def as_rank(config: Any, tensor: int, rank: int, expert_parallel: bool) -> Iterator[None]:
    """Have vLLM take this process for rank ``rank`` of ``tensor`` ranks, which cannot communicate."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    config.parallel_config.tensor_parallel_size = tensor
    config.parallel_config.enable_expert_parallel = expert_parallel
    whole, alone = _group(tensor, rank), _group(1, 0)
    own = {name: whole if name in _TENSOR_GROUPS else alone for name in (*_TENSOR_GROUPS, *_OTHER_GROUPS)}
    before = {name: getattr(parallel_state, name) for name in own if hasattr(parallel_state, name)}
    try:
        for name in before:
            setattr(parallel_state, name, own[name])
        with set_current_vllm_config(config):
            yield
    finally:
        for name, group in before.items():
            setattr(parallel_state, name, group)


class _SizeAndRank:
    """In place of a process group of torch's."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size

    def rank(self) -> int:
        """Return this process's."""
        return self._rank


def _group(size: int, rank: int) -> Any:
    """Make one of vLLM's groups that knows its size, and has nothing to communicate by."""
    from vllm.distributed.parallel_state import GroupCoordinator

    group: Any = object.__new__(GroupCoordinator)
    group.world_size, group.ranks, group.rank, group.rank_in_group = size, list(range(size)), rank, rank
    group.local_rank, group.unique_name = 0, "of no process"
    group.cpu_group = group.device_group = _SizeAndRank(size, rank)
    group.device_communicator = group.mq_broadcaster = None
    return group


def build_on_meta(config: Any, drafts: bool = False) -> torch.nn.Module:
    """Build the model of vLLM's ``VllmConfig``, which must be its current one, with parameters that hold nothing; or
    the one that ``drafts`` for it."""
    from vllm.model_executor.model_loader.utils import initialize_model

    dtype = default_dtype(config.model_config.dtype)
    changes = (internals.own_rotary_modules(), _expert_map_on_host(), _activations_on_host(), _loaders_kept())
    with contextlib.ExitStack() as stack:
        for change in (*changes, dtype, torch.device("meta")):
            stack.enter_context(change)
        of_draft = {"model_config": config.speculative_config.draft_model_config} if drafts else {}
        model: torch.nn.Module = initialize_model(config, **of_draft)
    return model


@replacement(
    *PACKAGES,
    **KNOWN,
    why="loaders read numbers of the experts' table one by one, which a table on the meta device does not have",
    upstream="https://github.com/vllm-project/vllm/pull/25057",
)
@contextlib.contextmanager
def _expert_map_on_host() -> Iterator[None]:
    """Make the table of a rank's experts on the host: ``.item()`` reads it while weights are loaded."""
    from vllm.model_executor.layers.fused_moe import expert_map_manager

    original = expert_map_manager.determine_expert_map

    def on_host(*arguments: Any, **named: Any) -> Any:
        with torch.device("cpu"):
            return original(*arguments, **named)

    expert_map_manager.determine_expert_map = on_host
    try:
        yield
    finally:
        expert_map_manager.determine_expert_map = original


@replacement(
    *PACKAGES,
    **KNOWN,
    why="xIELU (Apertus) reads its numbers where it is made, and those on the meta device have no values",
    upstream=NONE_FOUND,
)
@contextlib.contextmanager
def _activations_on_host() -> Iterator[None]:
    """Make the few numbers that an activation learns on the host."""
    from vllm.model_executor.layers import activation

    if not hasattr(activation, "XIELU"):
        yield
        return
    original = activation.XIELU.__init__

    def on_host(*arguments: Any, **named: Any) -> None:
        with torch.device("cpu"):
            original(*arguments, **named)

    activation.XIELU.__init__ = on_host
    try:
        yield
    finally:
        activation.XIELU.__init__ = original


@replacement(
    *PACKAGES,
    **KNOWN,
    why="what vLLM 0.25 takes over from transformers gets new parameters for those on the meta device, without loaders",
    upstream="https://github.com/vllm-project/vllm/issues/18009",
)
@contextlib.contextmanager
def _loaders_kept() -> Iterator[None]:
    """Keep vLLM's parameters, and with them their loaders, where vLLM 0.25 makes all that transformers left on meta."""
    from vllm.model_executor.models.transformers.base import Base

    original = Base.init_parameters

    def init_parameters(self: Any, module: torch.nn.Module, dtype: torch.dtype | None = None) -> None:
        own = [
            (child, name, parameter)
            for child in module.modules()
            for name, parameter in child.named_parameters(recurse=False)
            if hasattr(parameter, "weight_loader")
        ]
        original(self, module, dtype)
        for child, name, parameter in own:
            setattr(child, name, parameter)

    Base.init_parameters = init_parameters
    try:
        yield
    finally:
        Base.init_parameters = original
