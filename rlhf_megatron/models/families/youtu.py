"""Youtu-LLM: DeepSeek-V3's latent attention in dense layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.models.config_fields import FamilyFields
from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.families import latent
from rlhf_megatron.models.families.decoder import NO_ATTENTION_BIAS, Decoder
from rlhf_megatron.models.families.deepseek_v3 import with_latent_attention


@dataclasses.dataclass(frozen=True)
class Youtu(Decoder):
    """The usual decoder with latent attention, whose embeddings are tied unless the config says otherwise."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        return with_latent_attention(path, {"tie_word_embeddings": True} | dict(config), super().read)

    def rollout_problem(self, architecture: Architecture) -> str | None:
        """See Family."""
        return "vLLM has no youtu; it is trained only"


FAMILY = Youtu(
    "Youtu",
    FamilyFields(
        read=latent.FIELDS,
        types={"embedding_initializer_range": (float,)},
        only=NO_ATTENTION_BIAS
        | {"rope_interleave": True, "sliding_window": None}
        | {"rms_norm_eps": 1e-6},  # transformers' epsilon of latents
        never_null=(*latent.NEVER_NULL, "num_key_value_heads"),
        absent={"num_key_value_heads": 16},
        native=True,
    ),
    max_positions=131072,
    has_rollout_table=False,
)
