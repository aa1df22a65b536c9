"""A role on some of the ranks, as all ranks of the world see it: batches are sent to it, and its outputs returned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.data.rollout_batch import RolloutBatch
from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.build import choose_implementation
from rlhf_megatron.models.lora import Adaptation, adapter_layout, adapter_ranks
from rlhf_megatron.models.weight_map import Implementation
from rlhf_megatron.models.weight_source import WeightSource
from rlhf_megatron.recipe import RoleSection
from rlhf_megatron.regather.plan import ShardSpec
from rlhf_megatron.regather.shard_specs import adapter_shards, trainer_shards
from rlhf_megatron.roles.optimizer_state import nonfinite_state
from rlhf_megatron.roles.outputs import Objective, TokenOutputs
from rlhf_megatron.roles.role import Role
from rlhf_megatron.runtime.finite import NotFiniteError
from rlhf_megatron.topology.exchange import from_rank, refused_by_all, sum_over_ranks
from rlhf_megatron.topology.layout import Layout
from rlhf_megatron.topology.process_groups import make_groups
from rlhf_megatron.topology.team import Team, whole_world

Value = TypeVar("Value")


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
        """``local``: the role on this rank, if it is one of ``ranks``."""
        self._architecture, self._layout, self._ranks = architecture, layout, ranks
        self._implementation, self._local = implementation, local

    def shard_spec(self) -> ShardSpec:
        """The rectangles that each of the role's ranks holds."""
        return trainer_shards(self._architecture, self._layout, self._ranks, self._implementation)

    def parameters(self) -> Mapping[str, Tensor]:
        """This rank's live parameters; none where the role is not."""
        return self._local.parameters() if self._local else {}

    def adapter_shard_spec(self, adaptation: Adaptation) -> ShardSpec:
        """The rectangles of A and B that each of the role's ranks holds."""
        return adapter_shards(self._architecture, adaptation, self._layout, self._ranks)

    def adapter_parameters(self) -> Mapping[str, Tensor]:
        """This rank's live A and B; none where the role is not."""
        adapters = self._local.shard.adapters if self._local else None
        return {name: each.data for name, each in adapters.module.named_parameters()} if adapters else {}


class PlacedRole:
    """A ``Role`` on its own ranks. Every rank of the world makes it, and calls every method, with the same batch; of
    those that are said to be the team's, the team's ranks suffice.

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
        """``ranks`` rise; ``team`` has them all, default: the world. ``dtype`` and ``settings`` are ``Role``'s."""
        self.team = team or whole_world()
        self.name, self.architecture, self.layout, self.ranks = name, architecture, layout, list(ranks)
        self.learns = settings.get("optimizer") is not None
        self._has_adapters = section.adapters is not None
        implementation = choose_implementation(section.transformer_implementation, name, layout, dtype)
        self.local: Role | None = None
        if dist.get_rank() in self.ranks:
            self.local = Role(name, architecture, layout, self.ranks, section, dtype=dtype, **settings)
        else:
            make_groups(layout, self.ranks)
            if self._has_adapters:  # whose role makes groups for them
                make_groups(adapter_layout(layout), adapter_ranks(layout, self.ranks))
        self.weights = PlacedWeights(architecture, layout, self.ranks, implementation, self.local)

    def broadcast(self, value: Value | None) -> Value:
        """Returns the ``value`` of the role's first rank on every rank of the world."""
        return self._broadcast(value, whole_world())

    def broadcast_in_team(self, value: Value | None) -> Value:
        """Returns the ``value`` of the role's first rank on every rank of its team."""
        return self._broadcast(value, self.team)

    def _broadcast(self, value: Value | None, team: Team) -> Value:
        if len(self.ranks) < len(team.ranks):  # else each has it already
            value = from_rank(value, self.ranks[0], team.group)
        assert value is not None
        return value

    def load(self, source: WeightSource, adapters: WeightSource | None = None) -> None:
        """As ``Role.load``, on the role's ranks; collective over the world.

        Raises on all ranks the ModelError of one, and NotFiniteError where adapters make weights that are not finite.
        """
        with refused_by_all():
            if self.local:
                self.local.read_weights(source, adapters)
        if self.local:
            self.local.apply_weights()
        problem = self.not_finite(optimizer=False) if self._has_adapters else ""
        if problem:
            raise AdaptersNotFinite(
                f"{self.name}.lora: with the adapters merged weights are not finite: {problem}; lower "
                f"{self.name}.lora.alpha, or take another adapter"
            )

    def not_finite(self, optimizer: bool) -> str:
        """``nonfinite_state`` of the role, on every rank of the world; collective over it."""
        return self.broadcast(nonfinite_state(self.local, optimizer) if self.local else None)

    def offload(self) -> None:
        """As ``Role.offload``."""
        if self.local:
            self.local.offload()

    def logprobs(self, batch: RolloutBatch) -> TokenOutputs:
        """As ``Role.logprobs``, on every rank of the team."""
        return self.broadcast_in_team(self.local.logprobs(batch) if self.local else None)

    def values(self, batch: RolloutBatch) -> Tensor:
        """As ``Role.values``, on every rank of the team."""
        return self.broadcast_in_team(self.local.values(batch) if self.local else None)

    def scores(self, batch: RolloutBatch) -> Tensor:
        """As ``Role.scores``, on every rank of the team."""
        return self.broadcast_in_team(self.local.scores(batch) if self.local else None)

    def update(
        self, batch: RolloutBatch, fields: dict[str, Tensor], objective: Objective, **how: Any
    ) -> dict[str, float]:
        """As ``Role.update`` on the role's ranks; elsewhere nothing, at once, so that other roles learn meanwhile."""
        return self.local.update(batch, fields, objective, **how) if self.local else {}

    def take_gradient_sync_ms(self) -> float:
        """The mean of ``Trainer.take_gradient_sync_ms`` over the role's ranks, on every rank of the world."""
        trainer = self.local.trainer if self.local else None
        own = trainer.take_gradient_sync_ms() if trainer else 0.0
        return sum_over_ranks([own])[0] / len(self.ranks)

    def take_bad_gradients(self) -> str:
        """``Trainer.take_bad_gradients`` on every rank of the world; "" of a role that does not learn."""
        trainer = self.local.trainer if self.local else None
        return self.broadcast(trainer.take_bad_gradients() if trainer else "")


def compute_concurrently(calls: Mapping[str, tuple[PlacedRole, Callable[[Role], Any]]]) -> dict[str, Any]:
    """The output of each call of a role, on every rank of the roles' team, by the call's name; collective over it.

    Roles without a rank in common compute at the same time: nothing is exchanged before all are done.
    """
    outputs = {name: call(role.local) if role.local else None for name, (role, call) in calls.items()}
    return {name: role.broadcast_in_team(outputs[name]) for name, (role, _) in calls.items()}
