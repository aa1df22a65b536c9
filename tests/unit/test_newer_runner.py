"""vLLM's newer model runner, which GPUs have, without one: by Triton's interpreter, in a process of its own."""

from __future__ import annotations

import importlib.util

import pytest

from newer_runner_repeats import CASES
from rlhf_megatron.rollout.vllm.process_environment import has_gpu
from triton_kernels import run_in_interpreter

pytestmark = [
    pytest.mark.grid,
    pytest.mark.skipif(has_gpu(), reason="tests/gpu has the runner itself"),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm.v1.worker.cpu") is None,
        reason="this version has its newer runner for GPUs alone",
    ),
]


def test_samples_with_drafts_are_those_without() -> None:
    run_in_interpreter("newer_runner_speculates.py")


@pytest.mark.parametrize("case", CASES)
def test_samples_with_kept_inputs_are_those_without(case: str) -> None:
    run_in_interpreter("newer_runner_repeats.py", case)
