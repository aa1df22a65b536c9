"""Qwen3, dense: norms of queries and keys."""

from rlhf_megatron.models.config_fields import FamilyFields
from rlhf_megatron.models.families.decoder import NO_ATTENTION_BIAS, Decoder

FAMILY = Decoder(
    "Qwen3",
    FamilyFields(
        only=NO_ATTENTION_BIAS | {"use_qk_norm": True},
        never_null=("head_dim",),
        absent={"num_key_value_heads": 32, "head_dim": 128},
    ),
    query_key_norm=True,
)
