"""Seed-OSS: a Llama with biases of queries, keys and values. What its config drops in training is not dropped here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.models.config_fields import FamilyFields
from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.families.bias_fields import BiasFields
from rlhf_megatron.models.families.decoder import Decoder

_DROPOUT = ("attention_dropout", "residual_dropout")


@dataclasses.dataclass(frozen=True)
class SeedOss(Decoder):
    """The usual decoder."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family; biases of queries, keys and values are there unless the config says otherwise."""
        return super().read(path, {"attention_bias": True} | dict(config))


FAMILY = SeedOss(
    "SeedOss",
    FamilyFields(
        read=frozenset({"attention_bias", "attention_out_bias", "mlp_bias", *_DROPOUT}),
        types=dict.fromkeys(_DROPOUT, (int, float)),
        only={"qkv_bias": False, "sliding_window": None},
        never_null=("attention_out_bias", *_DROPOUT),
        absent={"num_key_value_heads": 8, "head_dim": 128},
    ),
    bias_fields=BiasFields(qkv="attention_bias", output="attention_out_bias", mlp="mlp_bias"),
    max_positions=524288,
    has_rollout_table=False,
)
