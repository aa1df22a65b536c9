"""Llama 2 and 3, SmolLM2 and others of their form."""

from rlhf_megatron.models.config_fields import FamilyFields
from rlhf_megatron.models.families.decoder import NO_ATTENTION_BIAS, Decoder

FAMILY = Decoder("Llama", FamilyFields(only=NO_ATTENTION_BIAS | {"sliding_window": None}), max_positions=2048)
