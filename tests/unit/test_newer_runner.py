"""vLLM's newer model runner, which GPUs have, without one: by Triton's interpreter, in a process of its own."""

from __future__ import annotations

import importlib.util

import pytest

from rlhf_megatron.rollout.vllm.process_environment import has_gpu
from triton_kernels import run_in_interpreter


@pytest.mark.grid
@pytest.mark.skipif(has_gpu(), reason="tests/gpu/test_speculation_on_gpu.py has the runner itself")
@pytest.mark.skipif(
    importlib.util.find_spec("vllm.v1.worker.cpu") is None, reason="this version has its newer runner for GPUs alone"
)
def test_samples_with_drafts_are_those_without() -> None:
    run_in_interpreter("newer_runner_speculates.py")
