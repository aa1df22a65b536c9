"""Granite: a Llama with factors of embeddings, attention, residual stream and logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.models.config_fields import FamilyFields, number
from rlhf_megatron.models.description import Architecture, Scales
from rlhf_megatron.models.families.decoder import NO_ATTENTION_BIAS, Decoder

_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


@dataclasses.dataclass(frozen=True)
class Granite(Decoder):
    """The usual decoder with factors, which are 1 where the config says nothing."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        embedding, attention, residual, divisor = (number(path, field, config, 1.0) for field in _MULTIPLIERS)
        scales = Scales(embedding=embedding, attention=attention, residual=residual, logits=1.0 / divisor)
        return dataclasses.replace(super().read(path, config), scales=scales)


FAMILY = Granite(
    "Granite",
    FamilyFields(
        read=frozenset({"attention_dropout", *_MULTIPLIERS}),
        types={"attention_dropout": (float, int)},  # 0.1 in Granite 3.0; here nothing is dropped
        only=NO_ATTENTION_BIAS | {"sliding_window": None},
        never_null=_MULTIPLIERS,
    ),
    max_positions=2048,
)
