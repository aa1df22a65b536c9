"""The grid of ``parallel/test_adapters.py`` on GPUs: gradients through Transformer Engine's and Megatron's layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu.test_roles_on_gpu import LAYERS, ROWS, possible, rounded_up
from hugging_face import load_model, make_model, random_rows, row_logprobs, train
from parallel.parity import CLIP, LEARNING_RATE, OPTIMIZER, STEPS, VOCABULARY, case
from parallel.parity_ranks import run_cases
from parallel.ranks import run_ranks
from rlhf_megatron.topology.layout import Layout

peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install peft")
from parallel import test_adapters  # noqa: E402
from parallel.test_adapters import given_adapter, keep_gates_from_ups, make_adapter  # noqa: E402

CASES = test_adapters.CASES | test_adapters.MORE_CASES


def ranks_of(name: str) -> int:
    """Return how many ranks a case has."""
    return Layout(**CASES[name][0].layout).size


GRID = [
    (name, layers)
    for name in sorted(CASES, key=ranks_of)
    for layers in LAYERS
    if possible(LAYERS[layers], CASES[name][0])
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def results(home: Path) -> Callable[[str, str], dict[str, Any]]:
    """Return what rank 0 found in a case, or how it failed; all cases of as many ranks are run with the first of
    them."""

    @functools.cache
    def launched(ranks: int) -> dict[str, dict[str, Any]]:
        cases = {}
        for name, layers in GRID:
            (given, modules), kind = CASES[name], LAYERS[layers]
            if ranks_of(name) == ranks:
                folder, adapter = home / name, home / f"{name}, adapter"
                if not folder.exists():
                    make_model(folder, given.family, tied=given.tied, vocabulary=VOCABULARY)
                    make_adapter(folder, modules, adapter)
                section = {"transformer_implementation": kind.implementation} | (given.section or {})
                cases[f"{name}|{layers}"] = case(
                    folder,
                    given.layout,
                    list(random_rows(ROWS, VOCABULARY)),
                    100,
                    section | given_adapter(name, modules, adapter),
                    dtype=kind.dtype,
                    then=given.then,
                )
        few = {"NCCL_MAX_NCHANNELS": "2", "NCCL_BUFFSIZE": str(2**20)}
        [first, *_] = run_ranks(run_cases, ranks, {"cases": cases, "go_on": True}, timeout=500, environment=few)
        return first

    return lambda name, layers: launched(ranks_of(name))[f"{name}|{layers}"]


@functools.cache
def reference(folder: Path, adapter: Path) -> Any:
    """Return (logprobs with and without adapters, losses, gradient norms) of PEFT in float32."""
    prompts, responses = random_rows(ROWS, VOCABULARY)
    model = peft.PeftModel.from_pretrained(load_model(folder), adapter, is_trainable=True)
    keep_gates_from_ups(model)
    with torch.no_grad():
        logprobs = torch.cat([row_logprobs(model, p, r) for p, r in zip(prompts, responses, strict=True)])
        with model.disable_adapter():
            base = torch.cat([row_logprobs(model, p, r) for p, r in zip(prompts, responses, strict=True)])
    losses, norms = train(model, prompts, responses, STEPS, LEARNING_RATE, CLIP, OPTIMIZER["epsilon"])
    return logprobs, base, losses, norms


@pytest.mark.parametrize(("name", "layers"), GRID)
def test_outputs_and_steps_equal_peft(
    name: str, layers: str, home: Path, results: Callable[[str, str], dict[str, Any]]
) -> None:
    kind = LAYERS[layers]
    result = results(name, layers)
    sums, of_gradients = rounded_up(home / name)
    assert "failed" not in result, result["failed"]
    logprobs, base, losses, norms = reference(home / name, home / f"{name}, adapter")
    for found, expected in ((result["logprobs"], logprobs), (result["base_logprobs"], base)):
        difference = (torch.tensor(found) - expected).abs()
        print(f"{name}, {layers}: logprobs {difference.max():.1e} (median {difference.median():.1e}) from PEFT")
        assert difference.median() < sums * kind.median
    print(f"  gradient norms {result['grad_norms']} and {norms}")
    assert result["losses"] == pytest.approx(losses, rel=kind.relative)
    assert result["grad_norms"] == pytest.approx(norms, rel=2 * kind.relative * of_gradients)
