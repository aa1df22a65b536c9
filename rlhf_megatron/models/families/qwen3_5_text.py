"""Qwen3.5's language model, the dense one: three delta nets, then gated attention.

A checkpoint that has the vision tower too is of another ``model_type``, and not read.
"""

from rlhf_megatron.models.config_fields import FamilyFields
from rlhf_megatron.models.families.delta_decoder import FIELDS, NEVER_NULL, ONLY, DeltaDecoder

FAMILY = DeltaDecoder(
    "Qwen3_5Text",
    FamilyFields(
        read=FIELDS,
        only=ONLY,
        never_null=NEVER_NULL,
        absent={"num_key_value_heads": 4, "head_dim": 256},
    ),
    language_class="Qwen3_5ForCausalLM",
)
