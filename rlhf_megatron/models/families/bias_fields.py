"""The fields of config.json that say which linear layers of a decoder layer have biases."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.models.config_fields import flag


@dataclasses.dataclass(frozen=True)
class BiasFields:
    """The flag for queries, keys and values, that for attention's output, and that for the dense feed-forward layer."""

    qkv: str | None = None
    output: str | None = None
    mlp: str | None = None

    def read(self, path: Path, config: Mapping[str, Any]) -> tuple[bool, bool, bool]:
        """Return which of the three have biases, none where the config says nothing."""
        qkv, output, mlp = (name is not None and flag(path, name, config) for name in (self.qkv, self.output, self.mlp))
        return qkv, output, mlp


NO_BIASES = BiasFields()
