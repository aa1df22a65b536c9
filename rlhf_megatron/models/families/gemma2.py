"""Gemma 2: norms before and after sublayers, soft caps of attention and logits, windows in every other layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.models.config_fields import FamilyFields, size
from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.families.config_reading import optional_number
from rlhf_megatron.models.families.decoder import NO_ATTENTION_BIAS
from rlhf_megatron.models.families.gemma import GELU, GEMMA_TYPES, Gemma
from rlhf_megatron.models.families.norm_names import NORMS_AROUND
from rlhf_megatron.models.families.windows import WindowFields

CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
# Of the first folders, beside sliding_window; neither transformers nor vLLM reads it.
_TYPES = GEMMA_TYPES | {"sliding_window_size": (int,)}
GEMMA2_ONLY = NO_ATTENTION_BIAS | {"hidden_act": GELU, "hidden_activation": GELU}


@dataclasses.dataclass(frozen=True)
class Gemma2(Gemma):
    """A Gemma with more of both; ``caps``: the soft caps of attention and logits of a config without."""

    caps: tuple[float | None, float | None] = (50.0, 30.0)

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        plain = super().read(path, config)
        attention_cap, logit_cap = (
            optional_number(path, field, config, absent) for field, absent in zip(CAPS, self.caps, strict=True)
        )
        scales = dataclasses.replace(
            plain.scales,
            attention=size(path, "query_pre_attn_scalar", config, 256) ** -0.5,
            attention_cap=attention_cap,
            logit_cap=logit_cap,
        )
        return dataclasses.replace(plain, scales=scales)


FAMILY = Gemma2(
    "Gemma2",
    FamilyFields(
        read=frozenset({"query_pre_attn_scalar", *CAPS}),
        types=_TYPES,
        only=GEMMA2_ONLY,
        never_null=("hidden_activation", "num_key_value_heads", "head_dim", "query_pre_attn_scalar"),
        absent={"num_key_value_heads": 4, "head_dim": 256},
    ),
    max_positions=8192,
    windows=WindowFields(absent=4096, layers="pattern", full_every=2, by_type=True),
    norms=NORMS_AROUND,
    zero_centred_norms=True,
    activation="gelu_tanh",
    vllm_mixes_windows=True,
    has_rollout_table=False,
)
