"""Qwen3, dense: norms of queries and keys."""

from rlhf_megatron.models.config_fields import FamilyFields
from rlhf_megatron.models.families.bias_fields import BiasFields
from rlhf_megatron.models.families.decoder import Decoder
from rlhf_megatron.models.families.windows import SWITCH, WindowFields

FAMILY = Decoder(
    "Qwen3",
    FamilyFields(
        read=SWITCH | {"attention_bias"},
        only={"qkv_bias": False, "use_qk_norm": True},
        never_null=("head_dim",),
        absent={"num_key_value_heads": 32, "head_dim": 128},
    ),
    windows=WindowFields(absent=4096, switch=True, layers="last", by_type=True),
    query_key_norm=True,
    bias_fields=BiasFields(qkv="attention_bias", output="attention_bias"),
    vllm_has_output_bias=False,
)
