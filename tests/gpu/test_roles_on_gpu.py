"""The grid of ``parallel/test_parity.py`` on GPUs: Transformer Engine's layers and Megatron's own in all its layouts.

Each case runs on as many ranks as its layout has; those of as many ranks share a launch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hugging_face import load_model, make_model, random_rows, row_logprobs, train
from parallel.layout_ranks import KINDS, learn_with_memory_away
from parallel.parity import CLIP, LEARNING_RATE, OPTIMIZER, STEPS, VOCABULARY, Case, case
from parallel.parity_ranks import run_cases
from parallel.ranks import run_ranks
from parallel.test_family_parity import CASES as OF_FAMILIES
from parallel.test_memory import check_cycles
from parallel.test_parity import TRANSFORMERS
from parallel.test_router_replay import routers_of
from rlhf_megatron.models.architecture import read_architecture
from rlhf_megatron.recipe.role_sections import transformer_engine_can
from rlhf_megatron.topology.layout import Layout

GRID = TRANSFORMERS | {name: case for name, case in OF_FAMILIES.items() if case.ranks == 1 or not case.grid}
GRID |= {
    "one rank, Llama": Case("llama", True, {}),
    "one rank, Qwen2": Case("qwen2", False, {}),
    "CP2, all-gather": Case("qwen3", True, {"context": 2}, {"cp_comm_type": "all_gather"}),
}
ROWS = 24


class Layers(NamedTuple):
    """Whose layers, in what type, and how far they may be from transformers in float32.

    Attributes:
        largest, median: differences of a token's logprob.
        relative: of losses and gradient norms.
        moved: median difference of a parameter after all steps. Each may differ by what AdamW can move it.
    """

    implementation: str
    dtype: str
    largest: float
    median: float
    relative: float
    moved: float


# Transformer Engine multiplies float32 matrices in TF32, which has 10 bits of mantissa, as float16 has; bfloat16 has 7.
LAYERS = {
    "Megatron float32": Layers("local", "float32", 1e-5, 1e-6, 1e-5, 1e-6),
    "Transformer Engine float32": Layers("transformer_engine", "float32", 5e-3, 1e-3, 2e-2, 5e-5),
    "Transformer Engine bfloat16": Layers("transformer_engine", "bfloat16", 6e-2, 1e-2, 2e-2, 3e-4),
    "Transformer Engine float16": Layers("transformer_engine", "float16", 1e-2, 2e-3, 1e-2, 1e-4),
}
ROUNDING = {"bfloat16": 2**-8, "float16": 2**-11}


def possible(layers: Layers, given: Case) -> bool:
    """Return True if a case can have such layers."""
    if layers.implementation == "local":
        return True
    float32 = layers.dtype == "float32"
    layouts = [Layout(**layout) for layout in (given.layout, given.then) if layout is not None]
    return all(transformer_engine_can(layout.context, float32) for layout in layouts)


def ranks_of(name: str) -> int:
    """Return how many ranks a case has."""
    return Layout(**GRID[name].layout).size


# Those of one launch stand together.
CASES = [
    (name, layers) for name in sorted(GRID, key=ranks_of) for layers in LAYERS if possible(LAYERS[layers], GRID[name])
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grid")


@pytest.fixture(scope="module")
def results(home: Path, request: pytest.FixtureRequest) -> Callable[[str, str], dict[str, Any]]:
    """Return results of rank 0 in a case, or its failure; selected cases of as many ranks run with the first of
    them."""
    items = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    selected = {(of_item.get("name"), of_item.get("layers")) for of_item in items}

    @functools.cache
    def launched(ranks: int) -> dict[str, dict[str, Any]]:
        rows = list(random_rows(ROWS, VOCABULARY))
        cases = {}
        for name, layers in CASES:
            given, kind = GRID[name], LAYERS[layers]
            if ranks_of(name) == ranks and (name, layers) in selected:
                folder = home / name
                if not folder.exists():
                    make_model(
                        folder, given.family, tied=given.tied, vocabulary=VOCABULARY, num_hidden_layers=given.layers
                    )
                cases[f"{name}|{layers}"] = case(
                    folder,
                    given.layout,
                    rows,
                    100,
                    {"transformer_implementation": kind.implementation} | (given.section or {}),
                    dtype=kind.dtype,
                    then=given.then,
                    exported=str(home / f"{name}, {layers}"),
                    choices=chosen_experts(folder),
                )
        # Channels and buffers for speed would fill the memory: each case has communicators of its own.
        few = {"NCCL_MAX_NCHANNELS": "2", "NCCL_BUFFSIZE": str(2**20)}
        [first, *_] = run_ranks(run_cases, ranks, {"cases": cases, "go_on": True}, timeout=500, environment=few)
        return first

    return lambda name, layers: launched(ranks_of(name))[f"{name}|{layers}"]


@functools.cache
def reference(folder: Path) -> Any:
    """Return (logprobs, losses, gradient norms, the parameters after all steps) of transformers in float32."""
    prompts, responses = random_rows(ROWS, VOCABULARY)
    model = load_model(folder)
    with torch.no_grad():
        logprobs = torch.cat([row_logprobs(model, p, r) for p, r in zip(prompts, responses, strict=True)])
    losses, norms = train(model, prompts, responses, STEPS, LEARNING_RATE, CLIP, OPTIMIZER["epsilon"])
    return logprobs, losses, norms, model.state_dict()


@functools.cache
def chosen_experts(folder: Path) -> list[Any] | None:
    """Return the experts that transformers' routers take, row by row [tokens, layers, chosen]; None without experts.

    Rounding may have a router choose another one where two are close, and logprobs are then far off by right.
    """
    model, rows = load_model(folder), []
    routers = routers_of(model)
    if not routers:
        return None
    chosen: list[Tensor] = []
    for router in routers:
        # Which of its results they are differs by version.
        router.register_forward_hook(
            lambda _, __, output: chosen.extend(part for part in output if part.dtype == torch.int64)
        )
    for prompt, response in zip(*random_rows(ROWS, VOCABULARY), strict=True):
        chosen.clear()
        row_logprobs(model, prompt, response)
        rows.append(torch.stack(chosen, dim=1).tolist())
    return rows


@functools.cache
def own_rounding(folder: Path, dtype: str) -> tuple[float, float]:
    """Return the largest and the median difference of a token's logprob that transformers itself has in a type."""
    model = load_model(folder).to(getattr(torch, dtype))
    rows = zip(*random_rows(ROWS, VOCABULARY), strict=True)
    with torch.no_grad():
        rounded = torch.cat([row_logprobs(model, prompt, response) for prompt, response in rows])
    difference = (rounded.float() - reference(folder)[0]).abs()
    return float(difference.max()), float(difference.median())


