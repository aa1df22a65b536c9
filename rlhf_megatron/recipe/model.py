"""The `model` section: which weights are trained, and in which numbers."""

from __future__ import annotations

from typing import Literal

from rlhf_megatron.recipe.section import Section


class ModelSection(Section):
    """The model that the actor starts from."""

    path: str
    """Hugging Face folder: config.json and safetensors weights."""
    config: str | None = None
    """Folder whose config.json `--dry-run` uses where `path` is not on this machine."""
    tokenizer: str | None = None
    """Folder of the tokenizer, or a sentencepiece .model file; default: `path`."""
    dtype: Literal["float32", "bfloat16", "float16"]
    """Type of weights and activations; master weights are always float32. float16 scales the loss dynamically."""
    random_weights: bool = False
    """Draw weights from the seed; for benchmarks."""
    trust_remote_code: bool = False
    """Let the tokenizer run code from its folder."""
