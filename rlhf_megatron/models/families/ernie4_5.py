"""ERNIE 4.5 with dense layers: a Llama whose heads turn in pairs of neighbours."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.models.config_fields import FamilyFields
from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.families.decoder import NO_ATTENTION_BIAS, Decoder


@dataclasses.dataclass(frozen=True)
class Ernie(Decoder):
    """The usual decoder with other pairs of turned numbers."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family; embeddings are tied unless the config says otherwise."""
        plain = super().read(path, {"tie_word_embeddings": True} | dict(config))
        return dataclasses.replace(plain, rope=dataclasses.replace(plain.rope, interleaved=True))


FAMILY = Ernie(
    "Ernie4_5",
    FamilyFields(
        only=NO_ATTENTION_BIAS | {"use_bias": False, "sliding_window": None},
        absent={"num_key_value_heads": 2, "head_dim": 128},
        native=True,
    ),
    max_positions=131072,
    norm_epsilon=1e-5,
    rope_theta=500_000.0,
    has_rollout_table=False,
)
