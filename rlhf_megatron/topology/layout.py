"""Layouts: the degrees of parallelism of one role, the coordinates of its ranks, and the process groups they form.

Everything down to ``make_groups`` is arithmetic that needs neither torch nor a cluster, so a layout for any world size
can be made and checked anywhere. What a shard holds is the matter of ``models.weight_map``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_megatron.recipe.errors import RecipeError

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection


@dataclasses.dataclass(frozen=True)
class Coordinates:
    """Where one rank stands in its role's layout; each counts from 0."""

    tensor: int
    data: int
    pipeline: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """Degrees of parallelism. Ranks are numbered tensor first, then data, then pipeline: Megatron's default order."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "data"):
            if getattr(self, name) < 1:
                raise RecipeError(f"layout: {name} is {getattr(self, name)}; every degree must be at least 1")

    @property
    def size(self) -> int:
        """The number of ranks that the layout needs."""
        return self.tensor * self.pipeline * self.data

    def coordinates(self, position: int) -> Coordinates:
        """The coordinates of the rank at ``position`` (0 <= position < size) among the role's ranks."""
        return Coordinates(
            tensor=position % self.tensor,
            data=position // self.tensor % self.data,
            pipeline=position // (self.tensor * self.data),
        )

    def position(self, tensor: int, data: int, pipeline: int) -> int:
        """The inverse of ``coordinates``."""
        return tensor + self.tensor * (data + self.data * pipeline)

    def groups_along(self, *axes: str) -> Iterator[list[int]]:
        """The groups of positions that differ only in the coordinates named by ``axes``, each in rising order."""
        fixed = [axis for axis in ("tensor", "data", "pipeline") if axis not in axes]
        for values in itertools.product(*(range(getattr(self, axis)) for axis in fixed)):
            chosen = dict(zip(fixed, values, strict=True))
            yield [
                p
                for p in range(self.size)
                if all(getattr(self.coordinates(p), axis) == value for axis, value in chosen.items())
            ]

    def stage_layers(self, layers: int) -> list[range]:
        """The decoder layers of each pipeline stage; the first and last stage may hold a number of their own.

        Raises RecipeError where the layers between cannot be split evenly.
        """
        edge = {0: self.first_stage_layers, self.pipeline - 1: self.last_stage_layers}
        given = {stage: count for stage, count in edge.items() if count is not None}
        even_stages = self.pipeline - len(given)
        left = layers - sum(given.values())
        if left < 0 or (left % even_stages if even_stages else left):
            raise RecipeError(
                f"layout: {layers} layers do not split over {self.pipeline} pipeline stages"
                f"{f' with {given} given for the edge stages' if given else ''}; "
                "set layout.first_stage_layers and layout.last_stage_layers"
            )
        counts = [given.get(stage, left // even_stages if even_stages else 0) for stage in range(self.pipeline)]
        starts = list(itertools.accumulate(counts, initial=0))
        return [range(start, start + count) for start, count in zip(starts, counts, strict=False)]


def make_groups(layout: Layout, ranks: Sequence[int]) -> ProcessGroupCollection | None:
    """The process groups of one role whose positions are the global ``ranks``, in that order.

    Collective over the whole world: every rank calls it for every role, in the same order. Ranks outside the role get
    None. Equal sets of ranks share one communicator. Every field that megatron-core 0.19 reads for dense models is set,
    since it takes a missing one for a group of size 1.
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
    data = group_of(layout.groups_along("data"))
    pipeline_lists = list(layout.groups_along("pipeline"))
    model = group_of(layout.groups_along("tensor", "pipeline"))
    everyone = group_of(layout.groups_along("tensor", "data", "pipeline"))
    alone = group_of(layout.groups_along())
    fields = {
        "tp": tensor,
        "pp": group_of(pipeline_lists),
        "cp": alone,
        "dp": data,
        "dp_cp": data,
        "tp_cp": tensor,
        "mp": model,
        "tp_dp_cp": group_of(layout.groups_along("tensor", "data")),
        "embd": group_of([sorted({members[0], members[-1]}) for members in pipeline_lists]),
        "pos_embd": group_of([[members[0]] for members in pipeline_lists]),
        "ep": alone,
        "expt_tp": tensor,
        "expt_dp": data,
        "tp_ep": tensor,
        "tp_ep_pp": model,
        "tp_ep_pp_with_egtp_remat": model,
        "expt_dp_gtp_remat": data,
        "dp_cp_gtp_remat": data,
        "intra_dp_cp": data,
        "intra_expt_dp": data,
        "intra_dist_opt": everyone,
        "inter_dist_opt": None,
        "gtp_remat": None,
        "expt_gtp_remat": None,
        "hcp": None,
        "dp_cp_ag": None,
        "expt_dp_ag": None,
    }
    return ProcessGroupCollection(**fields) if me in ranks else None
