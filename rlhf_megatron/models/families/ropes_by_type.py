"""Rotary embeddings with parameters of their own in layers with a window and in those without."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.models.config_fields import brief, number, unsupported
from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.families.decoder import Decoder
from rlhf_megatron.models.families.rope_reading import read_rope
from rlhf_megatron.models.families.windows import declared_windows

FULL, WINDOW = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True)
class RopesByType(Decoder):
    """A decoder whose rotary embeddings follow from the type of a layer.

    ``thetas``: for both types the field beside rope_parameters, and what transformers takes where that is absent.
    """

    thetas: Mapping[str, tuple[str, float]] = dataclasses.field(default_factory=dict)

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        of_type = self._rope_parameters(path, config)
        flat = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_theta")}
        plain = super().read(path, flat | {"rope_parameters": of_type[FULL]})
        local = flat | {"rope_parameters": of_type[WINDOW]}
        of_windows = read_rope(path, local, plain.head_dim, plain.max_positions, scalings=self.scalings)
        _, within = declared_windows(path, config, self.windows, plain.layers)
        ropes = tuple(of_windows if one else plain.rope for one in within)
        return dataclasses.replace(plain, mixed_ropes=ropes if any(within) else ())

    def _rope_parameters(self, path: Path, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the parameters of each type of layer, in the form that transformers gives to both spellings."""
        nested, scaling = config.get("rope_parameters"), config.get("rope_scaling")
        form = f"an object of {FULL} and {WINDOW}, of which each is an object"
        if nested is not None and (
            not isinstance(nested, dict)
            or nested.keys() - self.thetas.keys()
            or not all(isinstance(given, dict | None) for given in nested.values())
        ):
            raise unsupported(path, "rope_parameters", nested, form)
        if not isinstance(scaling, dict | None):
            raise unsupported(path, "rope_scaling", brief(scaling), "an object, of layers without a window")
        by_kind = {}
        for kind, (field, absent) in self.thetas.items():
            given = dict((nested or {}).get(kind) or {"rope_type": "default"})
            given |= (scaling or {}) if kind == FULL else {}
            if "rope_theta" not in given:
                given["rope_theta"] = number(path, field, config, absent)
            by_kind[kind] = given
        return by_kind
