"""Mistral 7B: a Llama, before v0.2 with a sliding window in every layer."""

from rlhf_megatron.models.config_fields import FamilyFields
from rlhf_megatron.models.families.decoder import NO_ATTENTION_BIAS, Decoder
from rlhf_megatron.models.families.windows import WindowFields

FAMILY = Decoder(
    "Mistral",
    FamilyFields(
        only=NO_ATTENTION_BIAS,
        never_null=("num_key_value_heads", "layer_types"),
        absent={"num_key_value_heads": 8},
    ),
    max_positions=131072,
    windows=WindowFields(absent=4096),
)
