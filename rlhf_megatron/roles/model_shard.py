"""One rank's part of a role's model: its Megatron chunks, the adapters on them, and which weights they hold.

Passes through it are the matter of ``passes``, its optimizer of ``trainer``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.errors import UserError
from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.build import build_model, choose_implementation
from rlhf_megatron.models.fp8 import check_fp8
from rlhf_megatron.models.recompute import lacking_module
from rlhf_megatron.models.transformer_config import transformer_config
from rlhf_megatron.models.weight_map import Block, megatron_blocks
from rlhf_megatron.models.weight_source import WeightSource, load_blocks
from rlhf_megatron.recipe import OptimizerSection, RoleSection
from rlhf_megatron.regather.plan import ShardSpec
from rlhf_megatron.regather.shard_specs import trainer_shards
from rlhf_megatron.roles.adapters import Adapters
from rlhf_megatron.topology.layout import Layout
from rlhf_megatron.topology.process_groups import make_groups


class Trainable(Protocol):
    """The parameters that learn, the model's or its adapters', and how they lie on the role's ranks."""

    @property
    def chunks(self) -> Sequence[Any]:
        """Modules that hold them, one for each virtual pipeline stage."""

    @property
    def module(self) -> torch.nn.Module:
        """All chunks; parameters of several are named by the chunk's number first."""

    @property
    def layout(self) -> Layout:
        """Their degrees of parallelism."""

    @property
    def ranks(self) -> Sequence[int]:
        """The role's ranks, in the order of ``layout``."""

    @property
    def groups(self) -> Any:
        """The process groups of ``layout``."""

    def blocks(self) -> list[Block]:
        """Return the rectangles that this rank holds, of Hugging Face tensors or of the adapters' A and B."""


class ModelShard:
    """One rank's part of a model; made on all of the role's ranks together.

    Attributes:
        position: this rank's, among the role's ``ranks``.
        groups: Megatron's process groups of ``layout``.
        chunks: the model's pieces on this rank, one for each virtual pipeline stage.
        module: all chunks; parameters of several are named by the chunk's number first.
        adapters: learn in place of the weights, where the recipe asks for that.
    """

    def __init__(
        self,
        role: str,
        architecture: Architecture,
        layout: Layout,
        ranks: Sequence[int],
        section: RoleSection,
        dtype: str,
        seed: int,
        deterministic: bool,
        shares_prompts: bool,
        *,
        optimizer: OptimizerSection | None,
    ) -> None:
        """Build the model without weights, as ``Role`` does; without ``optimizer`` it is frozen."""
        architecture.check_layout(layout)
        tied = architecture.tied_embeddings and architecture.head == "language"
        self._overlaps = optimizer is not None and optimizer.overlap_grad_reduce
        groups = make_groups(layout, ranks, tied_embeddings=tied, overlapped=self._overlaps)
        self.architecture, self.layout, self.ranks, self.groups = architecture, layout, list(ranks), groups
        self.position = self.ranks.index(dist.get_rank())
        self.implementation = choose_implementation(
            section.transformer_implementation, role, layout, dtype, shares_prompts
        )
        if section.fp8_recipe:
            check_fp8(role, section.fp8_recipe, self.implementation)
        lacking = lacking_module(architecture, section.recompute.selected)
        if lacking:
            raise UserError(f"{role}.recompute.modules: {lacking}; leave it out")
        self.config = transformer_config(
            architecture,
            layout,
            dtype,
            sequence_parallel=section.sequence_parallel,
            cp_comm_type=section.cp_comm_type,
            recompute=section.recompute,
            fused=self.implementation == "transformer_engine",
            deterministic=deterministic,
            fp8=section.fp8_recipe,
        )
        self.chunks: list[Any] = list(build_model(architecture, self.config, groups, self.implementation, seed))
        self.module: torch.nn.Module = self.chunks[0] if len(self.chunks) == 1 else torch.nn.ModuleList(self.chunks)
        self.adapters = self._make_adapters(section, seed)
        if optimizer is None or self.adapters:
            self.module.requires_grad_(False)
        self.module.train(optimizer is not None)

    def _make_adapters(self, section: RoleSection, seed: int) -> Adapters | None:
        if section.adapters is None:
            return None
        return Adapters(
            section.adapters,
            self.architecture,
            self.layout,
            self.ranks,
            self.position,
            self.chunks,
            self.blocks(),
            seed,
            self.groups,
            self._overlaps,
        )

    @property
    def trainable(self) -> Trainable:
        """The part that learns if the role does: the adapters where there are some, else the model."""
        return self.adapters or self

    def parameters(self) -> dict[str, Tensor]:
        """Return this rank's live parameters by Megatron's names."""
        return {name: parameter.data for name, parameter in self.module.named_parameters()}

    def blocks(self) -> list[Block]:
        """Return the rectangles of Hugging Face tensors that this rank holds."""
        return megatron_blocks(self.architecture, self.layout, self.position, self.implementation)

    def spec(self) -> ShardSpec:
        """Return the rectangles that each of the role's ranks holds."""
        return trainer_shards(self.architecture, self.layout, self.ranks, self.implementation)

    def read(self, source: WeightSource, adapters: WeightSource | None) -> None:
        """Fill parameters and adapters, which are not merged yet; exchanges nothing. Raises as ``load_blocks``."""
        load_blocks(self.blocks(), self.parameters(), source)
        if self.adapters:
            self.adapters.read(adapters)
