"""Reads a Hugging Face config.json as the description of a model, by the file of its family.

What a description is made of is in ``description``; what is not read is refused by the name of the field
(``config_fields``). Weights and their names are the matter of ``weight_map``.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.config_fields import (
    brief,
    check_class,
    check_fields,
    read_model_json,
    unsupported,
    weight_block,
)
from rlhf_megatron.models.description import Architecture, Experts, Head, LayerKind, Scales
from rlhf_megatron.models.families import FAMILIES, MODEL_TYPES
from rlhf_megatron.models.families.rope_reading import rope_notes
from rlhf_megatron.models.families.wrappers import WRAPPERS, language_config, wrapper_notes, wrapper_of
from rlhf_megatron.untrusted import shown

__all__ = [
    "Architecture",
    "Experts",
    "Head",
    "LayerKind",
    "ModelError",
    "Scales",
    "check_generates",
    "classifier_config",
    "config_notes",
    "parse_architecture",
    "prediction_layer",
    "read_architecture",
    "read_config",
]


def classifier_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a Hugging Face ``config`` as that of the same decoder with a scalar head: sequence classification, one
    label."""
    return config | {
        "architectures": [f"{FAMILIES[config['model_type']].classes}ForSequenceClassification"],
        "num_labels": 1,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return the ``config.json`` of a Hugging Face folder; raises ModelError where it is missing or damaged."""
    path = Path(folder) / "config.json"
    if not os.path.lexists(path):
        raise ModelError(f"{shown(path)}: no such file; model.path must be a folder in Hugging Face format")
    config = read_model_json(path)
    if not isinstance(config, dict):
        raise ModelError(f"{shown(path)}: must hold a JSON object")
    return config


def config_notes(config: dict[str, Any]) -> tuple[str, ...]:
    """Return lines about a config.json that is supported, for the person who starts a run."""
    return (*wrapper_notes(config), *rope_notes(config))


def wrapped_language(folder: str | Path) -> dict[str, Any] | None:
    """Return the config of the language model that a folder's config.json has inside; None where it is that itself.

    Raises ModelError where either is not supported.
    """
    config = read_config(folder)
    return None if wrapper_of(config) is None else language_config(Path(folder) / "config.json", config)


def read_architecture(folder: str | Path) -> Architecture:
    """Read and check ``config.json`` in ``folder``; raises ModelError naming the field that is not supported."""
    return parse_architecture(read_config(folder), folder)


def check_generates(architecture: Architecture, folder: str | Path) -> None:
    """Raise ModelError where vLLM would compute another model than ``architecture`` from the config in ``folder``."""
    problem = FAMILIES[architecture.family].rollout_problem(architecture)
    if problem:
        raise ModelError(f"{shown(Path(folder) / 'config.json')}: {problem}")


def prediction_layer(architecture: Architecture, folder: str | Path) -> Architecture:
    """Return the layer for multi-token prediction of a model as one of its own (``Architecture.prediction_model``).

    Raises ModelError where the model in ``folder`` has none, or one that is not supported.
    """
    path, layers = shown(Path(folder) / "config.json"), architecture.prediction_layers
    if not layers:
        raise ModelError(
            f"{path}: rollout.speculative.method=mtp: the model has no layer for multi-token prediction "
            "(num_nextn_predict_layers); use suffix or eagle3"
        )
    if layers > 1 or not FAMILIES[architecture.family].predicts:
        raise ModelError(
            f"{path}: rollout.speculative.method=mtp: {layers} layers for multi-token prediction in "
            f"{architecture.family} are not supported; use suffix or eagle3"
        )
    return architecture.prediction_model()


def _kinds_like(kind: object) -> str:
    """Return the supported model types that look like ``kind``, which may be a mistyped one, and where all of them
    are."""
    kinds = [*MODEL_TYPES, *WRAPPERS]
    near = difflib.get_close_matches(str(kind), kinds, n=4)
    return ", ".join([*near, f"{len(kinds) - len(near)} {'others' if near else 'types'} that docs/models.md lists"])


def parse_architecture(config: dict[str, Any], folder: str | Path) -> Architecture:
    """Return the architecture of a Hugging Face ``config``; ``folder`` is where it is from, for errors (see
    ModelError)."""
    path = Path(folder) / "config.json"
    if wrapper_of(config):
        where = f"{path.name} (text_config)" if config.get("text_config") is not None else path.name
        config, path = language_config(path, config), path.with_name(where)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        inside = config.get("text_config")
        if isinstance(inside, dict) and inside.get("model_type") in MODEL_TYPES:
            raise ModelError(
                f"{shown(path)}: model_type is {brief(kind)}, a model of images or sound with a language model of type "
                f"{brief(inside.get('model_type'))} inside; save that alone, with its text_config as config.json"
            )
        raise unsupported(path, "model_type", kind, _kinds_like(kind))
    family = FAMILIES[kind]
    check_fields(path, config, family.fields)
    if "quantization_config" not in family.fields.read:  # else its file has another kind
        weight_block(path, config)
    check_class(path, config, family.classes, family.language_class, family.fields)
    return family.read(path, config)
