"""GPUs that a test cannot do without. Not a test itself."""

from __future__ import annotations

import pytest
import torch


def skip_without_gpus(count: int) -> None:
    """Skip the test where there are fewer GPUs: ranks may share one (see parallel/ranks.py), but those of one vLLM
    replica may not."""
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs for the ranks of a replica, there are {torch.cuda.device_count()}")
