"""The ``model`` section: which weights are trained, and in which numbers."""

from __future__ import annotations

from typing import Literal

from rlhf_megatron.recipe.section import Section


class ModelSection(Section):
    """The model that the actor starts from."""

    path: str
    """Hugging Face folder, else OWNER/NAME on the hub (docs/models.md)."""
    revision: str | None = None
    """Branch, tag or commit on the hub; default: main, kept at the run's first commit."""
    config: str | None = None
    """Folder (config.json) or OWNER/NAME for ``--dry-run`` without ``path``."""
    tokenizer: str | None = None
    """Folder, OWNER/NAME, or sentencepiece file; default: ``path``."""
    dtype: Literal["float32", "bfloat16", "float16"]
    """Of weights and activations; masters are float32."""
    read_once: bool = False
    """Read files once per node into host memory, instead of mapping them: for slow mapped reads."""
    random_weights: bool = False
    """For benchmarks: from the seed."""
    trust_remote_code: bool = False
    """Let the tokenizer run code from its folder."""
