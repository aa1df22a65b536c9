"""Arcee's AFM: a Llama whose feed-forward layers have no gate, and a squared ReLU."""

from rlhf_megatron.models.config_fields import FamilyFields
from rlhf_megatron.models.families.bias_fields import BiasFields
from rlhf_megatron.models.families.decoder import Decoder

FAMILY = Decoder(
    "Arcee",
    FamilyFields(
        read=frozenset({"attention_bias", "mlp_bias"}),
        only={"hidden_act": "relu2", "qkv_bias": False, "sliding_window": None},
    ),
    bias_fields=BiasFields(qkv="attention_bias", output="attention_bias", mlp="mlp_bias"),
    activation="squared_relu",
    plain_mlp=True,
    max_positions=4096,
    norm_epsilon=1e-5,
    has_rollout_table=False,
)
