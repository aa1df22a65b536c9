"""Gemma: norms whose weights are counted from 1, embeddings times sqrt(hidden_size), GELU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.models.config_fields import FamilyFields, unsupported
from rlhf_megatron.models.description import Architecture, Scales
from rlhf_megatron.models.families.decoder import NO_ATTENTION_BIAS, Decoder

GELU = "gelu_pytorch_tanh"
GEMMA_TYPES: dict[str, tuple[type, ...]] = {"cache_implementation": (str,)}  # of transformers' generation
_ACTIVATIONS = ("gelu", GELU)  # which are one: the former was a mistake in the first configs


@dataclasses.dataclass(frozen=True)
class Gemma(Decoder):
    """The usual decoder with Gemma's norms and embeddings."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family; embeddings are tied unless the config says otherwise."""
        if "hidden_act" in self.fields.read and config.get("hidden_act", GELU) not in _ACTIVATIONS:
            raise unsupported(path, "hidden_act", config["hidden_act"], " or ".join(_ACTIVATIONS))
        plain = super().read(path, {"tie_word_embeddings": True} | dict(config))
        return dataclasses.replace(plain, scales=Scales(embedding=plain.hidden**0.5, rounded_embedding=True))

    def rollout_problem(self, architecture: Architecture) -> str | None:
        """See Family."""
        if not architecture.tied_embeddings:
            return f"tie_word_embeddings is false, and vLLM ties them in {architecture.family}"
        return super().rollout_problem(architecture)


FAMILY = Gemma(
    "Gemma",
    FamilyFields(
        read=frozenset({"hidden_act"}),
        types=GEMMA_TYPES,
        only=NO_ATTENTION_BIAS | {"hidden_activation": GELU, "sliding_window": None},
        never_null=("num_key_value_heads", "head_dim"),
        absent={"num_key_value_heads": 16, "head_dim": 256},
    ),
    max_positions=8192,
    zero_centred_norms=True,
    activation="gelu_tanh",
)
