"""Qwen3, dense: norms of queries and keys."""

from rlhf_megatron.models.config_fields import FamilyFields
from rlhf_megatron.models.families.decoder import NO_ATTENTION_BIAS, Decoder
from rlhf_megatron.models.families.windows import SWITCH, WindowFields

FAMILY = Decoder(
    "Qwen3",
    FamilyFields(
        read=SWITCH,
        only=NO_ATTENTION_BIAS | {"use_qk_norm": True},
        never_null=("head_dim",),
        absent={"num_key_value_heads": 32, "head_dim": 128},
    ),
    windows=WindowFields(absent=4096, switch=True, layers="last", by_type=True),
    query_key_norm=True,
)
