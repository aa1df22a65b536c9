"""A role on some of the ranks, as all ranks of the world see it."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.data.packing import assign_rows
from rlhf_megatron.data.rollout_batch import RolloutBatch
from rlhf_megatron.data.row_numbers import RowNumbers
from rlhf_megatron.data.shared_prompts import SharedPrefixes
from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.build import choose_implementation
from rlhf_megatron.models.flops import attention_cost
from rlhf_megatron.models.lora import Adaptation
from rlhf_megatron.models.weight_map import Block, Implementation
from rlhf_megatron.models.weight_source import WeightSource
from rlhf_megatron.recipe import RoleSection
from rlhf_megatron.regather.plan import ShardSpec
from rlhf_megatron.regather.shard_specs import adapter_shards, trainer_shards
from rlhf_megatron.roles.optimizer_state import nonfinite_state
from rlhf_megatron.roles.outputs import Objective
from rlhf_megatron.roles.role import Role
from rlhf_megatron.roles.shares import Home
from rlhf_megatron.runtime.finite import NotFiniteError
from rlhf_megatron.topology.exchange import from_rank, refused_by_all, sum_over_ranks
from rlhf_megatron.topology.layout import Layout
from rlhf_megatron.topology.team import Team, whole_world

Value = TypeVar("Value")
TIMES = ("gradient_sync_ms", "forward_time_ms", "backward_time_ms")


class AdaptersNotFinite(NotFiniteError):
    """Weights that given adapters make not finite, in each attempt."""

    is_transient = False


class PlacedWeights:
    """The weights of a role, and its adapters', as one end of a transfer: of all its ranks, and live on this one."""

    def __init__(
        self,
        architecture: Architecture,
        layout: Layout,
        ranks: Sequence[int],
        implementation: Implementation,
        local: Role | None,
    ) -> None:
        """Set up; ``local``: the role on this rank, if it is one of ``ranks``."""
        self._architecture, self._layout, self._ranks = architecture, layout, ranks
        self._implementation, self._local = implementation, local

    def shard_spec(self) -> ShardSpec:
        """Return the rectangles that each of the role's ranks holds."""
        return trainer_shards(self._architecture, self._layout, self._ranks, self._implementation)

    def parameters(self) -> Mapping[str, Tensor]:
        """Return this rank's live parameters; none where the role is not."""
        return self._local.parameters() if self._local else {}

    def adapter_shard_spec(self, adaptation: Adaptation) -> ShardSpec:
        """Return the rectangles of A and B that each of the role's ranks holds."""
        return adapter_shards(self._architecture, adaptation, self._layout, self._ranks)

    def adapter_parameters(self) -> Mapping[str, Tensor]:
        """Return this rank's live A and B; none where the role is not."""
        adapters = self._local.shard.adapters if self._local else None
        return {name: each.data for name, each in adapters.module.named_parameters()} if adapters else {}


class JoinedWeights:
    """The weights of several roles as one end of a transfer. Names of parameters have the number of their role first,
    and all are tensors of one checkpoint."""

    def __init__(self, parts: Sequence[PlacedWeights], tensors: Container[str] | None = None) -> None:
        """Set up; ``tensors``: those alone, default: all."""
        self._parts, self._tensors = parts, tensors

    def shard_spec(self) -> ShardSpec:
        """Return the rectangles that each of the roles' ranks holds."""
        specs = [part.shard_spec() for part in self._parts]
        ranks = sorted(set().union(*(spec.shard_of for spec in specs)))

        def blocks_of(shard: tuple[Any, ...]) -> list[Block]:
            return [
                block._replace(parameter=f"{number}/{block.parameter}")
                for number, (spec, own) in enumerate(zip(specs, shard, strict=True))
                for block in (() if own is None else spec.blocks_of(own))
                if self._tensors is None or block.tensor in self._tensors
            ]

        return ShardSpec({rank: tuple(spec.shard_of.get(rank) for spec in specs) for rank in ranks}, blocks_of)

    def parameters(self) -> dict[str, Tensor]:
        """Return this rank's live parameters."""
        return {
            f"{number}/{name}": parameter
            for number, part in enumerate(self._parts)
            for name, parameter in part.parameters().items()
        }