def rounded_up(folder: Path) -> tuple[int, int]:
    """Return how many times as far as others a model's outputs and gradients may be from transformers: delta nets sum
    over tokens, and rounding with them; more so in their gradients."""
    return (5, 10) if read_architecture(folder).delta_net else (1, 1)


@pytest.mark.parametrize(("name", "layers"), CASES)
def test_outputs_and_steps_equal_transformers(
    name: str,
    layers: str,
    home: Path,
    results: Callable[[str, str], dict[str, Any]],
) -> None:
    kind = LAYERS[layers]
    result = results(name, layers)
    assert "failed" not in result, result["failed"]
    logprobs, losses, norms, parameters = reference(home / name)
    difference = (torch.tensor(result["logprobs"]) - logprobs).abs()
    exported = load_model(home / f"{name}, {layers}").state_dict()
    moved = torch.cat([(exported[key] - value).abs().flatten() for key, value in parameters.items()])
    print(
        f"{name}, {layers}: logprobs {difference.max():.1e} (median {difference.median():.1e}), "
        f"parameters {moved.max():.1e} (median {moved.median():.1e}) from transformers"
    )
    sums, of_gradients = rounded_up(home / name)
    largest, median = own_rounding(home / name, kind.dtype)
    assert difference.max() < sums * max(kind.largest, 2 * largest)
    assert difference.median() < sums * max(kind.median, 1.5 * median)
    assert result["losses"] == pytest.approx(losses, rel=kind.relative)
    assert result["grad_norms"] == pytest.approx(norms, rel=kind.relative * of_gradients)
    assert moved.median() < kind.moved
    # AdamW moves no element further than its rate, so two runs part by twice that; and the result is rounded.
    rounding = ROUNDING.get(kind.dtype, 0.0) * max(float(value.abs().max()) for value in parameters.values())
    assert moved.max() < (3e-5 if kind.implementation == "local" else 2.1 * STEPS * LEARNING_RATE + rounding)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_leaves_the_gpu_and_nothing_changes(dtype: str, tmp_path: Path) -> None:
    arguments = {
        "model": str(make_model(tmp_path, "qwen3", vocabulary=VOCABULARY)),
        "rows": list(random_rows(6, VOCABULARY)),
        "section": {"tokens_per_gpu": 100, "transformer_implementation": "local"},
        "cases": {
            "learns": (dtype, OPTIMIZER, 0.0),
            "half of the optimizer streamed": (dtype, OPTIMIZER, 0.5),
            "optimizer streamed": (dtype, OPTIMIZER, 1.0),
            "remainders, half streamed": ("bfloat16", OPTIMIZER | {"master_remainders": True}, 0.5),
            "frozen": (dtype, None, 0.0),
        },
    }
    [by_case] = run_ranks(learn_with_memory_away, 1, arguments)
    for result in by_case.values():
        assert result["same_results"] and result["equal"] == result["all"]
        assert all(after == dict.fromkeys(KINDS, 0) for after in result["after"])
        assert result["gpu_freed"] >= result["before"]["parameters"] + result["before"]["gradients"]


def test_fifty_cycles_leak_nothing(tmp_path: Path) -> None:
    check_cycles(tmp_path, world=1, dtype="bfloat16")
