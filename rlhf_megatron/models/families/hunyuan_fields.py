"""Fields that the configs of Hunyuan's dense models and mixtures have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.config_fields import unsupported
from rlhf_megatron.models.families.norm_names import NormNames
from rlhf_megatron.models.rope import SCALINGS, AlphaScaling
from rlhf_megatron.untrusted import shown

READ = frozenset({"attention_bias", "attention_dropout"})
TYPES: dict[str, tuple[type, ...]] = {
    "attention_dropout": (float, int),  # 0.1; here nothing is dropped
    "dense_list": (list,),
    "pool_type": (str,),
    **dict.fromkeys(
        (
            "attention_head_dim", "cla_share_factor", "class_num", "eod_token_id", "im_end_id", "im_newline_id",
            "im_start_id", "mask_init_id", "org_vocab_size", "pad_id", "text_end_id", "text_start_id",
        ),
        (int,),
    ),
}  # fmt: skip
ONLY = {
    "add_classification_head": False,
    "norm_type": "rms",
    "qkv_bias": False,
    "use_cla": False,
    "use_qk_norm": True,
    "use_rotary_pos_emb": True,
}
NORMS = dataclasses.replace(NormNames(), query="query_layernorm", key="key_layernorm")
ROPES = SCALINGS | {"dynamic": AlphaScaling}
# Parameters that nobody reads beside alpha; ``factor`` is for rows beyond max_position_embeddings.
_BESIDE_ALPHA = {"beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim"}


def checked(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without the parameters of positions that have no effect; raises ModelError for others."""
    if config.get("head_dim") is None:
        raise ModelError(f"{shown(path)}: head_dim is missing; add it (transformers takes it for granted)")
    left = dict(config)
    for field in ("rope_parameters", "rope_scaling"):
        rope = config.get(field)
        if isinstance(rope, dict) and "dynamic" in (rope.get("rope_type"), rope.get("type")):
            if rope.get("factor") != 1:
                raise unsupported(path, f"{field}.factor", rope.get("factor"), "1.0 beside alpha")
            left[field] = {key: value for key, value in rope.items() if key not in _BESIDE_ALPHA}
    return left
