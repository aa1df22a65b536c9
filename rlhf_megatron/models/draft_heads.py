"""Descriptions of heads in EAGLE-3's form, which draft for another model: read from a folder, or made for a new head.

What such a head is made of is in ``families.eagle3_head``. Free of torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import ModelError, RecipeError
from rlhf_megatron.models.architecture import read_config
from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.families import FAMILIES, eagle3_head
from rlhf_megatron.models.rope import Rope
from rlhf_megatron.topology.layout import Layout
from rlhf_megatron.untrusted import shown


def read_head(folder: str | Path, target: Architecture) -> Architecture:
    """Return the head that the config.json in ``folder`` describes, for the model ``target``.

    Raises ModelError naming the field that is not supported, or that has the sizes of another model.
    """
    return parse_head(read_config(folder), folder, target)


def parse_head(config: Mapping[str, Any], folder: str | Path, target: Architecture) -> Architecture:
    """Return the head that a ``config`` describes, as ``read_head``; ``folder`` is where it is from, for errors."""
    path = Path(folder) / "config.json"
    head = FAMILIES[eagle3_head.NAME].read(path, config)
    for field, own, wanted in (
        ("hidden_size", head.hidden, target.hidden),
        ("vocab_size", head.target_vocabulary, target.vocabulary),
    ):
        if own != wanted:
            raise ModelError(
                f"{shown(path)}: {field} is {own}, and that of the model to draft for {wanted}; take a head of that "
                "model"
            )
    beyond = [layer for layer in head.auxiliary_layers if layer > target.layers]
    if beyond:
        raise ModelError(
            f"{shown(path)}: eagle_config has layer {beyond[0]}, and the model to draft for has {target.layers}; "
            "take a head of that model"
        )
    return _complete(head, target)


def new_head(target: Architecture) -> Architecture:
    """Return a head of the widths of ``target`` that drafts all its tokens, for weights that are drawn."""
    head = Architecture(
        family=eagle3_head.NAME,
        layers=1,
        hidden=target.hidden,
        feed_forward=target.feed_forward,
        heads=target.heads,
        key_value_heads=target.key_value_heads,
        head_dim=target.head_dim,
        vocabulary=target.vocabulary,
        max_positions=target.max_positions,
        norm_epsilon=target.norm_epsilon,
        rope=Rope(target.rope.theta),
        tied_embeddings=False,
        query_key_norm=False,
        qkv_bias=False,
        head="draft",
        target_vocabulary=target.vocabulary,
    )
    return _complete(head, target)


def _complete(head: Architecture, target: Architecture) -> Architecture:
    """Return a head with what it has of ``target``: how tokens are shared out, as many positions at least, and
    auxiliary layers that it does not name."""
    return dataclasses.replace(
        head,
        auxiliary_layers=head.auxiliary_layers or auxiliary_layers(target.layers),
        target_cuts_sequences=target.cuts_sequences,
        max_positions=max(head.max_positions, target.max_positions),
    )


def auxiliary_layers(layers: int) -> tuple[int, ...]:
    """Return the layers of a model of so many ``layers`` before which hidden states are taken where nothing says so.

    They are vLLM's, which are EAGLE-3's; of few layers, where those are not three in this order, the first quarter, the
    half and the last one.
    """
    usual = (2, layers // 2, layers - 3)
    return usual if usual == tuple(sorted(set(usual))) else tuple(sorted({layers // 4, layers // 2, layers - 1}))


def write_head_config(folder: Path, head: Architecture, source: str | Path | None = None) -> None:
    """Write into ``folder`` the config.json of ``head`` that vLLM reads; ``source`` is the folder that it is from.

    It says which layers' hidden states are read, also where that of ``source`` leaves it to others. Raises ModelError
    for a damaged source, OSError where the disk fails.
    """
    config = _config_of_new(head) if source is None else read_config(source)
    states = {"eagle_aux_hidden_state_layer_ids": list(head.auxiliary_layers), "use_aux_hidden_state": True}
    config["eagle_config"] = (config.get("eagle_config") or {}) | states
    config |= {key: states[key] for key in states if key != "use_aux_hidden_state"}  # where vLLM's newer runner looks
    config["max_position_embeddings"] = head.max_positions  # beyond which vLLM would draft nothing
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _config_of_new(head: Architecture) -> dict[str, Any]:
    return {
        "architectures": [eagle3_head.CLASS],
        "model_type": eagle3_head.MODEL_TYPE,
        "attention_bias": False,
        "draft_vocab_size": head.vocabulary,
        "head_dim": head.head_dim,
        "hidden_act": "silu",
        "hidden_size": head.hidden,
        "intermediate_size": head.feed_forward,
        "max_position_embeddings": head.max_positions,
        "num_attention_heads": head.heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": head.key_value_heads,
        "rms_norm_eps": head.norm_epsilon,
        "rope_theta": head.rope.theta,
        "tie_word_embeddings": False,
        "vocab_size": head.target_vocabulary,
    }


def draft_head(target: Architecture, folder: str | Path | None) -> Architecture:
    """Return the head in ``folder`` for the model ``target``, a new one without a folder; raises as ``read_head``."""
    return new_head(target) if folder is None else read_head(folder, target)


def check_target_layout(layout: Layout, where: str = "actor") -> None:
    """Raise RecipeError where a head cannot learn beside a model in ``layout``, that of the section ``where``."""
    if layout.pipeline > 1:
        raise RecipeError(
            f"{where}.layout.pipeline={layout.pipeline}: a head that drafts reads hidden states of several layers, "
            f"which must be on one rank; set {where}.layout.pipeline to 1, and use tensor, expert or context"
        )
