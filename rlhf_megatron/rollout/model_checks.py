"""Checks of a model's config that are the same for every engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import RolloutError
from rlhf_megatron.untrusted import shown


def check_classes(path: Path, config: Mapping[str, Any]) -> None:
    """Raise RolloutError where the config at ``path`` is of no model that generates, or leaves engines to guess."""
    classes = config.get("architectures")
    if not classes:
        # Without it vLLM guesses, and takes some families for embedding models.
        raise RolloutError(f'{path}: "architectures" is missing; add it, for example ["Qwen3ForCausalLM"]')
    if isinstance(classes, list) and any("ForSequenceClassification" in str(name) for name in classes):
        raise RolloutError(
            f"{path}: architectures is {shown(classes)}: a classifier generates nothing; name another model"
        )
