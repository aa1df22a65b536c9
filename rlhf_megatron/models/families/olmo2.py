"""OLMo 2: norms after attention and feed-forward layer, none before; norms of queries and keys over all heads."""

from rlhf_megatron.models.config_fields import FamilyFields
from rlhf_megatron.models.families.bias_fields import BiasFields
from rlhf_megatron.models.families.decoder import Decoder
from rlhf_megatron.models.families.norm_names import NORMS_AFTER

FAMILY = Decoder(
    "Olmo2",
    FamilyFields(read=frozenset({"attention_bias"}), only={"qkv_bias": False, "sliding_window": None}),
    wide_query_key_norm=True,
    bias_fields=BiasFields(qkv="attention_bias", output="attention_bias"),
    max_positions=2048,
    norm_epsilon=1e-5,
    norms=NORMS_AFTER,
    has_rollout_table=False,
)
