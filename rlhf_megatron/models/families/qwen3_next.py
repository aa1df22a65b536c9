"""Qwen3-Next: three delta nets, then gated attention, with experts beside a shared one in every layer."""

from rlhf_megatron.models.config_fields import FamilyFields
from rlhf_megatron.models.families.delta_decoder import FIELDS, NEVER_NULL, ONLY, DeltaDecoder
from rlhf_megatron.models.families.mixture import EXPERT_FIELDS, EXPERT_TYPES

FAMILY = DeltaDecoder(
    "Qwen3Next",
    FamilyFields(
        read=FIELDS | EXPERT_FIELDS | {"shared_expert_intermediate_size", "decoder_sparse_step", "mlp_only_layers"},
        types=EXPERT_TYPES,
        only=ONLY,
        never_null=(*NEVER_NULL, "moe_intermediate_size"),
        absent={"num_key_value_heads": 2, "head_dim": 256},
    ),
    experts=True,
    by_key_head=True,
    vllm_ties_embeddings=False,
)
