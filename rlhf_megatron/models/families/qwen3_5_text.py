"""Qwen3.5's language model, the dense one: three delta nets, then gated attention.

A checkpoint that has the vision tower too is of another ``model_type``, and not read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.models.config_fields import FamilyFields, unsupported
from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.families.delta_decoder import FIELDS, NEVER_NULL, ONLY, DeltaDecoder

# Layers for multi-token prediction, whose tensors are no decoder's.
QWEN3_5_TYPES: dict[str, tuple[type, ...]] = {"mtp_num_hidden_layers": (int,), "mtp_use_dedicated_embeddings": (bool,)}
QWEN3_5_ONLY = ONLY | {"mamba_ssm_dtype": "float32", "mlp_only_layers": []}
# Of a text's tokens the three positions are one.
_OF_IMAGES = ("mrope_section", "mrope_interleaved")


@dataclasses.dataclass(frozen=True)
class Qwen35(DeltaDecoder):
    """A decoder whose pairs of turned numbers are shared out between the positions of images and videos."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        given = config.get("rope_parameters")
        if not isinstance(given, dict):
            return super().read(path, config)
        rope = {field: value for field, value in given.items() if field not in _OF_IMAGES}
        plain = super().read(path, {**config, "rope_parameters": rope})
        pairs, section = int(plain.head_dim * plain.rope.rotated_fraction) // 2, given.get("mrope_section")
        if section is not None and (
            not isinstance(section, list)
            or len(section) != 3
            or any(type(part) is not int or part < 0 for part in section)
            or sum(section) != pairs
        ):
            raise unsupported(path, "mrope_section", section, f"three whole numbers of {pairs} pairs in all")
        if given.get("mrope_interleaved") not in (None, True, False):
            raise unsupported(path, "mrope_interleaved", given["mrope_interleaved"], "true, false")
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
