"""The process groups of a role: one ``ProcessGroupCollection`` with every field that megatron-core 0.19 reads.

All fields are set, since megatron-core takes a missing one for a group of size 1; ``pp_gradients`` is our own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from rlhf_megatron.errors import RecipeError
from rlhf_megatron.topology.layout import AXES, Layout

# Fields of features that this project does not use.
_UNUSED = ("inter_dist_opt", "gtp_remat", "expt_gtp_remat", "hcp", "dp_cp_ag", "expt_dp_ag")


def make_groups(layout: Layout, ranks: Sequence[int]) -> ProcessGroupCollection | None:
    """Makes the process groups of one role whose positions are the global ``ranks``, in that order.

    Collective over the whole world: every rank calls it for every role, in the same order. Ranks outside the role get
    None. Equal sets of ranks share one communicator.
    """
    if len(ranks) != layout.size:
        raise RecipeError(f"layout: {layout} needs {layout.size} ranks and was given {len(ranks)}")
    groups = _GroupMaker(ranks)
    fields = _optimizer_groups(layout, groups) | _layer_groups(layout, groups)
    fields |= _same_groups(fields) | dict.fromkeys(_UNUSED)
    collection: Any = ProcessGroupCollection(**fields)
    collection.pp_gradients = _gradient_group(layout, ranks, collection.pp)
    return collection if dist.get_rank() in ranks else None


class _GroupMaker:
    """Makes the process groups of one role, and one for each distinct set of ranks."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks, self._rank = ranks, dist.get_rank()
        self._made: dict[tuple[int, ...], Any] = {}

    def make(self, groups: Iterable[Sequence[int]]) -> Any:
        """Makes one group for each list of positions; returns the one that has this rank in it, else None."""
        own = None
        for positions in groups:
            members = tuple(self._ranks[position] for position in positions)
            if members not in self._made:
                self._made[members] = dist.new_group(list(members))
            if self._rank in members:
                own = self._made[members]
        return own


def _optimizer_groups(layout: Layout, groups: _GroupMaker) -> dict[str, Any]:
    """Makes the groups over which gradients are summed, their norm is taken and the optimizer's state is sharded."""
    return {
        "tp": groups.make(layout.groups_along("tensor")),
        "dp_cp": groups.make(layout.groups_along("context", "data")),
        "mp": groups.make(layout.groups_along("tensor", "pipeline")),
        "intra_dist_opt": groups.make(layout.groups_along(*AXES)),
        "expt_dp": groups.make(layout.expert_groups_along("data")),
        "tp_ep_pp": groups.make(layout.expert_groups_along("tensor", "expert", "pipeline")),
    }


def _layer_groups(layout: Layout, groups: _GroupMaker) -> dict[str, Any]:
    """Makes the groups over which layers, experts and pipeline stages exchange activations, and tied embeddings."""
    pipelines = list(layout.groups_along("pipeline"))
    return {
        "pp": groups.make(pipelines),
        "cp": groups.make(layout.groups_along("context")),
        "dp": groups.make(layout.groups_along("data")),
        "tp_cp": groups.make(layout.groups_along("tensor", "context")),
        "tp_dp_cp": groups.make(layout.groups_along("tensor", "context", "data")),
        "embd": groups.make([sorted({members[0], members[-1]}) for members in pipelines]),
        "pos_embd": groups.make([[members[0]] for members in pipelines]),
        "ep": groups.make(layout.expert_groups_along("expert")),
        "expt_tp": groups.make(layout.expert_groups_along("tensor")),
        "tp_ep": groups.make(layout.expert_groups_along("tensor", "expert")),
    }


def _same_groups(fields: dict[str, Any]) -> dict[str, Any]:
    """Further names that megatron-core has for groups in ``fields``."""
    return {
        "intra_dp_cp": fields["dp_cp"],
        "dp_cp_gtp_remat": fields["dp_cp"],
        "intra_expt_dp": fields["expt_dp"],
        "expt_dp_gtp_remat": fields["expt_dp"],
        "tp_ep_pp_with_egtp_remat": fields["tp_ep_pp"],
    }


def _gradient_group(layout: Layout, ranks: Sequence[int], pipeline_group: Any) -> Any:
    """Makes a second group of the same ranks for gradients, with virtual stages on two ranks (see ``pipeline``)."""
    ring_of_two = layout.virtual_pipeline > 1 and layout.pipeline == 2
    return _GroupMaker(ranks).make(layout.groups_along("pipeline")) if ring_of_two else pipeline_group
