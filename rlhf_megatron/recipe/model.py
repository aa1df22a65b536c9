"""The `model` section: which weights are trained, and in which numbers."""

from __future__ import annotations

from typing import Literal

from rlhf_megatron.recipe.section import Section


class ModelSection(Section):
    """The model that the actor starts from."""

    path: str
    """Folder in Hugging Face format: config.json and safetensors weights."""
    config: str | None = None
    """Folder whose config.json `--dry-run` plans with when `path` is not on this machine. Training needs `path`."""
    tokenizer: str | None = None
    """Folder of the tokenizer, or a sentencepiece .model file; default: `path`."""
    dtype: Literal["float32", "bfloat16", "float16"]
    """Type of weights and activations; the optimizer keeps float32 master weights in any case. In float16 the loss is
    scaled, by as much as gradients bear."""
    random_weights: bool = False
    """Draw weights from the seed instead of reading them; for benchmarks."""
    trust_remote_code: bool = False
    """Let a tokenizer run code of its own from its folder."""
