"""A role on some of the ranks, as all ranks of the world see it: the data go to it, and what it finds comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.data.rollout_batch import RolloutBatch
from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.build import choose_implementation
from rlhf_megatron.models.hf_files import WeightSource
from rlhf_megatron.models.lora import Adaptation, adapter_layout
from rlhf_megatron.recipe import RoleSection
from rlhf_megatron.regather.plan import ShardSpec
from rlhf_megatron.regather.shard_specs import adapter_shards, trainer_shards
from rlhf_megatron.roles.optimizer_state import nonfinite_state
from rlhf_megatron.roles.outputs import Objective, TokenOutputs
from rlhf_megatron.roles.role import Role
from rlhf_megatron.runtime.finite import NotFiniteError
from rlhf_megatron.topology.exchange import from_rank, refused_by_all, sum_over_ranks
from rlhf_megatron.topology.layout import Layout, make_groups
from rlhf_megatron.topology.team import Team, whole_world

Found = TypeVar("Found")


class AdaptersNotFinite(NotFiniteError):
    """Weights that given adapters make not finite, in each attempt."""

    is_transient = False


class PlacedRole:
    """A ``Role`` on its own ranks. Every rank of the world makes it, and calls every method, with the same batch; those
    that are said to be the team's matter, every rank of that.

    Attributes:
        local: the role on this rank, or None where it is not.
        team: who hears what it finds, and calls it; ranks outside need not.
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
        """``ranks`` rise; ``team`` has them all, default: the world. ``dtype`` and ``settings`` are ``Role``'s."""
        self.team = team or whole_world()
        self.name, self.architecture, self.layout, self.ranks = name, architecture, layout, list(ranks)
        self.learns = settings.get("optimizer") is not None
        self.implementation = choose_implementation(section.transformer_implementation, name, layout, dtype)
        self._has_adapters = section.adapters is not None
        self.local: Role | None = None
        if dist.get_rank() in self.ranks:
            self.local = Role(name, architecture, layout, self.ranks, section, dtype=dtype, **settings)
        else:
            make_groups(layout, self.ranks)
            if self._has_adapters:  # whose role makes groups for them
                make_groups(adapter_layout(layout), self.ranks)

    def everywhere(self, found: Found | None) -> Found:
        """What the role's first rank has ``found``, on every rank of the world."""
        return self._told(found, whole_world())

    def in_team(self, found: Found | None) -> Found:
        """What the role's first rank has ``found``, on every rank of its team."""
        return self._told(found, self.team)

    def _told(self, found: Found | None, team: Team) -> Found:
        if len(self.ranks) < len(team.ranks):
            found = from_rank(found, self.ranks[0], team.group)
        assert found is not None
        return found

    def load(self, source: WeightSource, adapters: WeightSource | None = None) -> None:
        """As ``Role.load``, on the role's ranks; collective over the world.

        Raises on all ranks the ModelError of one, and NotFiniteError where adapters make weights that are not finite.
        """
        with refused_by_all():
            if self.local:
                self.local.read(source, adapters)
        if self.local:
            self.local.begin()
        problem = self.not_finite(optimizer=False) if self._has_adapters else ""
        if problem:
            raise AdaptersNotFinite(
                f"{self.name}.lora: with the adapters merged weights are not finite: {problem}; lower "
                f"{self.name}.lora.alpha, or take another adapter"
            )

    def not_finite(self, optimizer: bool) -> str:
        """``nonfinite_state`` of the role, on every rank of the world; collective over it."""
        return self.everywhere(nonfinite_state(self.local, optimizer) if self.local else None)

    def offload(self) -> None:
        """As ``Role.offload``."""
        if self.local:
            self.local.offload()

    def parameters(self) -> Mapping[str, Tensor]:
        """This rank's live parameters; none where the role is not."""
        return self.local.parameters() if self.local else {}

    def side(self) -> ShardSpec:
        """What each of the role's ranks holds, for a regathering."""
        return trainer_shards(self.architecture, self.layout, self.ranks, self.implementation)

    def adapter_shards(self, adaptation: Adaptation) -> ShardSpec:
        """What each of the role's ranks holds of its adapters."""
        return adapter_shards(self.architecture, adaptation, self.layout, self.ranks)

    def adapter_parameters(self) -> Mapping[str, Tensor]:
        """This rank's live A and B; none where the role is not."""
        adapters = self.local.adapters if self.local else None
        return {name: each.data for name, each in adapters.module.named_parameters()} if adapters else {}

    def logprobs(self, batch: RolloutBatch) -> TokenOutputs:
        """As ``Role.logprobs``, on every rank of the team."""
        return self.in_team(self.local.logprobs(batch) if self.local else None)

    def values(self, batch: RolloutBatch) -> Tensor:
        """As ``Role.values``, on every rank of the team."""
        return self.in_team(self.local.values(batch) if self.local else None)

    def scores(self, batch: RolloutBatch) -> Tensor:
        """As ``Role.scores``, on every rank of the team."""
        return self.in_team(self.local.scores(batch) if self.local else None)

    def update(
        self, batch: RolloutBatch, fields: dict[str, Tensor], objective: Objective, **how: Any
    ) -> dict[str, float]:
        """As ``Role.update`` on the role's ranks; elsewhere nothing, at once, so that other roles learn meanwhile."""
        return self.local.update(batch, fields, objective, **how) if self.local else {}

    def take_gradient_sync_ms(self) -> float:
        """The mean of ``Role.take_gradient_sync_ms`` over the role's ranks, on every rank of the world."""
        own = self.local.take_gradient_sync_ms() if self.local else 0.0
        return sum_over_ranks([own])[0] / len(self.ranks)

    def take_bad_gradients(self) -> str:
        """``Role.bad_gradients`` since the last call, on every rank of the world."""
        found = self.local.bad_gradients if self.local else ""
        if self.local:
            self.local.bad_gradients = ""
        return self.everywhere(found)


def side_by_side(calls: Mapping[str, tuple[PlacedRole, Callable[[Role], Any]]]) -> dict[str, Any]:
    """What each call finds on its role, on every rank of the roles' team, under the call's name; collective over it.

    Roles without a rank in common compute at the same time: nothing is exchanged before all are done.
    """
    found = {name: call(role.local) if role.local else None for name, (role, call) in calls.items()}
    return {name: role.in_team(found[name]) for name, (role, _) in calls.items()}
