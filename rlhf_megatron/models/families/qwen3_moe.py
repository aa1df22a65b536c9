"""Qwen3 with experts in every layer, and none that all tokens share."""

from rlhf_megatron.models.config_fields import FamilyFields
from rlhf_megatron.models.families.decoder import NO_ATTENTION_BIAS, Decoder
from rlhf_megatron.models.families.mixture import EXPERT_FIELDS, EXPERT_TYPES
from rlhf_megatron.models.families.windows import SWITCH, WindowFields

FAMILY = Decoder(
    "Qwen3Moe",
    FamilyFields(
        read=SWITCH | EXPERT_FIELDS,
        types=EXPERT_TYPES,
        only=NO_ATTENTION_BIAS
        | {
            "use_qk_norm": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "shared_expert_intermediate_size": 0,
        },
        never_null=("num_key_value_heads", "head_dim"),
        absent={"num_key_value_heads": 4},
    ),
    windows=WindowFields(absent=4096, switch=True),
    query_key_norm=True,
    experts=True,
)
