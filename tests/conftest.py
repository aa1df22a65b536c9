"""What every test shares: the environment of a CPU run, the marks by folder, the order of the tests.

A test is marked by the folder it lies in (parallel/, end_to_end/, gpu/); helpers lie beside the tests that use them.
"""

from __future__ import annotations

import os
from pathlib import Path

# Before anything imports torch. One thread per process: ranks and vLLM workers share few cores here. Compilation costs
# a CPU run more than it saves. Nothing is ever fetched from a hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import settings

# tests/fuzz asks for no number of examples of its own: few and always the same ones in ``make test``, many new ones in
# ``make fuzz``. No deadline: a loaded machine is no failure.
settings.register_profile("few", max_examples=40, derandomize=True, deadline=None)
settings.register_profile("many", max_examples=5000, deadline=None, print_blob=True)
settings.load_profile("few")

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

TESTS = Path(__file__).resolve().parent
# The longest first: several workers then end at about the same time.
ORDER = ("end_to_end", "parallel", "gpu", "fuzz", "unit")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by its folder, order the folders, and skip tests of a GPU where there is none."""
    skip = pytest.mark.skip(reason="needs a CUDA device; torch.cuda.is_available() is False here")
    for item in items:
        folder = _folder(item)
        if folder in ("gpu", "parallel", "end_to_end"):
            item.add_marker(getattr(pytest.mark, folder))
        if item.get_closest_marker("gpu") is not None and not HAS_GPU:
            item.add_marker(skip)
    items.sort(key=lambda item: ORDER.index(_folder(item)) if _folder(item) in ORDER else len(ORDER))


def _folder(item: pytest.Item) -> str:
    try:
        return item.path.relative_to(TESTS).parts[0]
    except ValueError:
        return ""
