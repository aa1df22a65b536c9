"""When inputs of steady steps are not kept. That they are the same, and used, is in test_newer_runner.py."""

from __future__ import annotations

import types
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_megatron.compat.vllm import steady_inputs
from rlhf_megatron.rollout.vllm.process_environment import prepare_environment


def runner_with(**parts: Any) -> Any:
    """Return the parts of vLLM's newer runner that are looked at, of plain decoding but for ``parts``."""
    prepare_environment()
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    plain = {
        "speculator": None,
        "model_state": object.__new__(DefaultModelState),
        "sampler": object.__new__(Sampler),
        "dp_size": 1,
        "model_config": types.SimpleNamespace(rswa_window=None),
        "vllm_config": types.SimpleNamespace(kv_transfer_config=None),
        "req_states": None,
        "input_buffers": None,
        "add_requests": None,
        "prepare_inputs": None,
        "sample": None,
    }
    return types.SimpleNamespace(**(plain | parts))


def is_replaced(runner: Any) -> bool:
    before = dict(vars(runner))
    with steady_inputs.kept(runner):
        return vars(runner) != before


@pytest.mark.parametrize(
    "parts",
    [
        {"speculator": object()},
        {"num_speculative_steps": 2},
        {"lora_config": object()},
        {"use_pp": True},
        {"use_dcp": True},
        {"supports_mm_inputs": True},
        {"dp_size": 2},
        {"model_config": types.SimpleNamespace(rswa_window=8)},
        {"vllm_config": types.SimpleNamespace(kv_transfer_config=object())},
        {"model_state": types.SimpleNamespace(num_new_sampled_tokens_per_step=1)},
        {"sampler": object()},
    ],
    ids=lambda parts: next(iter(parts)),
)
def test_all_but_plain_decoding_is_vllms_own(parts: dict[str, Any]) -> None:
    assert is_replaced(runner_with())
    assert not is_replaced(runner_with(**parts))


def test_the_older_runner_is_left_as_it_is() -> None:
    runner = runner_with()
    del runner.speculator
    assert not is_replaced(runner)


def test_an_unknown_version_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steady_inputs, "KNOWN", {"first": "0.1", "last": "0.2"})
    assert not is_replaced(runner_with())


def test_inputs_with_an_unknown_field_are_made_anew_and_a_warning_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_environment()
    known = steady_inputs._parts_of_inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert steady_inputs._are_known.__wrapped__(known)
    monkeypatch.setattr(steady_inputs, "_parts_of_inputs", lambda: known | {"wings", "num_legs"})
    with pytest.warns(UserWarning, match=r"does not know \(num_legs, wings\); they are made anew in each step"):
        assert not is_replaced(runner_with())


@pytest.mark.parametrize(
    ("changed", "may_stay"),
    [
        ({}, True),
        ({"num_tokens": 3}, False),
        ({"is_prefilling_np": np.array([False, True])}, False),
        ({"num_draft_tokens": 1}, False),
        ({"prompt_lens": torch.ones(2)}, False),
        ({"dcp_local_seq_lens": torch.zeros(2)}, False),
        ({"has_structured_output_reqs": True}, False),
    ],
)
def test_inputs_stay_where_each_request_samples_a_token(changed: dict[str, Any], may_stay: bool) -> None:
    inputs = {"num_tokens": 2, "num_reqs": 2, "is_prefilling_np": np.zeros(2, dtype=bool), "num_draft_tokens": 0}
    inputs |= {"prompt_lens": None, "dcp_local_seq_lens": None, "has_structured_output_reqs": False, **changed}
    assert steady_inputs._may_stay(types.SimpleNamespace(**inputs)) == may_stay
