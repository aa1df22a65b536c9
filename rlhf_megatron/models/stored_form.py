"""The form in which checkpoints hold the description of a model, which those of earlier versions have too."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.rope import Llama3Scaling, Rope

# Keys that came after the first checkpoints, which do not have them.
LATER_FIELDS = (
    "mixed_layers", "rope", "mixed_ropes", "window", "zero_centred_norms", "output_bias", "mlp_bias",
    "wide_query_key_norm", "scales",
    "prediction_layers", "latent", "attention_sinks", "gated_attention", "delta_net", "norms_of_turned",
    "head_norms", "plain_mlp", "full_heads", "keys_are_values", "value_norm", "layer_scalars", "first_layer",
    "target_vocabulary", "auxiliary_layers", "target_cuts_sequences",
)  # fmt: skip
_LATER_FIELDS_OF_EXPERTS = ("shared", "routing", "biased", "limit", "beside_dense")


def stored_form(architecture: Architecture) -> dict[str, Any]:
    """Return what a checkpoint holds of ``architecture``, plain but for its tuples.

    ``LATER_FIELDS`` are left out while they say nothing, so that those resume.
    """
    form: dict[str, Any] = {}
    for key, value in dataclasses.asdict(architecture.for_rows(None)).items():
        form |= _stored_rope(architecture.rope, value) if key == "rope" else {key: value}
    return without_silent_fields(form)


def _stored_rope(rope: Rope, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the two keys of the first checkpoints, whose ropes were these, and ``rope`` for any other."""
    factor = rope.scaling.factor if isinstance(rope.scaling, Llama3Scaling) else None
    earlier = Rope(rope.theta, None if factor is None else Llama3Scaling(factor, 1.0, 4.0, 8192))
    return {
        "rope_theta": rope.theta,
        "rope_scaling_factor": factor,
        "rope": None if rope == earlier else dict(plain),
    }


def without_silent_fields(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored form without later fields that say nothing."""
    form = {key: value for key, value in stored.items() if _says_something(value) or key not in LATER_FIELDS}
    experts = form.get("experts")
    if isinstance(experts, Mapping):
        form["experts"] = {key: value for key, value in experts.items() if value or key not in _LATER_FIELDS_OF_EXPERTS}
    return form


def _says_something(value: object) -> bool:
    return any(value.values()) if isinstance(value, Mapping) else bool(value)
