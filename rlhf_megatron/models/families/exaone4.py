"""EXAONE 4: norms after sublayers and of each head; beside layers with a window, those without have no positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.models.config_fields import FamilyFields, unsupported
from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.families.decoder import NO_ATTENTION_BIAS, Decoder
from rlhf_megatron.models.families.norm_names import NORMS_AFTER
from rlhf_megatron.models.families.windows import PATTERN, WindowFields, declared_windows

_WINDOW = 4096  # of a config that does not say


@dataclasses.dataclass(frozen=True)
class Exaone4(Decoder):
    """The usual decoder with rotary embeddings in layers with a window, or in all where none has one."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        if config.get("layer_types") is None and not _can_derive_types(config):
            raise unsupported(path, "layer_types", None, "the type of each layer")
        if config.get("layer_types") is not None:  # transformers then leaves the pattern alone
            config = {key: value for key, value in config.items() if key != PATTERN}
        has_window = config.get("sliding_window", _WINDOW) is not None
        config = config if has_window else {**config, "sliding_window": _WINDOW}  # which no layer may then have
        plain = super().read(path, config)
        window, within = declared_windows(path, config, self.windows, plain.layers)
        if any(within) != has_window:  # transformers and vLLM disagree on the positions of such layers
            given = window if has_window else None
            raise unsupported(path, "sliding_window", given, "null where no layer has a window, and only there")
        if not has_window:
            return plain
        return dataclasses.replace(plain, mixed_ropes=tuple(plain.rope if one else None for one in within))


def _can_derive_types(config: Mapping[str, Any]) -> bool:
    """Return whether transformers makes the types of layers of other fields without an error."""
    return config.get("sliding_window", _WINDOW) is not None and isinstance(config.get(PATTERN, 4), int)


FAMILY = Exaone4(
    "Exaone4",
    FamilyFields(
        read=frozenset({PATTERN}),
        only=NO_ATTENTION_BIAS,
        never_null=("num_key_value_heads",),
        absent={"num_key_value_heads": 32},
    ),
    query_key_norm=True,
    max_positions=2048,
    norm_epsilon=1e-5,
    windows=WindowFields(absent=_WINDOW, layers="pattern", full_every=4, by_type=True),
    norms=NORMS_AFTER,
    vllm_mixes_windows=True,
    has_rollout_table=False,
)
