"""Hunyuan with dense layers: queries and keys are turned, then normed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.models.config_fields import FamilyFields
from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.families import hunyuan_fields
from rlhf_megatron.models.families.bias_fields import BiasFields
from rlhf_megatron.models.families.decoder import Decoder


@dataclasses.dataclass(frozen=True)
class Hunyuan(Decoder):
    """The usual decoder with other places of norms."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        plain = super().read(path, hunyuan_fields.checked(path, config))
        return dataclasses.replace(plain, norms_of_turned=True)


FAMILY = Hunyuan(
    "HunYuanDenseV1",
    FamilyFields(
        read=hunyuan_fields.READ,
        types=hunyuan_fields.TYPES,
        only=hunyuan_fields.ONLY | {"num_experts": 1},
        native=True,
    ),
    query_key_norm=True,
    bias_fields=BiasFields(qkv="attention_bias", output="attention_bias"),
    max_positions=2048,
    norm_epsilon=1e-5,
    norms=hunyuan_fields.NORMS,
    scalings=hunyuan_fields.ROPES,
    has_rollout_table=False,
)
