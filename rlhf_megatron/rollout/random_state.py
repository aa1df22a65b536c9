"""Preserved random state: the trainer's random numbers stay its own while an engine draws from the same generators."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy
import torch


@contextlib.contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the generators of python, numpy and torch (CPU and the current GPU) afterwards, also after an error.

    vLLM seeds all of them when an engine is made, and draws from torch's when it samples.
    """
    python_state, numpy_state, torch_state = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state)
