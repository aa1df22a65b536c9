"""Ministral 3: a Mistral with YaRN, whose queries grow with the logarithm of positions beyond the original length.

There the factor is 1, and no longer rows are computed: vLLM has none for folders in transformers' form. Where the
growth is 0, as in Devstral 2, the factor is 1 everywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.models.config_fields import FamilyFields, number, unsupported
from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.families.contract import ReadConfig
from rlhf_megatron.models.families.decoder import NO_ATTENTION_BIAS, Decoder
from rlhf_megatron.models.rope import SCALINGS, YarnScaling

_GROWTH = "llama_4_scaling_beta"
_MSCALES = ("mscale", "mscale_all_dim")


@dataclasses.dataclass(frozen=True)
class Ministral3(Decoder):
    """The usual decoder; where queries grow, for rows of at most ``original_max_position_embeddings`` tokens."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        return with_growth(path, config, super().read)


def with_growth(path: Path, config: Mapping[str, Any], read: ReadConfig) -> Architecture:
    """Return what ``read`` makes of a config whose queries may grow: of rows in which they do not."""
    given = config.get("rope_parameters")
    if not isinstance(given, dict):
        raise unsupported(path, "rope_parameters", given, f"an object with rope_type yarn and {_GROWTH}")
    grows = not _is_zero(given.get(_GROWTH))
    if grows:
        number(path, _GROWTH, given)
    # The second is the same as the config's own field, and not read by transformers; an mscale of 0 is as none.
    left_out = {_GROWTH, "max_position_embeddings", *(name for name in _MSCALES if _is_zero(given.get(name)))}
    rope = {field: value for field, value in given.items() if field not in left_out}
    plain = read(path, {**config, "rope_parameters": rope})
    if not isinstance(plain.rope.scaling, YarnScaling):
        raise unsupported(path, "rope_parameters.rope_type", given.get("rope_type"), "yarn")
    if not grows:
        return plain
    original = plain.rope.scaling.original_max_position_embeddings
    return dataclasses.replace(plain, max_positions=min(plain.max_positions, original))


def _is_zero(value: object) -> bool:
    return type(value) in (int, float) and value == 0


FAMILY = Ministral3(
    "Ministral3",
    FamilyFields(
        only=NO_ATTENTION_BIAS | {"sliding_window": None},
        never_null=("num_key_value_heads", "layer_types"),
        absent={"num_key_value_heads": 8, "head_dim": 128},
    ),
    max_positions=262144,
    norm_epsilon=1e-5,
    scalings={"yarn": SCALINGS["yarn"]},
)
