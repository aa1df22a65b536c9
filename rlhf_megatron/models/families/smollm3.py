"""SmolLM3: a Llama, some of whose layers have no position embeddings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.config_fields import FamilyFields, brief, size
from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.families.decoder import NO_ATTENTION_BIAS, Decoder
from rlhf_megatron.untrusted import shown


@dataclasses.dataclass(frozen=True)
class SmolLM3(Decoder):
    """The usual decoder with rotary embeddings in the layers that the config names."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family; embeddings are tied unless the config says otherwise."""
        plain = super().read(path, config)
        ropes = tuple(plain.rope if turns else None for turns in _turning_layers(path, config, plain.layers))
        return dataclasses.replace(
            plain,
            tied_embeddings=plain.tied_embeddings or "tie_word_embeddings" not in config,
            mixed_ropes=ropes if None in ropes else (),
        )


def _turning_layers(path: Path, config: Mapping[str, Any], layers: int) -> list[bool]:
    """Return for each layer whether it has position embeddings: those with a 1 in ``no_rope_layers``, for all its name.

    Without that list every ``no_rope_layer_interval``-th layer has none.
    """
    interval, named = size(path, "no_rope_layer_interval", config, 4), config.get("no_rope_layers")
    if named is None:
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(named, list) or any(type(turns) is not int or turns not in (0, 1) for turns in named):
        raise ModelError(f"{shown(path)}: no_rope_layers is {brief(named)}; it must be a list of 0 and 1")
    if len(named) < layers:
        raise ModelError(f"{shown(path)}: no_rope_layers has {len(named)} layers, and num_hidden_layers is {layers}")
    return [turns == 1 for turns in named[:layers]]


FAMILY = SmolLM3(
    "SmolLM3",
    FamilyFields(
        read=frozenset({"no_rope_layers", "no_rope_layer_interval"}),
        only=NO_ATTENTION_BIAS,
        never_null=("no_rope_layer_interval",),
        absent={"num_key_value_heads": 4},
    ),
    rope_theta=2_000_000.0,
    has_rollout_table=False,
)
