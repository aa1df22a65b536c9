"""The usual way from a trainer's shards to a rollout's, for comparison: every rank gathers every tensor whole.

For each Hugging Face tensor: the parts of other pipeline stages and of other expert ranks are broadcast, those of the
tensor-parallel ranks gathered and concatenated, so that in the end each rank has had all of the model; 2 GB of tensors
at a time are then loaded. The loader narrows a tensor to the rank's part and copies it, as vLLM's weight loaders do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.weight_map import Block, tensor_shapes
from rlhf_megatron.models.weight_source import window
from rlhf_megatron.regather.plan import ShardSpec
from rlhf_megatron.topology.layout import Layout

BUCKET_BYTES = 2 << 30


class WholeTensors:
    """Gathering and loading of whole tensors; ``run`` is collective over the world."""

    def __init__(
        self,
        architecture: Architecture,
        layout: Layout,
        sources: ShardSpec,
        wanted: Sequence[Block],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Set up; the layout's positions are the ranks of the world; ``wanted`` is what this rank's rollout keeps."""
        self._shapes, self._dtype, self._device = tensor_shapes(architecture), dtype, device
        self._padded_rows = architecture.padded_vocabulary(layout.tensor) // layout.tensor
        self._stages = _group(layout.groups_along("pipeline"))
        self._tensor = _group(layout.groups_along("tensor"))
        self._experts = _group(layout.expert_groups_along("expert", "pipeline"))
        self._expert_tensor = _group(layout.expert_groups_along("tensor"))
        self._wanted: dict[str, list[Block]] = defaultdict(list)
        for block in wanted:
            self._wanted[block.tensor].append(block)
        # Of each tensor: the rank among those of other stages, or with other experts, that has this rank's part of it.
        self._parts: dict[str, tuple[int, list[Block]]] = {}
        for peers, of_experts in ((self._stages[0], False), (self._experts[0], True)):
            for peer in peers:
                blocks: dict[str, list[Block]] = defaultdict(list)
                for block in sources.blocks(peer):
                    if _is_expert(block.tensor) == of_experts:
                        blocks[block.tensor].append(block)
                for name, of_tensor in blocks.items():
                    self._parts.setdefault(name, (peer, sorted(of_tensor, key=lambda block: block.region)))

    @torch.no_grad()
    def run(self, held: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
        """Fill ``targets`` from the ``held`` of all ranks."""
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        for name in self._shapes:
            whole = self._gather(name, held)
            bucket.append((name, whole))
            size += whole.nbytes
            if size >= BUCKET_BYTES:
                self._load(bucket, targets)
                bucket, size = [], 0
        self._load(bucket, targets)

    def _gather(self, name: str, held: Mapping[str, Tensor]) -> Tensor:
        """Return one tensor, whole."""
        shape = self._shapes[name]
        root, blocks = self._parts[name]
        (peers, over), (parts, across) = (
            (self._experts, self._expert_tensor) if _is_expert(name) else (self._stages, self._tensor)
        )
        if root == dist.get_rank():
            pieces = [window(held[block.parameter], block.offset, block.region) for block in blocks]
            part = torch.cat(pieces) if len(pieces) > 1 else pieces[0].contiguous()
        else:
            rows = sum(block.region[0][1] - block.region[0][0] for block in blocks)
            extents = [stop - start for start, stop in blocks[0].region[1:]]
            part = torch.empty(rows, *extents, dtype=self._dtype, device=self._device)
        if len(peers) > 1:
            dist.broadcast(part, root, group=over)
        if part.shape == shape:
            return part
        cut = 0 if part.shape[1:] == shape[1:] else 1
        if name in ("model.embed_tokens.weight", "lm_head.weight"):  # Megatron's parts are padded to equal sizes
            part = torch.cat([part, part.new_zeros(self._padded_rows - len(part), *part.shape[1:])])
        gathered = [torch.empty_like(part) for _ in parts]
        dist.all_gather(gathered, part, group=across)
        return torch.cat(gathered, dim=cut)[: shape[0]]

    def _load(self, bucket: Sequence[tuple[str, Tensor]], targets: Mapping[str, Tensor]) -> None:
        for name, whole in bucket:
            for block in self._wanted[name]:
                part = whole[tuple(slice(start, stop) for start, stop in block.region)]
                window(targets[block.parameter], block.offset, block.region).copy_(part)


def _is_expert(tensor: str) -> bool:
    return ".experts." in tensor


def _group(lists: Iterable[list[int]]) -> tuple[list[int], Any]:
    """Return this rank's of ``lists``, and its process group; collective over the world."""
    mine: tuple[list[int], Any] = ([], None)
    for ranks in lists:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = (ranks, group)
    return mine
