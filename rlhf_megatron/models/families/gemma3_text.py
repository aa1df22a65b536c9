"""Gemma 3's language model: a Gemma 2 with norms of queries and keys, and another rotary table in layers with a window.

A checkpoint that has the vision tower too is of another ``model_type``, and not read.
"""

from __future__ import annotations

import dataclasses

from rlhf_megatron.models.config_fields import FamilyFields
from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.families.decoder import Decoder
from rlhf_megatron.models.families.gemma import GEMMA_TYPES
from rlhf_megatron.models.families.gemma2 import CAPS, GEMMA2_ONLY, Gemma2
from rlhf_megatron.models.families.norm_names import NORMS_AROUND
from rlhf_megatron.models.families.ropes_by_type import FULL, WINDOW, RopesByType
from rlhf_megatron.models.families.windows import PATTERN, WindowFields


@dataclasses.dataclass(frozen=True)
class Gemma3(RopesByType, Gemma2):
    """A Gemma 2 whose rotary embeddings follow from the type of a layer."""

    def rollout_problem(self, architecture: Architecture) -> str | None:
        """See Family."""
        if architecture.scales.attention_cap is not None:
            return "attn_logit_softcapping is set, and vLLM has no soft cap of attention in gemma3_text"
        return Decoder.rollout_problem(self, architecture)


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
    thetas={FULL: ("rope_theta", 1_000_000.0), WINDOW: ("rope_local_base_freq", 10_000.0)},
)
