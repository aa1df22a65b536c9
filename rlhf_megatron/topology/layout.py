"""Layouts: the degrees of parallelism of one role, the coordinates of its ranks, and the groups that they form.

Pure arithmetic, without torch or a cluster, so a layout for any world size can be made and checked anywhere. Process
groups are made from it in ``process_groups``; the contents of a shard are in ``models.weight_map``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping

from rlhf_megatron.errors import RecipeError


@dataclasses.dataclass(frozen=True)
class Coordinates:
    """The coordinates of one rank in its role's layout; each counts from 0."""

    tensor: int
    context: int
    data: int
    pipeline: int


@dataclasses.dataclass(frozen=True)
class ExpertCoordinates:
    """The coordinates of one rank in the grid of a mixture of experts, which cuts a pipeline stage in its own way."""

    tensor: int
    expert: int
    data: int
    pipeline: int


AXES = ("tensor", "context", "data", "pipeline")


def _group_of(position: int, degrees: Mapping[str, int], axes: Collection[str]) -> list[int]:
    """Return the positions that differ from ``position`` only along ``axes``, in rising order; the first of ``degrees``
    is counted first."""
    members, stride = [position], 1
    for axis, degree in degrees.items():
        if axis in axes:
            first = position // stride % degree * stride
            members = [member - first + step * stride for step in range(degree) for member in members]
        stride *= degree
    return members


def _groups_along(degrees: Mapping[str, int], axes: Collection[str]) -> Iterator[list[int]]:
    """Yield all groups of ``_group_of``, in the order of their first positions."""
    across = {axis: degree for axis, degree in degrees.items() if axis not in axes}
    firsts, stride = [0], 1
    for axis, degree in degrees.items():
        if axis in across:
            firsts = [first + step * stride for step in range(degree) for first in firsts]
        stride *= degree
    yield from (_group_of(first, degrees, axes) for first in firsts)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Degrees of parallelism. Ranks are numbered tensor first, then context, data, pipeline: Megatron's own order."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    virtual_pipeline: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    expert: int = 1
    expert_tensor: int | None = None  # default: tensor

    def __post_init__(self) -> None:
        for name in (*AXES, "virtual_pipeline"):
            if getattr(self, name) < 1:
                raise RecipeError(f"layout: {name} is {getattr(self, name)}; every degree must be at least 1")
        stage, shared = self.tensor * self.context * self.data, self.expert * self.expert_parts
        if self.expert < 1 or self.expert_parts < 1 or stage % shared:
            raise RecipeError(
                f"layout: expert {self.expert} x expert_tensor {self.expert_parts} = {shared} does not divide the "
                f"{stage} ranks of a pipeline stage (tensor x context x data)"
            )

    @property
    def size(self) -> int:
        """The number of ranks that the layout needs."""
        return self.tensor * self.context * self.data * self.pipeline

    @property
    def expert_parts(self) -> int:
        """The number of ranks that one expert is cut over."""
        return self.expert_tensor or self.tensor

    def expert_coordinates(self, position: int) -> ExpertCoordinates:
        """Return the place of the rank at ``position`` for experts, which count tensor first, then expert, data,
        pipeline.

        So the ranks that share the experts are neighbours, whatever they are to the rest of the layer.
        """
        pipeline, within = divmod(position, self.size // self.pipeline)
        group, tensor = divmod(within, self.expert_parts)
        data, expert = divmod(group, self.expert)
        return ExpertCoordinates(tensor, expert, data, pipeline)

    def expert_groups_along(self, *axes: str) -> Iterator[list[int]]:
        """Do as ``groups_along`` does, in the experts' coordinates."""
        yield from _groups_along(self._expert_degrees, axes)

    def expert_group_of(self, position: int, *axes: str) -> list[int]:
        """Do as ``group_of`` does, in the experts' coordinates."""
        return _group_of(position, self._expert_degrees, axes)

    def coordinates(self, position: int) -> Coordinates:
        """Return the coordinates of the rank at ``position`` (0 <= position < size) among the role's ranks."""
        return Coordinates(
            tensor=position % self.tensor,
            context=position // self.tensor % self.context,
            data=position // (self.tensor * self.context) % self.data,
            pipeline=position // (self.tensor * self.context * self.data),
        )

    def position(self, tensor: int, data: int, pipeline: int, context: int = 0) -> int:
        """Return the inverse of ``coordinates``."""
        return tensor + self.tensor * (context + self.context * (data + self.data * pipeline))

    def groups_along(self, *axes: str) -> Iterator[list[int]]:
        """Yield the groups of positions that differ only in the coordinates named by ``axes``, each in rising order."""
        yield from _groups_along(self._degrees, axes)

    def group_of(self, position: int, *axes: str) -> list[int]:
        """Return the one of ``groups_along`` that ``position`` is in."""
        return _group_of(position, self._degrees, axes)

    @property
    def _degrees(self) -> dict[str, int]:
        """By axis, in the order in which ranks are counted."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def _expert_degrees(self) -> dict[str, int]:
        stage = self.size // self.pipeline
        data = stage // (self.expert * self.expert_parts)
        return {"tensor": self.expert_parts, "expert": self.expert, "data": data, "pipeline": self.pipeline}

    def stage_layers(self, layers: int) -> list[int]:
        """Return how many of ``layers`` decoder layers each pipeline stage holds, from the first to the last.

        Raises RecipeError, which begins with the layout's key, where a stage would have none, the stages between the
        given edges would not be equal, or ``virtual_pipeline`` does not divide each of them.
        """
        edges = {0: self.first_stage_layers, self.pipeline - 1: self.last_stage_layers}
        given = {stage: count for stage, count in edges.items() if count is not None}
        left, stages = layers - sum(given.values()), self.pipeline - len(given)
        # Every stage has a layer: an empty one would only pass activations on.
        if (stages and (left % stages or left < stages)) or (not stages and left):
            besides = f" with first {self.first_stage_layers} and last {self.last_stage_layers} given" if given else ""
            raise RecipeError(
                f"layout.pipeline={self.pipeline}: {layers} layers do not divide over {self.pipeline} stages{besides}; "
                "set first_stage_layers and last_stage_layers so that the stages between are equal"
            )
        counts = [given.get(stage, left // stages if stages else 0) for stage in range(self.pipeline)]
        if any(count % self.virtual_pipeline for count in counts):
            raise RecipeError(
                f"layout.virtual_pipeline={self.virtual_pipeline} does not divide the layers of every pipeline stage, "
                f"{', '.join(map(str, counts))}; use a divisor"
            )
        return counts

    def stage_chunks(self, layers: int) -> list[list[range]]:
        """Return the decoder layers of each pipeline stage; the first and last stage may hold a number of their own.

        Each stage has ``virtual_pipeline`` chunks, which the stages take in turns: the first chunks of all stages hold
        the front of the model. Raises RecipeError as ``stage_layers``.
        """
        in_turn = [count // self.virtual_pipeline for count in self.stage_layers(layers)] * self.virtual_pipeline
        starts = list(itertools.accumulate(in_turn, initial=0))
        chunks = [range(start, start + count) for start, count in zip(starts, in_turn, strict=False)]
        return [chunks[stage :: self.pipeline] for stage in range(self.pipeline)]
