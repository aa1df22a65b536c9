"""Layouts: the degrees of parallelism of one role, the coordinates of its ranks, and the process groups they form.

Everything down to ``make_groups`` is arithmetic that needs neither torch nor a cluster, so a layout for any world size
can be made and checked anywhere. What a shard holds is the matter of ``models.weight_map``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_megatron.errors import RecipeError

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection


@dataclasses.dataclass(frozen=True)
class Coordinates:
    """Where one rank stands in its role's layout; each counts from 0."""

    tensor: int
    context: int
    data: int
    pipeline: int


@dataclasses.dataclass(frozen=True)
class ExpertCoordinates:
    """Where one rank stands in the grid of a mixture of experts, which cuts a pipeline stage in its own way."""

    tensor: int
    expert: int
    data: int
    pipeline: int


_AXES = ("tensor", "context", "data", "pipeline")


def _alike(places: Sequence[Coordinates | ExpertCoordinates], axes: Collection[str]) -> Iterable[list[int]]:
    """The positions of ``places`` that differ only in the coordinates named by ``axes``, together, in rising order."""
    fixed = [field.name for field in dataclasses.fields(places[0]) if field.name not in axes]
    groups: dict[tuple[int, ...], list[int]] = {}
    for position, place in enumerate(places):
        groups.setdefault(tuple(getattr(place, axis) for axis in fixed), []).append(position)
    return groups.values()


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
        for name in (*_AXES, "virtual_pipeline"):
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
        """The place of the rank at ``position`` for experts, which count tensor first, then expert, data, pipeline.

        So the ranks that share the experts are neighbours, whatever they are to the rest of the layer.
        """
        pipeline, within = divmod(position, self.size // self.pipeline)
        group, tensor = divmod(within, self.expert_parts)
        data, expert = divmod(group, self.expert)
        return ExpertCoordinates(tensor, expert, data, pipeline)

    def expert_groups_along(self, *axes: str) -> Iterator[list[int]]:
        """As ``groups_along``, in the experts' coordinates."""
        yield from _alike([self.expert_coordinates(position) for position in range(self.size)], axes)

    def coordinates(self, position: int) -> Coordinates:
        """The coordinates of the rank at ``position`` (0 <= position < size) among the role's ranks."""
        return Coordinates(
            tensor=position % self.tensor,
            context=position // self.tensor % self.context,
            data=position // (self.tensor * self.context) % self.data,
            pipeline=position // (self.tensor * self.context * self.data),
        )

    def position(self, tensor: int, data: int, pipeline: int, context: int = 0) -> int:
        """The inverse of ``coordinates``."""
        return tensor + self.tensor * (context + self.context * (data + self.data * pipeline))

    def groups_along(self, *axes: str) -> Iterator[list[int]]:
        """The groups of positions that differ only in the coordinates named by ``axes``, each in rising order."""
        yield from _alike([self.coordinates(position) for position in range(self.size)], axes)

    def stage_chunks(self, layers: int) -> list[list[range]]:
        """The decoder layers of each pipeline stage; the first and last stage may hold a number of their own.

        Each stage has ``virtual_pipeline`` chunks, which the stages take in turns: the first chunks of all stages hold
        the front of the model. Raises RecipeError where the layers cannot be split evenly.
        """
        edge = {0: self.first_stage_layers, self.pipeline - 1: self.last_stage_layers}
        given = {stage: count for stage, count in edge.items() if count is not None}
        even_stages = self.pipeline - len(given)
        left = layers - sum(given.values())
        if left < even_stages or (left % even_stages if even_stages else left):  # a stage without layers is none
            raise RecipeError(
                f"layout: {layers} layers do not split over {self.pipeline} pipeline stages"
                f"{f' with {given} given for the edge stages' if given else ''}; "
                "set layout.first_stage_layers and layout.last_stage_layers"
            )
        counts = [given.get(stage, left // even_stages if even_stages else 0) for stage in range(self.pipeline)]
        if any(count % self.virtual_pipeline for count in counts):
            raise RecipeError(
                f"layout: virtual_pipeline={self.virtual_pipeline} does not divide the {counts} layers of the stages"
            )
        in_turn = [count // self.virtual_pipeline for count in counts] * self.virtual_pipeline
        starts = list(itertools.accumulate(in_turn, initial=0))
        chunks = [range(start, start + count) for start, count in zip(starts, in_turn, strict=False)]
        return [chunks[stage :: self.pipeline] for stage in range(self.pipeline)]


def make_groups(layout: Layout, ranks: Sequence[int]) -> ProcessGroupCollection | None:
    """The process groups of one role whose positions are the global ``ranks``, in that order.

    Collective over the whole world: every rank calls it for every role, in the same order. Ranks outside the role get
    None. Equal sets of ranks share one communicator. Every field that megatron-core 0.19 reads is set, since it takes a
    missing one for a group of size 1; ``pp_gradients`` is our own.
    """
    import torch.distributed as dist
    from megatron.core.process_groups_config import ProcessGroupCollection

    if len(ranks) != layout.size:
        raise RecipeError(f"layout: {layout} needs {layout.size} ranks and was given {len(ranks)}")
    me = dist.get_rank()
    made: dict[tuple[int, ...], Any] = {}

    def group_of(lists: Iterator[list[int]] | list[list[int]]) -> Any:
        mine = None
        for positions in lists:
            members = tuple(ranks[p] for p in positions)
            if members not in made:
                made[members] = dist.new_group(list(members))
            if me in members:
                mine = made[members]
        return mine

    tensor = group_of(layout.groups_along("tensor"))
    data_context = group_of(layout.groups_along("context", "data"))
    pipeline_lists = list(layout.groups_along("pipeline"))
    model = group_of(layout.groups_along("tensor", "pipeline"))
    everyone = group_of(layout.groups_along(*_AXES))
    expert_data = group_of(layout.expert_groups_along("data"))
    expert_model = group_of(layout.expert_groups_along("tensor", "expert", "pipeline"))
    fields = {
        "tp": tensor,
        "pp": group_of(pipeline_lists),
        "cp": group_of(layout.groups_along("context")),
        "dp": group_of(layout.groups_along("data")),
        "dp_cp": data_context,
        "tp_cp": group_of(layout.groups_along("tensor", "context")),
        "mp": model,
        "tp_dp_cp": group_of(layout.groups_along("tensor", "context", "data")),
        "embd": group_of([sorted({members[0], members[-1]}) for members in pipeline_lists]),
        "pos_embd": group_of([[members[0]] for members in pipeline_lists]),
        "ep": group_of(layout.expert_groups_along("expert")),
        "expt_tp": group_of(layout.expert_groups_along("tensor")),
        "expt_dp": expert_data,
        "tp_ep": group_of(layout.expert_groups_along("tensor", "expert")),
        "tp_ep_pp": expert_model,
        "tp_ep_pp_with_egtp_remat": expert_model,
        "expt_dp_gtp_remat": expert_data,
        "dp_cp_gtp_remat": data_context,
        "intra_dp_cp": data_context,
        "intra_expt_dp": expert_data,
        "intra_dist_opt": everyone,
        "inter_dist_opt": None,
        "gtp_remat": None,
        "expt_gtp_remat": None,
        "hcp": None,
        "dp_cp_ag": None,
        "expt_dp_ag": None,
    }
    collection: Any = ProcessGroupCollection(**fields)
    # With virtual stages on two ranks, gradients have groups of their own (see ``pipeline``), of the same ranks.
    made.clear()
    ring_of_two = layout.virtual_pipeline > 1 and layout.pipeline == 2
    collection.pp_gradients = group_of(pipeline_lists) if ring_of_two else collection.pp
    return collection if me in ranks else None
