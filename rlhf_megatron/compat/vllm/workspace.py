"""Scratch memory of vLLM's kernels, of which it has one manager for a process: each engine here has its own.

A second engine would replace the first one's manager. CUDA graphs hold addresses of what that had, and the new one is
locked at the size that its own model needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from rlhf_megatron.compat.patches import replacement
from rlhf_megatron.compat.vllm.names import KNOWN, PACKAGES


class Workspace:
    """The manager of one engine; none before the engine is made."""

    def __init__(self) -> None:
        self._manager: Any = None

    @replacement(
        *PACKAGES,
        **KNOWN,
        why="a second engine of a process replaces the scratch memory whose addresses the first one's CUDA graphs hold",
        upstream="https://github.com/vllm-project/vllm/issues/18975",
    )
    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Have vLLM use this manager inside, and keep the one that it makes there."""
        from vllm.v1.worker import workspace

        others, workspace._manager = workspace._manager, self._manager
        try:
            yield
        finally:
            self._manager, workspace._manager = workspace._manager, others
