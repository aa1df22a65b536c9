"""Python's garbage collector, and when it stands still."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Keep the collector from looking for cycles, around what makes many objects and no cycle.

    Each of its full passes goes through all that torch, Megatron and vLLM have made: 0.1 s, and many of them.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
