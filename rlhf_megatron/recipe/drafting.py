"""The role of the model that drafts for the rollout: it follows from ``actor`` and ``rollout.speculative``."""

from __future__ import annotations

from rlhf_megatron.recipe.optimizer import OptimizerSection
from rlhf_megatron.recipe.role_sections import ActorSection, RoleSection
from rlhf_megatron.recipe.speculative import SpeculativeSection

DRAFT = "draft"
"""The name of the role."""


class DraftSection(RoleSection):
    """A model on the ranks of the actor's last pipeline stage, cut as a stage is, which learns in the actor's
    passes."""

    optimizer: OptimizerSection | None = None
    """None: it stays as it is."""
    path: str | None = None
    """Folder of a head; None: it is a layer of the model's checkpoint, or a new head."""

    @property
    def weights_folder(self) -> str | None:
        """See RoleSection."""
        return self.path

    @property
    def learns_by(self) -> OptimizerSection | None:
        """See RoleSection."""
        return self.optimizer


def draft_section(actor: ActorSection, speculative: SpeculativeSection) -> DraftSection:
    """Return the section of the role, whose micro-batches are the actor's."""
    whole = {"pipeline": 1, "virtual_pipeline": None, "first_stage_layers": None, "last_stage_layers": None}
    if speculative.method == "eagle3":  # a head is dense
        whole |= {"expert": 1, "expert_tensor": None}
    shares_state = speculative.optimizer is not None and speculative.optimizer.distributed
    return DraftSection.model_construct(
        ranks=actor.ranks,
        layout=actor.layout.model_copy(update=whole),
        sequence_parallel=actor.sequence_parallel,
        cp_comm_type=actor.cp_comm_type,
        tokens_per_gpu=actor.tokens_per_gpu,
        logprob_tokens_per_gpu=actor.logprob_tokens_per_gpu,
        offload=actor.offload if shares_state else actor.offload.model_copy(update={"streamed_optimizer": 0.0}),
        transformer_implementation=actor.transformer_implementation,
        optimizer=speculative.optimizer,
        path=speculative.path,
    )
