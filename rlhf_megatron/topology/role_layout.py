"""From the recipe's layout sections to layouts on a number of ranks."""

from __future__ import annotations

from rlhf_megatron.recipe import LayoutSection
from rlhf_megatron.topology.layout import Layout


def make_layout(section: LayoutSection, ranks: int) -> Layout:
    """Return the layout of a role on ``ranks`` ranks; data parallelism fills what the other degrees leave."""
    return Layout(
        tensor=section.tensor,
        pipeline=section.pipeline,
        data=section.data or ranks // section.model_gpus,
        context=section.context,
        virtual_pipeline=section.virtual_pipeline or 1,
        first_stage_layers=section.first_stage_layers,
        last_stage_layers=section.last_stage_layers,
        expert=section.expert,
        expert_tensor=section.expert_tensor,
    )
