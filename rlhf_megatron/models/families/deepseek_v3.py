"""DeepSeek-V3, V3.1, R1 and Moonlight: latent attention, and experts by corrected sigmoid scores within groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.config_fields import FamilyFields, unsupported
from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.families import grouped_experts, latent
from rlhf_megatron.models.families.contract import ReadConfig
from rlhf_megatron.models.families.decoder import NO_ATTENTION_BIAS, Decoder
from rlhf_megatron.models.rope import YarnScaling
from rlhf_megatron.untrusted import shown

# What DeepSeek's own code, or training, has a field for.
WITHOUT_EFFECT: dict[str, tuple[type, ...]] = {
    "aux_loss_alpha": (float,),
    "ep_size": (int,),
    "output_router_logits": (bool,),
    "seq_aux": (bool,),
}
NEVER_NULL = (*latent.NEVER_NULL, "first_k_dense_replace")
# What transformers takes for absent fields, where other decoders have something else.
_ABSENT = {
    "first_k_dense_replace": 3, "n_group": 8, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "topk_group": 4,
}  # fmt: skip
_NAMED = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # which transformers takes for granted, and vLLM not


@dataclasses.dataclass(frozen=True)
class DeepseekV3(Decoder):
    """The usual decoder with latent attention, whose experts are in groups."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        for field, value in _NAMED.items():
            if config.get(field) is None:
                raise ModelError(f'{shown(path)}: {field} is missing; add "{value}", since vLLM would take another')
        return self.read_layers(path, _ABSENT | dict(config))

    def read_layers(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """Return the model of a ``config`` that says all that is not for others too to take for granted."""
        plain = with_latent_attention(path, config, super().read)
        experts = grouped_experts.read_experts(path, config, grouped_experts.CORRECTED_SIGMOID)
        return grouped_experts.with_experts(path, config, plain, experts)

    def rollout_problem(self, architecture: Architecture) -> str | None:
        """See Family."""
        return super().rollout_problem(architecture) or tied_problem(architecture)


def tied_problem(architecture: Architecture) -> str | None:
    """Return why vLLM would compute another model of DeepSeek's with tied embeddings."""
    if not architecture.tied_embeddings:
        return None
    return f"tie_word_embeddings is true, and vLLM has an output layer of its own in {architecture.family}"


def with_latent_attention(path: Path, config: Mapping[str, Any], read: ReadConfig) -> Architecture:
    """Return what ``read`` makes of the config, with latent attention whose pairs of turned numbers are neighbours.

    Raises ModelError for scalings of positions that transformers and vLLM compute differently in these models.
    """
    attention = latent.read_latent(path, config)
    plain = read(path, {**config, "head_dim": attention.turned})
    scaling = plain.rope.scaling
    if scaling is not None and not isinstance(scaling, YarnScaling):
        raise unsupported(path, "rope_type", (config.get("rope_scaling") or config["rope_parameters"]), "default, yarn")
    if scaling and (scaling.attention_factor is not None or not scaling.truncate):
        raise ModelError(
            f"{shown(path)}: vLLM has no attention_factor, attn_factor or truncate with latent attention; remove it"
        )
    if scaling and (scaling.mscale is None) != (scaling.mscale_all_dim is None):
        raise ModelError(f"{shown(path)}: mscale and mscale_all_dim go together; add the other")
    return dataclasses.replace(plain, latent=attention, rope=dataclasses.replace(plain.rope, interleaved=True))


FAMILY = DeepseekV3(
    "DeepseekV3",
    FamilyFields(
        read=grouped_experts.FIELDS | latent.FIELDS,
        types=WITHOUT_EFFECT,
        only=NO_ATTENTION_BIAS | _NAMED | {"moe_layer_freq": 1, "rope_interleave": True},
        never_null=(*NEVER_NULL, *grouped_experts.NEVER_NULL, "n_group", "topk_group"),
        absent={"num_key_value_heads": 128},
        native=True,
    ),
    expert_names=grouped_experts.NAMES,
    max_positions=4096,
    has_rollout_table=False,
    predicts=True,
)
