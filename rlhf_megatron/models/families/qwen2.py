"""Qwen2 and Qwen2.5: biases of queries, keys and values."""

from rlhf_megatron.models.config_fields import FamilyFields
from rlhf_megatron.models.families.decoder import Decoder

FAMILY = Decoder(
    "Qwen2",
    FamilyFields(only={"qkv_bias": True}, absent={"num_key_value_heads": 32}),
    qkv_bias=True,
    vllm_divides_heads=True,
)
