"""The few places where megatron-core 0.19 asks for global process groups although a role's own were passed.

Megatron's global ``parallel_state`` is never initialised here, so that a forgotten group raises instead of silently
taking another role's. What still reads it, or the default world group, is mended in this one file.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from rlhf_megatron.topology import megatron_cpu


@functools.cache
def install() -> None:
    """Mends megatron-core for this process (and for the CPU where there is no GPU); idempotent."""
    megatron_cpu.install()
    from megatron.core import parallel_state

    # Scratch memory of sequence parallelism; it depends on no layout, and only initialize_model_parallel makes it.
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    _mend_tied_embedding_checkpoints()


def _mend_tied_embedding_checkpoints() -> None:
    """Tied embeddings on the last pipeline stage take their replica id from the global data-parallel rank."""
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint

    original = LanguageModule.tie_embeddings_and_output_weights_state_dict

    def tie(self: Any, state: dict, output_key: str, embedding_key: str, metadata: dict | None = None) -> None:
        metadata = metadata or {}
        if not self.post_process or self.pre_process:
            original(self, state, output_key, embedding_key, metadata)
            return
        group = metadata["dp_cp_group"]
        state[output_key] = make_tp_sharded_tensor_for_checkpoint(
            tensor=self.shared_embedding_or_output_weight(),
            key=embedding_key,
            replica_id=(1, 0, group.rank()),
            allow_shape_mismatch=True,
            tp_group=self.tp_group,
            dp_cp_group=group,
        )

    LanguageModule.tie_embeddings_and_output_weights_state_dict = tie


@contextlib.contextmanager
def as_world(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Makes ``group`` the default process group inside the block.

    ``get_megatron_optimizer`` and ``dist_checkpointing`` run collectives over the default group and test for "rank 0"
    there; a role on a part of the world has to be its whole world meanwhile. Inside, ranks are those of ``group``.
    """
    world = distributed_c10d._get_default_group()
    if group is None or dist.get_process_group_ranks(group) == list(range(dist.get_world_size())):
        yield
        return
    ranks = distributed_c10d._world.pg_group_ranks[group]
    distributed_c10d._update_default_pg(group)
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
    try:
        yield
    finally:
        distributed_c10d._world.pg_group_ranks[group] = ranks
        distributed_c10d._update_default_pg(world)
