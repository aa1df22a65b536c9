"""Roles on GPUs against transformers in float32: Transformer Engine's layers and Megatron's own, in several layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hugging_face import load_model, make_model, random_rows, row_logprobs, train
from parallel.layout_ranks import KINDS, learn_with_memory_away
from parallel.parity_ranks import learn
from parallel.ranks import run_ranks
from rlhf_megatron.topology.layout import Layout

VOCABULARY, STEPS = 250, 2
OPTIMIZER = {"learning_rate": 1e-3, "clip_grad": 1.0, "weight_decay": 0.0, "epsilon": 1e-6}
# (largest, median) difference of a token's logprob from transformers in float32. Transformer Engine multiplies float32
# matrices in TF32, which has 10 bits of mantissa; bfloat16 has 7.
BOUNDS = {
    ("local", "float32"): (1e-5, 1e-6),
    ("transformer_engine", "float32"): (5e-3, 1e-3),
    ("local", "bfloat16"): (6e-2, 1e-2),
    ("transformer_engine", "bfloat16"): (6e-2, 1e-2),
}


# With experts, near ties of the router fall otherwise in bfloat16, and the few tokens concerned are far off.
LARGEST_WITH_EXPERTS = 1.0


def check(
    folder: Path,
    layout: dict[str, int],
    implementation: str,
    dtype: str,
    bounds: tuple[float, float] | None = None,
    **section: Any,
) -> None:
    ranks = Layout(**layout).size
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs, there are {torch.cuda.device_count()}")
    prompts, responses = random_rows(24, VOCABULARY)
    results: list[dict[str, Any]] = run_ranks(
        learn,
        ranks,
        {
            "model": str(folder),
            "layout": layout,
            "rows": [prompts, responses],
            "section": {"tokens_per_gpu": 100, "transformer_implementation": implementation} | section,
            "optimizer": OPTIMIZER,
            "steps": STEPS,
            "dtype": dtype,
        },
    )
    model = load_model(folder)
    with torch.no_grad():
        expected = torch.cat([row_logprobs(model, p, r) for p, r in zip(prompts, responses, strict=True)])
    difference = (torch.tensor(results[0]["logprobs"]) - expected).abs()
    largest, median = bounds or BOUNDS[implementation, dtype]
    print(f"{implementation} {dtype} {layout}: largest {difference.max():.2e}, median {difference.median():.2e}")
    assert difference.max() < largest
    assert difference.median() < median
    losses, norms = train(model, prompts, responses, STEPS, 1e-3, 1.0, 1e-6)
    relative = 1e-5 if (implementation, dtype) == ("local", "float32") else 1e-2
    assert results[0]["losses"] == pytest.approx(losses, rel=relative)
    assert results[0]["grad_norms"] == pytest.approx(norms, rel=relative)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
def test_one_gpu(family: str, implementation: str, dtype: str, tmp_path: Path) -> None:
    check(make_model(tmp_path, family, tied=family != "qwen2", vocabulary=VOCABULARY), {}, implementation, dtype)


@pytest.mark.parametrize("exchange", ["p2p", "all_gather", "a2a"])
@pytest.mark.parametrize(("implementation", "dtype"), [("local", "float32"), ("transformer_engine", "bfloat16")])
def test_context_parallelism(implementation: str, dtype: str, exchange: str, tmp_path: Path) -> None:
    """Transformer Engine cuts the sequence in bfloat16 alone: its attention in float32 has no context parallelism."""
    folder = make_model(tmp_path, "qwen3", vocabulary=VOCABULARY)
    check(folder, {"context": 2}, implementation, dtype, cp_comm_type=exchange)


@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
def test_virtual_stages_on_two_gpus(implementation: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path, "qwen2", vocabulary=VOCABULARY)
    check(folder, {"pipeline": 2, "virtual_pipeline": 2}, implementation, "float32")


@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
def test_sequence_parallelism(implementation: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path, "qwen3", vocabulary=VOCABULARY)
    check(folder, {"tensor": 2}, implementation, "float32", sequence_parallel=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_leaves_the_gpu_and_nothing_changes(dtype: str, tmp_path: Path) -> None:
    arguments = {
        "model": str(make_model(tmp_path, "qwen3", vocabulary=VOCABULARY)),
        "rows": list(random_rows(6, VOCABULARY)),
        "section": {"tokens_per_gpu": 100, "transformer_implementation": "local"},
        "cases": {"learns": (dtype, OPTIMIZER), "frozen": (dtype, None)},
    }
    [by_case] = run_ranks(learn_with_memory_away, 1, arguments)
    for result in by_case.values():
        assert result["same_results"] and result["equal"] == result["all"]
        assert all(after == dict.fromkeys(KINDS, 0) for after in result["after"])
        assert result["gpu_freed"] >= result["before"]["parameters"] + result["before"]["gradients"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", [{"tensor": 2}, {"pipeline": 2}, {"data": 2}], ids=["TP2", "PP2", "DP2"])
def test_two_gpus(layout: dict[str, int], dtype: str, tmp_path: Path) -> None:
    check(make_model(tmp_path, "qwen3", vocabulary=VOCABULARY), layout, "transformer_engine", dtype)


def test_experts_in_megatrons_own_layers(tmp_path: Path) -> None:
    check(make_model(tmp_path, "qwen3_moe", vocabulary=VOCABULARY), {}, "local", "float32")


@pytest.mark.parametrize(
    "layout",
    [{}, {"data": 2, "expert": 2}, {"tensor": 2}, {"tensor": 2, "expert": 2, "expert_tensor": 1}],
    ids=["one GPU", "EP2", "TP2", "TP2 and EP2 of the same ranks"],
)
def test_grouped_experts(layout: dict[str, int], tmp_path: Path) -> None:
    bounds = (LARGEST_WITH_EXPERTS, BOUNDS["transformer_engine", "bfloat16"][1])
    folder = make_model(tmp_path, "qwen3_moe", vocabulary=VOCABULARY)
    check(folder, layout, "transformer_engine", "bfloat16", bounds)


def test_more_ranks_than_key_value_heads(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "qwen3", vocabulary=VOCABULARY, num_key_value_heads=1)
    check(folder, {"tensor": 2}, "transformer_engine", "bfloat16")
