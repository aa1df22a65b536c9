"""Checks of a model folder's configs before vLLM reads them, which would guess or refuse. Imports no vLLM."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import RolloutError
from rlhf_megatron.rollout.model_checks import check_classes
from rlhf_megatron.rollout.vllm.refusals import one_line
from rlhf_megatron.untrusted import read_json, shown
from rlhf_megatron.yarn import FACTORS, factor_in, magnitude, yarn_tables

_MOST_LAYERS = 10_000


def config_arguments(folder: str | Path, language: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return arguments by which vLLM makes full-precision weights of a folder.

    ``language``: config of the language model, where config.json is that of a model of images and text around it.
    """
    path = Path(folder) / "config.json"
    config = read_json(path, RolloutError)
    if not isinstance(config, dict):
        return {}
    rope = (language or config).get("rope_parameters") or (language or config).get("rope_scaling")
    if language is None and config.get("quantization_config") is None and not any(map(_is_scaled, yarn_tables(rope))):
        return {}
    # Mistral's folders have files of another format beside transformers'.
    return {"hf_overrides": PlainConfig(language or {}), "config_format": "hf"}


@dataclasses.dataclass(frozen=True)
class PlainConfig:
    """A function from transformers' config of a folder to that of its language model in full precision.

    ``fields``: of the language model that a wrapper has; empty: there is no wrapper.
    """

    fields: Mapping[str, Any]

    def __call__(self, config: Any) -> Any:
        """Return ``config``, or what a folder of the language model has; vLLM also asks of one with only a type."""
        from transformers import CONFIG_MAPPING

        language = config
        if self.fields and hasattr(config, "text_config"):
            language = CONFIG_MAPPING[self.fields["model_type"]].from_dict(copy.deepcopy(dict(self.fields)))
        if not hasattr(language, "kv_lora_rank"):  # vLLM reads the mscales of latent attention
            for table in filter(_is_scaled, yarn_tables(getattr(language, "rope_parameters", None))):
                table.update(_attention_factors(table))
        if hasattr(language, "quantization_config"):  # whose presence alone tells some of vLLM's loaders
            del language.quantization_config
        return language


def _attention_factors(yarn: Mapping[str, Any]) -> dict[str, float]:
    """Return the factor of turned queries and keys of a YaRN table by both of vLLM's names.

    From 0.30 it reads ``attention_factor`` and the mscales. Earlier versions read neither: they multiply what they make
    of the scaling, 0.1 ln(factor) + 1, by ``attn_factor``, which newer ones do not read.
    """
    factor = factor_in(yarn)
    return {"attention_factor": factor, "attn_factor": factor / magnitude(yarn["factor"])}


def _is_scaled(yarn: Mapping[str, Any]) -> bool:
    """Tell whether a YaRN table has an attention factor that does not follow from ``factor`` alone, or a null one."""
    return any(name in yarn for name in FACTORS)


def checked_vocabulary(folder: Path, language: Mapping[str, Any] | None = None) -> int:
    """Return the vocabulary's size; ``language`` as above.

    Raises RolloutError for a config.json that ``check_classes`` or vLLM refuses.
    """
    path = folder / "config.json"
    try:
        config = read_json(path, RolloutError)
    except RolloutError as error:
        raise RolloutError(f"{error}; model.path must be a folder in Hugging Face format") from error
    if not isinstance(config, dict):
        raise RolloutError(
            f"{shown(path)}: must hold a JSON object; model.path must be a folder in Hugging Face format"
        )
    kind, config = config.get("model_type"), language or config
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > _MOST_LAYERS:
        raise RolloutError(f"{path}: num_hidden_layers is {shown(layers, 80)}; at most {_MOST_LAYERS} are possible")
    _read_as_vllm_does(folder, kind)
    check_classes(path, config)
    vocabulary = config.get("vocab_size")
    if vocabulary is None:
        raise RolloutError(f"{path}: vocab_size is missing; model.path must be a text model")
    if type(vocabulary) is not int or vocabulary < 1:
        raise RolloutError(f"{path}: vocab_size is {shown(repr(vocabulary), 80)}; it must be a whole number above 0")
    return vocabulary


def _read_as_vllm_does(folder: Path, kind: object) -> None:
    """Raise RolloutError where transformers, by which vLLM reads a folder's configs, refuses one."""
    from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig

    try:
        if kind in CONFIG_MAPPING:  # vLLM has some of its own
            AutoConfig.from_pretrained(str(folder), local_files_only=True)
        if os.path.lexists(folder / "generation_config.json"):
            read_json(folder / "generation_config.json", RolloutError)
            GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    except RolloutError:
        raise
    except Exception as error:  # of any kind: a field of the file may replace a method of transformers'
        raise RolloutError(f"rollout: {folder} has configs that transformers refuses: {one_line(error)}") from error
