"""The size of what attention keeps of each token: keys and values, in vLLM's cache."""

from __future__ import annotations

from rlhf_megatron.models.architecture import Architecture


def key_value_bytes(architecture: Architecture, element_bytes: int, tensor: int = 1) -> int:
    """Return the bytes of KV cache per token on each of ``tensor`` ranks; a rank has at least one key-value head."""
    heads = max(1, architecture.key_value_heads // tensor)
    return 2 * architecture.layers * heads * architecture.head_dim * element_bytes
