"""Gemma 3's language model: a Gemma 2 with norms of queries and keys, and another rotary table in layers with a window.

A checkpoint that has the vision tower too is of another ``model_type``, and not read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.models.config_fields import FamilyFields, brief, unsupported
from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.families.decoder import Decoder
from rlhf_megatron.models.families.gemma import GEMMA_TYPES
from rlhf_megatron.models.families.gemma2 import CAPS, GEMMA2_ONLY, Gemma2
from rlhf_megatron.models.families.norm_names import NORMS_AROUND
from rlhf_megatron.models.families.rope_reading import read_rope
from rlhf_megatron.models.families.windows import PATTERN, WindowFields, declared_windows

FULL, WINDOW = "full_attention", "sliding_attention"
_THETAS = {FULL: ("rope_theta", 1_000_000.0), WINDOW: ("rope_local_base_freq", 10_000.0)}


@dataclasses.dataclass(frozen=True)
class Gemma3(Gemma2):
    """A Gemma 2 whose rotary embeddings follow from the type of a layer."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        of_type = _rope_parameters(path, config)
        flat = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_theta")}
        plain = super().read(path, flat | {"rope_parameters": of_type[FULL]})
        local = flat | {"rope_parameters": of_type[WINDOW]}
        of_windows = read_rope(path, local, plain.head_dim, plain.max_positions)
        _, within = declared_windows(path, config, self.windows, plain.layers)
        ropes = tuple(of_windows if one else plain.rope for one in within)
        return dataclasses.replace(plain, mixed_ropes=ropes if any(within) else ())

    def rollout_problem(self, architecture: Architecture) -> str | None:
        """See Family."""
        if architecture.scales.attention_cap is not None:
            return "attn_logit_softcapping is set, and vLLM has no soft cap of attention in gemma3_text"
        return Decoder.rollout_problem(self, architecture)


def _rope_parameters(path: Path, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the parameters of each type of layer, in the form that transformers gives to both spellings."""
    nested, scaling = config.get("rope_parameters"), config.get("rope_scaling")
    form = f"an object of {FULL} and {WINDOW}, of which each is an object"
    if nested is not None and (
        not isinstance(nested, dict)
        or nested.keys() - _THETAS.keys()
        or not all(isinstance(given, dict | None) for given in nested.values())
    ):
        raise unsupported(path, "rope_parameters", nested, form)
    if not isinstance(scaling, dict | None):
        raise unsupported(path, "rope_scaling", brief(scaling), "an object, of layers without a window")
    found = {}
    for kind, (field, absent) in _THETAS.items():
        given = dict((nested or {}).get(kind) or {"rope_type": "default"})
        given |= (scaling or {}) if kind == FULL else {}
        found[kind] = {"rope_theta": config.get(field, absent)} | given
    return found


FAMILY = Gemma3(
    "Gemma3Text",
    FamilyFields(
        read=frozenset({"query_pre_attn_scalar", "rope_local_base_freq", PATTERN, *CAPS}),
        types=GEMMA_TYPES,
        only=GEMMA2_ONLY,
        never_null=("hidden_activation", "num_key_value_heads", "head_dim", "query_pre_attn_scalar", PATTERN),
        absent={"num_key_value_heads": 4, "head_dim": 256},
    ),
    language_class="Gemma3ForCausalLM",
    query_key_norm=True,
    max_positions=131072,
    windows=WindowFields(absent=4096, layers="pattern", full_every=6, by_type=True),
    norms=NORMS_AROUND,
    zero_centred_norms=True,
    activation="gelu_tanh",
    vllm_mixes_windows=True,
    has_rollout_table=False,
    caps=(None, None),
)
