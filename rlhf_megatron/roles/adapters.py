"""A role that learns low-rank adapters: what of them is on this rank, and the weights that they are merged into.

The model's own parameters always hold W + scale x B A. So loading, regathering, views for vLLM, exports and passes
without gradients know nothing of adapters; only learning does (``models.low_rank``), and checkpoints, which have the
adapters alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.experts import ExpertLinear, ExpertPairs
from rlhf_megatron.models.latent_attention import WholeLinear
from rlhf_megatron.models.lora import (
    Adaptation,
    adapted_shapes,
    adapter_blocks,
    adapter_layout,
    adapter_ranks,
    factor_of,
    fused_with,
)
from rlhf_megatron.models.low_rank import Adapted, LowRank, Span, attach
from rlhf_megatron.models.new_adapters import NewAdapters
from rlhf_megatron.models.weight_map import Block, expert_of, is_expert
from rlhf_megatron.models.weight_source import WeightSource, load_blocks, window
from rlhf_megatron.recipe import LoraSection
from rlhf_megatron.roles.host_memory import pinned_buffers
from rlhf_megatron.topology.layout import Layout
from rlhf_megatron.topology.process_groups import make_groups

_INTEGERS = {2: torch.int16, 4: torch.int32}  # as wide as a weight, by bytes


@dataclasses.dataclass(frozen=True)
class _AdaptedBlock:
    """A rectangle of a parameter that has a part of an adapter in it."""

    block: Block
    down: Tensor  # A
    up: Tensor  # B
    is_first: bool  # of the tensor-parallel ranks that have this rectangle

    def window(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the rectangle itself."""
        return window(weights[self.block.parameter], self.block.offset, self.block.region)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return the windows of B and A whose product belongs here."""
        (row, end), (column, last) = self.block.region
        return self.up[row:end], self.down[:, column:last]


class Adapters:
    """The adapters of one rank's part of a model, and its weights with and without them.

    Attributes:
        layout: how they lie on ``ranks``, the role's in an order of their own, with ``groups`` of its own.
        chunks: modules that hold them, one for each of the model's.
        base: tells the weights without adapters from others; 0 before ``begin``.
    """

    def __init__(
        self,
        section: LoraSection,
        architecture: Architecture,
        layout: Layout,
        ranks: Sequence[int],
        position: int,
        models: Sequence[torch.nn.Module],
        blocks: Sequence[Block],
        seed: int,
        model_groups: Any,
        overlapped: bool,
    ) -> None:
        """Hang adapters on the linear layers of ``models``, this rank's chunks, whose ``blocks`` are the weight map's.

        Collective over ``ranks``, as ``make_groups`` is, which ``overlapped`` is for. Nothing is in them before
        ``read``.
        """
        self.adaptation = Adaptation.of(section)
        self._architecture, self._seed, self._on_host = architecture, seed, section.offload_base
        self.layout, self.ranks = adapter_layout(layout), adapter_ranks(layout, ranks)
        self.groups: Any = make_groups(self.layout, self.ranks, overlapped=overlapped)
        self._position, self.base = self.ranks.index(ranks[position]), 0
        self._model_groups = model_groups
        self._device = next(models[0].parameters()).device
        self._adapted_blocks: list[_AdaptedBlock] = []
        self._base: list[Tensor] = []
        self.chunks = [torch.nn.Module() for _ in models]
        self._several = len(models) > 1
        self._attach(models, blocks, self._make(), model_groups.tp if layout.tensor > 1 else None)

    def _attach(
        self,
        models: Sequence[torch.nn.Module],
        blocks: Sequence[Block],
        factors: Mapping[str, tuple[torch.nn.Parameter, torch.nn.Parameter]],
        tensor_group: dist.ProcessGroup | None,
    ) -> None:
        """Hang ``factors``, (A, B) by the weight's tensor, on the linear layers that have a block of one."""
        by_matrix: dict[tuple[str, int | None], list[Block]] = defaultdict(list)  # by parameter, and expert in it
        for block in blocks:
            # Also where no adapted rows of a layer are here: others of the tensor-parallel group wait for this rank.
            if block.tensor.endswith(".weight") and factors.keys() & set(fused_with(block.tensor)):
                by_matrix[block.parameter, expert_of(block.tensor)].append(block)
        config: Any = models[0].config
        if config.recompute_granularity and hasattr(models[0], "embedding"):
            models[0].get_submodule("embedding").register_forward_hook(_ask_for_gradient)
        sequence_group = tensor_group if config.sequence_parallel else None
        by_layer: dict[torch.nn.Module, tuple[list[LowRank], list[Tensor]]] = defaultdict(lambda: ([], []))
        for (parameter, _), of_matrix in by_matrix.items():
            number, path = self._chunk_of(parameter)
            layer = models[number].get_submodule(path.rpartition(".")[0])  # whose experts are there in their order
            layer_has = [tensor for tensor in fused_with(of_matrix[0].tensor) if tensor in factors]
            columns, is_whole = of_matrix[0].region[1], isinstance(layer, WholeLinear)
            has_whole_sequence = is_whole or is_expert(parameter)
            rows = layer.rows if isinstance(layer, ExpertLinear) else None
            low_rank = LowRank(
                [_adapted(columns, [block for block in of_matrix if block.tensor == each], rows) for each in layer_has],
                self.adaptation.scale,
                cut_by_columns=columns != (0, factors[layer_has[0]][0].shape[1]),
                sequence_group=None if has_whole_sequence else sequence_group,
                norm_epsilon=self._architecture.norm_epsilon if hasattr(layer, "layer_norm_weight") else None,
                norm_offset=1.0 if self._architecture.zero_centred_norms else 0.0,
                gates_first=isinstance(layer, ExpertPairs),
            )
            by_layer[layer][0].append(low_rank)
            by_layer[layer][1].extend(factor for tensor in layer_has for factor in factors[tensor])
            adapted = [block for block in of_matrix if block.tensor in factors]
            is_first = not (is_whole and tensor_group is not None and tensor_group.rank())
            self._adapted_blocks += [_AdaptedBlock(block, *factors[block.tensor], is_first) for block in adapted]
        for layer, (low_ranks, of_layer) in by_layer.items():
            attach(layer, low_ranks, of_layer)

    @property
    def module(self) -> torch.nn.Module:
        """All of this rank's, named as ``blocks`` name them."""
        return torch.nn.ModuleList(self.chunks) if self._several else self.chunks[0]

    def blocks(self) -> list[Block]:
        """Return the blocks of A and B that this rank holds."""
        return adapter_blocks(self._architecture, self.adaptation, self.layout, self._position)

    def read(self, source: WeightSource | None) -> None:
        """Fill the adapters from ``source``, by default with new ones. Raises ModelError as ``load_blocks`` does."""
        held = {name: parameter.data for name, parameter in self.module.named_parameters()}
        load_blocks(self.blocks(), held, source or NewAdapters(self._architecture, self.adaptation, self._seed))

    def begin(self, weights: Mapping[str, Tensor]) -> None:
        """Take what ``weights`` hold, which are whole, as those without adapters, and merge these; collective."""
        windows = [adapted.window(weights) for adapted in self._adapted_blocks]
        if not self._base:
            self._base = self._memory(windows)
        for base, own in zip(self._base, windows, strict=True):
            base.copy_(own)
        of_layers: list[Tensor] = []
        of_experts: list[Tensor] = []
        for adapted, own in zip(self._adapted_blocks, windows, strict=True):
            if adapted.is_first:
                (of_experts if is_expert(adapted.block.tensor) else of_layers).append(own)
        groups = self._model_groups
        self.base = self._checksum(of_layers, groups.mp) + self._checksum(of_experts, groups.tp_ep_pp)
        self.merge(weights)

    @torch.no_grad()
    def merge(self, weights: Mapping[str, Tensor]) -> None:
        """Turn ``weights``, the model's own, into those with the adapters as they are now."""
        for adapted, base in zip(self._adapted_blocks, self._base, strict=True):
            up, down = adapted.factors()
            target = adapted.window(weights)
            whole = base.to(target.device, non_blocking=True).float()
            target.copy_(torch.addmm(whole, up, down, alpha=self.adaptation.scale))

    @contextlib.contextmanager
    def left_out(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Have ``weights`` inside be those without adapters."""
        with torch.no_grad():
            for adapted, base in zip(self._adapted_blocks, self._base, strict=True):
                adapted.window(weights).copy_(base, non_blocking=True)
        try:
            yield
        finally:
            self.merge(weights)

    def _checksum(self, windows: Sequence[Tensor], group: dist.ProcessGroup) -> int:
        """Sum up adapted weights without adapters on all ranks of ``group``: their bits as numbers, added up.

        Another order, as another layout has, gives the same sum.
        """
        total = torch.zeros([], dtype=torch.int64, device=windows[0].device if windows else "cpu")
        for each in windows:
            total += each.view(_INTEGERS[each.itemsize]).sum(dtype=torch.int64)
        total = total.to(self._device)
        dist.all_reduce(total, group=group)
        return int(total)

    def _memory(self, windows: Sequence[Tensor]) -> list[Tensor]:
        """Return contiguous tensors like ``windows``, on the host where they are to be there."""
        if not self._on_host:
            return [torch.empty_like(each, memory_format=torch.contiguous_format) for each in windows]
        buffers = pinned_buffers([each.nbytes for each in windows])
        return [buffer.view(each.dtype).view(each.shape) for buffer, each in zip(buffers, windows, strict=True)]

    def _chunk_of(self, parameter: str) -> tuple[int, str]:
        """Return (a chunk's number, the name of the parameter in it)."""
        if not self._several:
            return 0, parameter
        number, name = parameter.split(".", 1)
        return int(number), name

    def _make(self) -> dict[str, tuple[torch.nn.Parameter, torch.nn.Parameter]]:
        """Return A and B of each weight of this stage, in float32: they are their own master weights.

        Every rank of the stage has all of them, also of a weight that it has no part of, but for experts of others.
        """
        made: dict[str, torch.nn.Parameter] = {}
        for block in self.blocks():
            number, name = self._chunk_of(block.parameter)
            size = [stop for _, stop in block.region]
            made[block.tensor] = torch.nn.Parameter(torch.zeros(size, dtype=torch.float32, device=self._device))
            # Megatron's mark of what is summed over the ranks with the same experts.
            made[block.tensor].allreduce = not is_expert(block.tensor)  # type: ignore[attr-defined]
            self.chunks[number].register_parameter(name, made[block.tensor])
        weights = adapted_shapes(self._architecture, self.adaptation)
        pairs = {tensor: (factor_of(tensor, "A"), factor_of(tensor, "B")) for tensor in weights}
        return {tensor: (made[a], made[b]) for tensor, (a, b) in pairs.items() if a in made}


def _ask_for_gradient(_: torch.nn.Module, __: Any, output: Tensor) -> None:
    """Have a layer's input ask for a gradient: computed again it has a backward pass only if its input has a gradient,
    and frozen embeddings have none."""
    if torch.is_grad_enabled():
        output.requires_grad_()


def _adapted(columns: Span, blocks: Sequence[Block], rows: int | None) -> Adapted:
    """Return a layer's part of one weight; a layer's own columns are those of all its weights.

    ``rows``: of each matrix, where the parameter has those of several experts behind each other.
    """
    assert all(block.offset[1] == 0 and block.region[1] == columns for block in blocks)
    spans = ((block.offset[0] % rows if rows else block.offset[0], block.region[0]) for block in blocks)
    return Adapted(columns, [((at, at + stop - start), (start, stop)) for at, (start, stop) in spans])
