"""The parts of a run's state beside its roles, as a checkpoint keeps them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from rlhf_megatron.topology.exchange import from_rank
from rlhf_megatron.topology.team import Team


class Part(Protocol):
    """A part of a run's state beside its roles, the same on every rank: dicts with JSON values and tensors."""

    def state(self) -> dict[str, Any]:
        """Return everything that ``load`` needs."""

    def load(self, state: dict[str, Any]) -> None:
        """Resume where ``state`` was taken."""


# A rank of the run that was saved, and a prefix -> those of its own tensors that are named so and a slash, by the rest.
# They are read when they are asked for.
OwnTensors = Callable[[int, str], Mapping[str, Tensor]]


class SpreadPart(Protocol):
    """A part of which ranks also hold tensors apart: each writes its own into its own file."""

    def state(self) -> dict[str, Any]:
        """Return the state that is the same on every rank, as of a ``Part``."""

    def own_tensors(self) -> dict[str, Tensor]:
        """Return tensors that this rank alone has."""

    def load(self, state: dict[str, Any], own: OwnTensors) -> None:
        """Resume where ``state`` was taken, perhaps with other ranks."""


class TeamOwnedState:
    """A part that only one team keeps up to date: its state is that of the team's first rank, on every rank."""

    def __init__(self, part: Part, team: Team) -> None:
        """Set up; of the world's team, the part is the same everywhere as it is."""
        self._part, self._team = part, team

    def state(self) -> dict[str, Any]:
        """See Part; collective over the world."""
        return _of_team(self._part.state(), self._team)

    def load(self, state: dict[str, Any]) -> None:
        """See Part."""
        self._part.load(state)


class TeamSpreadState:
    """As ``TeamOwnedState``, of a spread part: what ranks of the team hold apart stays there."""

    def __init__(self, part: SpreadPart, team: Team) -> None:
        self._part, self._team = part, team

    def state(self) -> dict[str, Any]:
        """See SpreadPart; collective over the world."""
        return _of_team(self._part.state(), self._team)

    def own_tensors(self) -> dict[str, Tensor]:
        """See SpreadPart."""
        return self._part.own_tensors()

    def load(self, state: dict[str, Any], own: OwnTensors) -> None:
        """See SpreadPart."""
        self._part.load(state, own)


def _of_team(state: dict[str, Any], team: Team) -> dict[str, Any]:
    return state if team.group is None else from_rank(state, team.first)
