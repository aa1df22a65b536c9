"""The process groups of a role: one ``ProcessGroupCollection`` with every field that megatron-core 0.19 reads.

All fields are set, since megatron-core looks for a missing one in its globals; ``pp_gradients`` is our own, and so is
``model``, the ranks of one data-parallel rank. None stands for groups over which nothing is exchanged here: auxiliary
losses of routers, learned positions, embeddings not tied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from rlhf_megatron.errors import RecipeError
from rlhf_megatron.topology.communicators import alone, communicator, split_communicator, splits, whole_role
from rlhf_megatron.topology.layout import AXES, Layout

# Fields of features that this project does not use.
_UNUSED = (
    "inter_dist_opt", "gtp_remat", "expt_gtp_remat", "hcp", "dp_cp_ag", "expt_dp_ag", "tp_cp", "tp_dp_cp", "pos_embd",
)  # fmt: skip


def make_groups(
    layout: Layout, ranks: Sequence[int], *, tied_embeddings: bool = False, overlapped: bool = False
) -> ProcessGroupCollection:
    """Make this rank's process groups of a role whose positions are the global ``ranks``, in that order.

    Each of ``ranks`` calls it, for its roles in the same order; others need not. Groups that are there already, of this
    role or another one, are taken again. ``tied_embeddings``: the first and the last pipeline stage have the same ones.
    ``overlapped``: gradients or weights travel between data-parallel ranks while passes compute.
    """
    if len(ranks) != layout.size:
        raise RecipeError(f"layout: {layout} needs {layout.size} ranks and was given {len(ranks)}")
    groups = _GroupsOfRank(layout, ranks)
    fields = _optimizer_groups(groups, "overlapped" if overlapped else "") | _layer_groups(groups)
    fields |= _same_groups(fields) | dict.fromkeys(_UNUSED)
    fields["embd"] = groups.ends_of_pipeline() if tied_embeddings else None
    collection: Any = ProcessGroupCollection(**fields)
    # Virtual stages on two ranks need a second group of the same ranks (see ``pipeline``).
    ring_of_two = layout.virtual_pipeline > 1 and layout.pipeline == 2
    collection.pp_gradients = groups.along("pipeline", purpose="gradients") if ring_of_two else collection.pp
    collection.model = groups.along("tensor", "context", "pipeline")
    return collection


class _GroupsOfRank:
    """The process groups of one role that this rank is in."""

    def __init__(self, layout: Layout, ranks: Sequence[int]) -> None:
        self._layout, self._ranks = layout, ranks
        self._position = list(ranks).index(dist.get_rank())
        self._role = whole_role(ranks)

    def along(self, *axes: str, of_experts: bool = False, purpose: str = "") -> dist.ProcessGroup:
        """Return the group of the ranks that differ from this one only in ``axes``, of the experts' coordinates if so
        said."""
        layout = self._layout
        own = (layout.expert_group_of if of_experts else layout.group_of)(self._position, *axes)
        if len(own) == 1:
            return alone()
        if len(own) == layout.size and not purpose:
            return self._role
        if splits():
            groups = (layout.expert_groups_along if of_experts else layout.groups_along)(*axes)
            return split_communicator(self._role, self._ranks, own, list(groups), purpose)
        return communicator(self._of(own), purpose)

    def ends_of_pipeline(self) -> dist.ProcessGroup | None:
        """Return the group of the first and last stage; None on those between."""
        stages = self._layout.group_of(self._position, "pipeline")
        ends = sorted({stages[0], stages[-1]})
        if len(stages) < 3:
            return self.along("pipeline")
        return communicator(self._of(ends), "") if self._position in ends else None

    def _of(self, positions: Sequence[int]) -> list[int]:
        return [self._ranks[position] for position in positions]


def _optimizer_groups(groups: _GroupsOfRank, purpose: str) -> dict[str, Any]:
    """Return the groups over which gradients are summed, which ``purpose`` is of, their norm is taken and the
    optimizer's state is sharded."""
    return {
        "tp": groups.along("tensor"),
        "dp_cp": groups.along("context", "data", purpose=purpose),
        "mp": groups.along("tensor", "pipeline"),
        "intra_dist_opt": groups.along(*AXES),
        "expt_dp": groups.along("data", of_experts=True, purpose=purpose),
        "tp_ep_pp": groups.along("tensor", "expert", "pipeline", of_experts=True),
    }


def _layer_groups(groups: _GroupsOfRank) -> dict[str, Any]:
    """Return the groups over which layers, experts and pipeline stages exchange activations."""
    return {
        "pp": groups.along("pipeline"),
        "cp": groups.along("context"),
        "dp": groups.along("data"),
        "ep": groups.along("expert", of_experts=True),
        "expt_tp": groups.along("tensor", of_experts=True),
        "tp_ep": groups.along("tensor", "expert", of_experts=True),
    }


def _same_groups(fields: dict[str, Any]) -> dict[str, Any]:
    """Return further names that megatron-core has for groups in ``fields``."""
    return {
        "intra_dp_cp": fields["dp_cp"],
        "dp_cp_gtp_remat": fields["dp_cp"],
        "intra_expt_dp": fields["expt_dp"],
        "expt_dp_gtp_remat": fields["expt_dp"],
        "tp_ep_pp_with_egtp_remat": fields["tp_ep_pp"],
    }