class PlacedRole:
    """A ``Role`` on its own ranks. Every rank of the world makes it, and calls every method; of those that are said to
    be the team's, the team's ranks suffice.

    Attributes:
        local: the role on this rank, or None where it is not.
        weights: its weights, for a transfer.
        team: the ranks that get its outputs, and call it; ranks outside need not.
        learns: whether it has an optimizer.
    """

    def __init__(
        self,
        name: str,
        architecture: Architecture,
        layout: Layout,
        ranks: Sequence[int],
        section: RoleSection,
        dtype: str,
        team: Team | None = None,
        **settings: Any,
    ) -> None:
        """Set up; ``ranks`` rise; ``team`` has them all, default: the world. ``dtype`` and ``settings`` are
        ``Role``'s."""
        self.team = team or whole_world()
        self.name, self.architecture, self.layout, self.ranks = name, architecture, layout, list(ranks)
        self.learns = settings.get("optimizer") is not None
        self._has_adapters, self._shares_prompts = section.adapters is not None, settings.get("shares_prompts", False)
        implementation = choose_implementation(
            section.transformer_implementation, name, layout, dtype, self._shares_prompts
        )
        self.local: Role | None = None
        if dist.get_rank() in self.ranks:
            self.local = Role(name, architecture, layout, self.ranks, section, dtype=dtype, **settings)
        self.weights = PlacedWeights(architecture, layout, self.ranks, implementation, self.local)

    def broadcast(self, value: Value | None) -> Value:
        """Return the ``value`` of the role's first rank on every rank of the world."""
        return self._broadcast(value, whole_world())

    def broadcast_in_team(self, value: Value | None) -> Value:
        """Return the ``value`` of the role's first rank on every rank of its team."""
        return self._broadcast(value, self.team)

    def _broadcast(self, value: Value | None, team: Team) -> Value:
        if len(self.ranks) < len(team.ranks):  # else each has it already
            value = from_rank(value, self.ranks[0], team.group)
        assert value is not None
        return value

    def load(
        self,
        source: WeightSource,
        adapters: WeightSource | None = None,
        complete: Callable[[], None] | None = None,
    ) -> None:
        """Do as ``Role.load`` does, on the role's ranks; collective over the world.

        ``complete`` is called on every rank of the world when it has read its part: no rank waits in a collective for
        another that waits for a download then.

        Raises on all ranks the ModelError of one, and NotFiniteError where adapters make weights that are not finite.
        """
        with refused_by_all():
            if self.local:
                self.local.read_weights(source, adapters)
            if complete:
                complete()
        if self.local:
            self.local.apply_weights()
        problem = self.not_finite(optimizer=False) if self._has_adapters else ""
        if problem:
            raise AdaptersNotFinite(
                f"{self.name}.lora: with the adapters merged weights are not finite: {problem}; lower "
                f"{self.name}.lora.alpha, or take another adapter"
            )

    def not_finite(self, optimizer: bool) -> str:
        """Return ``nonfinite_state`` of the role, on every rank of the world; collective over it."""
        return self.broadcast(nonfinite_state(self.local, optimizer) if self.local else None)

    def offload(self) -> None:
        """Do as ``Role.offload`` does."""
        if self.local:
            self.local.offload()

    def own_rows(self, lengths: Tensor, rows_together: int = 1) -> list[int]:
        """Do as ``Role.own_rows`` does; none where the role is not."""
        return self.local.own_rows(lengths, rows_together) if self.local else []

    def assign(self, numbers: RowNumbers, parts: Sequence[Tensor] | None = None) -> Tensor:
        """Do as ``assign_rows`` does, over the role's data-parallel ranks; where it shares prompts, as
        ``SharedPrefixes``."""
        data, attention = self.layout.data, attention_cost(self.architecture)
        if self._shares_prompts:
            return SharedPrefixes.of_numbers(numbers).assign(data, parts, attention)
        return assign_rows(numbers.lengths, data, parts, 1, attention)

    @property
    def home(self) -> Home:
        """The placement of the rows that it is to compute."""
        layout = self.layout
        leaders = tuple(self.ranks[layout.position(0, data, 0)] for data in range(layout.data))
        placement = (tuple(self.ranks), layout.tensor, layout.context, layout.pipeline)
        if self.local is None:
            return Home(placement, leaders)
        data = layout.coordinates(self.ranks.index(dist.get_rank())).data
        return Home(placement, leaders, data, self.local.groups.model)

    def update(
        self, batch: RolloutBatch, fields: dict[str, Tensor], objective: Objective, **how: Any
    ) -> dict[str, float]:
        """Do as ``Role.update`` does on the role's ranks, each with its share; elsewhere nothing, at once, so that
        other roles learn meanwhile."""
        return self.local.update(batch, fields, objective, **how) if self.local else {}

    def take_times_ms(self) -> dict[str, float]:
        """Return the means of ``Role.take_times_ms`` over the role's ranks, on every rank of the world."""
        own = self.local.take_times_ms() if self.local else dict.fromkeys(TIMES, 0.0)
        sums = sum_over_ranks([own[name] for name in TIMES])
        return {name: total / len(self.ranks) for name, total in zip(TIMES, sums, strict=True)}

    def take_bad_gradients(self) -> str:
        """Do ``Trainer.take_bad_gradients`` on every rank of the world; "" of a role that does not learn."""
        trainer = self.local.trainer if self.local else None
        return self.broadcast(trainer.take_bad_gradients() if trainer else "")
