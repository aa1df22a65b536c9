"""Llama 2 and 3, SmolLM2 and others of their form, some with biases."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.models.config_fields import FamilyFields, unsupported
from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.families.bias_fields import BiasFields
from rlhf_megatron.models.families.decoder import Decoder


@dataclasses.dataclass(frozen=True)
class Llama(Decoder):
    """The usual decoder."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family; of two fields for the same biases vLLM takes the one that transformers does not read."""
        plain = super().read(path, config)
        if plain.qkv_bias and "qkv_bias" in config:
            raise unsupported(path, "qkv_bias", config["qkv_bias"], "none where attention_bias is true")
        return plain


FAMILY = Llama(
    "Llama",
    FamilyFields(
        read=frozenset({"attention_bias", "mlp_bias"}),
        only={"activation": "swiglu", "qkv_bias": False, "sliding_window": None},  # the first of Falcon 3's, unread
    ),
    bias_fields=BiasFields(qkv="attention_bias", output="attention_bias", mlp="mlp_bias"),
    max_positions=2048,
)
