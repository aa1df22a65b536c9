"""Qwen3 with experts in every layer, and none that all tokens share."""

from rlhf_megatron.models.config_fields import FamilyFields
from rlhf_megatron.models.families.bias_fields import BiasFields
from rlhf_megatron.models.families.decoder import Decoder
from rlhf_megatron.models.families.mixture import EXPERT_FIELDS, EXPERT_TYPES
from rlhf_megatron.models.families.windows import SWITCH, WindowFields

FAMILY = Decoder(
    "Qwen3Moe",
    FamilyFields(
        read=SWITCH | EXPERT_FIELDS | {"attention_bias"},
        types=EXPERT_TYPES,
        only={
            "qkv_bias": False,
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
    bias_fields=BiasFields(qkv="attention_bias", output="attention_bias"),
    vllm_has_output_bias=False,
    experts=True,
)
