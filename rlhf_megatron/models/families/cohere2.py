"""Command R7B and A: a Command R with windows, and without positions in the layers that have none."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.models.config_fields import FamilyFields
from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.families.cohere import (
    COHERE_NEVER_NULL,
    COHERE_ONLY,
    COHERE_READ,
    COHERE_TYPES,
    ONE_NORM,
    Cohere,
)
from rlhf_megatron.models.families.windows import PATTERN, WindowFields, declared_windows


@dataclasses.dataclass(frozen=True)
class Cohere2(Cohere):
    """A Command R in which layers with a window have rotary embeddings, however wide it is, and others none."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        plain = super().read(path, config)
        _, within = declared_windows(path, config, self.windows, plain.layers)
        ropes = tuple(plain.rope if one else None for one in within)
        return dataclasses.replace(plain, mixed_ropes=ropes if None in ropes else ())

    def rollout_problem(self, architecture: Architecture) -> str | None:
        """See Family."""
        if architecture.window is not None:
            return (
                f"sliding_window is {architecture.window}, and vLLM's window has one token more in cohere2; lower "
                "max_position_embeddings to sliding_window, if rows are no longer"
            )
        return super().rollout_problem(architecture)


FAMILY = Cohere2(
    "Cohere2",
    FamilyFields(
        read=COHERE_READ | {PATTERN},
        types=COHERE_TYPES | {"layer_switch": (int,)},
        only=COHERE_ONLY | {"use_qk_norm": False, "order_of_interleaved_layers": "local_attn_first"},
        never_null=(*COHERE_NEVER_NULL, PATTERN),
    ),
    max_positions=8192,
    windows=WindowFields(absent=4096, layers="pattern", full_every=4, by_type=True),
    norms=ONE_NORM,
    vllm_mixes_windows=True,
    has_rollout_table=False,
)
