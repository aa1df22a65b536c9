"""A model of vLLM on the meta device, for any rank of a replica, in a process that is one rank: for tracing of loaders.

Only the sizes and the rank of vLLM's group objects are set, and no function is replaced but the two that could not do
their work on meta. vLLM has no public way to either; on models on meta: https://github.com/vllm-project/vllm/issues/18009
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import torch


def start_distributed() -> None:
    """Make this process a world of one, as vLLM's models ask for."""
    from vllm.distributed import parallel_state

    if not torch.cuda.is_available():
        from rlhf_megatron.compat.vllm import cpu

        cpu.install()
    if torch.distributed.is_initialized():
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    parallel_state.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")


@contextlib.contextmanager
def as_rank(config: Any, tensor: int, rank: int, expert_parallel: bool) -> Iterator[None]:
    """Have vLLM take this process for rank `rank` of `tensor` ranks."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    config.parallel_config.tensor_parallel_size = tensor
    config.parallel_config.enable_expert_parallel = expert_parallel
    with set_current_vllm_config(config):
        parallel_state.initialize_model_parallel(1, 1)
        try:
            for group in filter(None, (parallel_state._TP, parallel_state._EP)):
                group.world_size, group.rank_in_group, group.ranks = tensor, rank, list(range(tensor))
            yield
        finally:
            parallel_state.destroy_model_parallel()


def build_on_meta(config: Any) -> torch.nn.Module:
    """Build the model of vLLM's `VllmConfig`, which must be its current one, with parameters that hold nothing."""
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    dtype = set_default_torch_dtype(config.model_config.dtype)
    with _own_rotary_modules(), _expert_map_on_host(), dtype, torch.device("meta"):
        model: torch.nn.Module = initialize_model(config)
    return model


@contextlib.contextmanager
def _own_rotary_modules() -> Iterator[None]:
    """Drop rotary embeddings made inside: vLLM caches them for the process, and none on meta may be reused."""
    from vllm.model_executor.layers import rotary_embedding

    cached = dict(rotary_embedding._ROPE_DICT)
    rotary_embedding._ROPE_DICT.clear()
    try:
        yield
    finally:
        rotary_embedding._ROPE_DICT.clear()
        rotary_embedding._ROPE_DICT.update(cached)


@contextlib.contextmanager
def _expert_map_on_host() -> Iterator[None]:
    """Make the table of a rank's experts on the host: `.item()` reads it while weights are loaded."""
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
