"""The `model` section: which weights are trained, and in which numbers."""

from __future__ import annotations

from typing import Literal

from rlhf_megatron.recipe.section import Section


class ModelSection(Section):
    """The model that the actor starts from."""

    path: str
    """Hugging Face folder, or OWNER/NAME on the hub where there is no such folder (docs/models.md)."""
    revision: str | None = None
    """Branch, tag or commit on the hub; default: main. A run keeps to the commit that it began with."""
    config: str | None = None
    """Folder with the config.json for `--dry-run` where `path` is not on this machine."""
    tokenizer: str | None = None
    """Folder, OWNER/NAME, or sentencepiece .model file; default: `path`."""
    dtype: Literal["float32", "bfloat16", "float16"]
    """Of weights and activations; master weights are float32. float16 scales the loss dynamically."""
    read_once: bool = False
    """Copy a node's part of the files to its host memory, each rank another share, and map that; by default the files
    are mapped. For file systems on which mapped reads are slow, or not shared by the ranks of a node."""
    random_weights: bool = False
    """For benchmarks: weights drawn from the seed."""
    trust_remote_code: bool = False
    """Let the tokenizer run code from its folder."""
