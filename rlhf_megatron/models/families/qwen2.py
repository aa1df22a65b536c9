"""Qwen2 and Qwen2.5: biases of queries, keys and values."""

from rlhf_megatron.models.config_fields import FamilyFields
from rlhf_megatron.models.families.decoder import Decoder
from rlhf_megatron.models.families.windows import SWITCH, WindowFields

FAMILY = Decoder(
    "Qwen2",
    FamilyFields(read=SWITCH, only={"qkv_bias": True}, absent={"num_key_value_heads": 32}),
    windows=WindowFields(absent=4096, switch=True, layers="last", by_type=True),
    qkv_bias=True,
    vllm_divides_heads=True,
)
