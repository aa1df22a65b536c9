"""Loading a tokenizer: which kind a path has, with the chat template that is asked for.

transformers and sentencepiece are imported when a tokenizer is loaded, so that importing this module costs nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.data.chat_template import read_template
from rlhf_megatron.data.hugging_face_tokenizer import HuggingFaceTokenizer
from rlhf_megatron.data.sentencepiece_tokenizer import SentencePieceTokenizer
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.errors import DataError
from rlhf_megatron.recipe import Recipe
from rlhf_megatron.untrusted import shown


def recipe_tokenizer(recipe: Recipe) -> Tokenizer:
    """Load the tokenizer of a recipe's policy, with the chat template that the recipe asks for.

    Raises:
        DataError: see ``load_tokenizer``.
    """
    return load_tokenizer(
        recipe.model.tokenizer or recipe.model.path,
        recipe.model.trust_remote_code,
        recipe.data.chat_template,
        recipe.data.chat_template_kwargs,
    )


def load_tokenizer(
    path: str | Path,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Tokenizer:
    """Load a tokenizer from a Hugging Face folder, a sentencepiece ``.model`` file, or a folder with only the latter.

    Args:
        path: the folder or file (recipe: model.tokenizer, else model.path). Names on the Hugging Face hub are not
            looked up: every rank would ask the network for them.
        trust_remote_code: run Python code that comes with the folder.
        chat_template: path of a Jinja file that replaces the tokenizer's own template (recipe: data.chat_template).
        chat_template_kwargs: names that the template reads (recipe: data.chat_template_kwargs).

    Raises:
        DataError: there is nothing to load at the path, or it cannot be loaded.
    """
    location = Path(path)
    template = None if chat_template is None else read_template(chat_template)
    names = chat_template_kwargs or {}
    if os.path.isfile(location):  # which holds for no path that is too long, or has a NUL, and raises nothing
        if location.suffix != ".model":
            raise DataError(f"tokenizer: {location} is a file but not a sentencepiece .model; name its folder instead")
        return SentencePieceTokenizer(location, template, names)
    if not os.path.isdir(location):
        raise DataError(
            f"tokenizer: there is no {shown(location)}; set model.tokenizer (or model.path) to a local folder with "
            "tokenizer.json or to a sentencepiece .model file"
        )
    model_file = location / "tokenizer.model"
    described = any((location / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    if model_file.is_file() and not described:
        return SentencePieceTokenizer(model_file, template, names)
    # Without any, transformers makes an empty tokenizer of the model's config.json, and says nothing.
    vocabularies = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model", "*.tiktoken")
    if not trust_remote_code and not any(next(location.glob(name), None) for name in vocabularies):
        raise DataError(
            f"tokenizer: {location} cannot be loaded: it has no tokenizer.json (nor {', '.join(vocabularies[1:])}); "
            "copy the tokenizer's files there, or set model.tokenizer to the folder that has them"
        )
    return HuggingFaceTokenizer(location, trust_remote_code, template, names)
