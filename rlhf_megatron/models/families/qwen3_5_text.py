"""Qwen3.5's language model, the dense one: three delta nets, then gated attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.models.config_fields import FamilyFields
from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.families.delta_decoder import FIELDS, NEVER_NULL, ONLY, DeltaDecoder
from rlhf_megatron.models.families.image_positions import check_pairs, without_sections

# Layers for multi-token prediction, whose tensors are no decoder's.
QWEN3_5_TYPES: dict[str, tuple[type, ...]] = {"mtp_num_hidden_layers": (int,), "mtp_use_dedicated_embeddings": (bool,)}
QWEN3_5_ONLY = ONLY | {"mamba_ssm_dtype": "float32", "mlp_only_layers": []}


@dataclasses.dataclass(frozen=True)
class Qwen35(DeltaDecoder):
    """A decoder whose pairs of turned numbers are shared out between the positions of images and videos."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        plain = super().read(path, without_sections(path, config))
        check_pairs(path, config, int(plain.head_dim * plain.rope.rotated_fraction) // 2)
        return plain


FAMILY = Qwen35(
    "Qwen3_5Text",
    FamilyFields(
        read=FIELDS,
        types=QWEN3_5_TYPES,
        only=QWEN3_5_ONLY,
        never_null=NEVER_NULL,
        absent={"num_key_value_heads": 4, "head_dim": 256},
    ),
    language_class="Qwen3_5ForCausalLM",
)
