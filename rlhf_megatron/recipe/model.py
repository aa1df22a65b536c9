"""The `model` section: which weights are trained, and in which numbers."""

from __future__ import annotations

from typing import Literal

from rlhf_megatron.recipe.section import Section


class ModelSection(Section):
    """The model that the actor starts from."""

    path: str
    """Hugging Face folder."""
    config: str | None = None
    """Folder with the config.json for `--dry-run` where `path` is not on this machine."""
    tokenizer: str | None = None
    """Folder, or sentencepiece .model file; default: `path`."""
    dtype: Literal["float32", "bfloat16", "float16"]
    """Of weights and activations; master weights are float32. float16 scales the loss dynamically."""
    random_weights: bool = False
    """For benchmarks: weights drawn from the seed."""
    trust_remote_code: bool = False
    """Let the tokenizer run code from its folder."""
