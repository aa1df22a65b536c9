"""Mistral 7B from v0.2 on: a Llama whose config means a window of 4096 where it says nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.config_fields import FamilyFields
from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.families.decoder import NO_ATTENTION_BIAS, Decoder
from rlhf_megatron.untrusted import shown


@dataclasses.dataclass(frozen=True)
class Mistral(Decoder):
    """The usual decoder without a window."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        if "sliding_window" not in config:
            raise ModelError(
                f"{shown(path)}: sliding_window is missing, which means 4096 for mistral and is not supported; "
                'add "sliding_window": null if the model has none'
            )
        return super().read(path, config)


FAMILY = Mistral(
    "Mistral",
    FamilyFields(
        only=NO_ATTENTION_BIAS | {"sliding_window": None},
        never_null=("num_key_value_heads", "layer_types"),
        absent={"num_key_value_heads": 8},
    ),
    max_positions=131072,
)
