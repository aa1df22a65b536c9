"""OLMo 3: an OLMo 2 with a window in three of four layers; scaled rotary embeddings are for the others."""

from rlhf_megatron.models.config_fields import FamilyFields
from rlhf_megatron.models.families.bias_fields import BiasFields
from rlhf_megatron.models.families.norm_names import NORMS_AFTER
from rlhf_megatron.models.families.ropes_by_type import FULL, WINDOW, RopesByType
from rlhf_megatron.models.families.windows import WindowFields

# transformers gives another rope_theta beside rope_parameters to the layers without a window alone.
_THETA = 500_000.0

FAMILY = RopesByType(
    "Olmo3",
    FamilyFields(
        read=frozenset({"attention_bias"}),
        only={"qkv_bias": False, "rope_theta": _THETA},
        never_null=("sliding_window",),
    ),
    wide_query_key_norm=True,
    bias_fields=BiasFields(qkv="attention_bias", output="attention_bias"),
    max_positions=2048,
    norm_epsilon=1e-5,
    windows=WindowFields(absent=4096, layers="pattern", full_every=4, by_type=True),
    norms=NORMS_AFTER,
    vllm_mixes_windows=True,
    has_rollout_table=False,
    thetas={FULL: ("rope_theta", _THETA), WINDOW: ("rope_theta", _THETA)},
)
