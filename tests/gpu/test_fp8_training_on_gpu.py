"""Training in fp8 by blocks on a Hopper GPU: products by the formula, updates beside those in bfloat16, resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu.devices import skip_without_gpus
from gpu.test_resume_on_gpu import check_resume
from hugging_face import load_model, make_model
from parallel.fp8_ranks import compare_with_bfloat16, multiply_in_fp8
from parallel.parity import case
from parallel.parity_ranks import run_cases
from parallel.ranks import run_ranks
from rlhf_megatron.topology.layout import Layout

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)

VOCABULARY, STEPS = 250, 3
FP8 = {"fp8": "blockwise"}
BFLOAT16 = "bfloat16"
# The last blocks of the second are smaller; so are those of published models cut over several GPUs.
WIDTHS = {"whole blocks": 512, "parts of blocks": 336}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    BFLOAT16: ({}, {}),
    "fp8": (FP8, {}),
    "recomputed": (FP8 | {"recompute": {"granularity": "full"}}, {}),
    "two layers recomputed": (FP8 | {"recompute": {"granularity": "full", "layers": 2}}, {}),
    "streamed": (FP8 | {"offload": {"parameters": True, "gradients": True, "streamed_optimizer": 0.5}}, {}),
    "shared prompts": (FP8, {"shares_prompts": True}),
    "by way of a checkpoint": (FP8, {"then": {}}),
}
TWO_GPUS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "TP2": ({"tensor": 2}, FP8),
    "TP2, sequence parallel": ({"tensor": 2}, FP8 | {"sequence_parallel": True}),
    "CP2": ({"context": 2}, FP8),
    "PP2": ({"pipeline": 2}, FP8),
    "DP2": ({"data": 2}, FP8 | {"recompute": {"granularity": "full"}}),
}


def long_rows() -> list[list[list[int]]]:
    """Return prompts and responses of which several fill a micro-batch of 512 tokens."""
    generator = torch.Generator().manual_seed(0)

    def tokens(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (1,), generator=generator))
        values: list[int] = torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()
        return values

    prompts, responses = [tokens(5, 30) for _ in range(8)], [tokens(20, 90) for _ in range(16)]
    return [[prompt for prompt in prompts for _ in range(2)], responses]


def aligned_model(folder: Path, columns: int = 512) -> Path:
    """Return a model of a usual width whose layers' weights are as large as those of new models, about 0.02."""
    make_model(folder, vocabulary=VOCABULARY, tied=False, hidden_size=256, intermediate_size=columns, head_dim=64)
    model = load_model(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.mul_(0.25)
    model.save_pretrained(folder)
    return folder


def told(folder: Path, layout: dict[str, int], section: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    """Return what a launch is told of a case."""
    return case(folder, layout, long_rows(), 512, section, STEPS, dtype=BFLOAT16, **arguments)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    cases = {}
    for widths, columns in WIDTHS.items():
        folder = aligned_model(tmp_path_factory.mktemp("fp8") / "model", columns)
        for name, (section, more) in CASES.items():
            cases[f"{widths}, {name}"] = told(folder, {}, section, **more)
    [found] = run_ranks(run_cases, 1, {"cases": cases, "go_on": True}, timeout=600)
    return dict(found)


@pytest.mark.parametrize("columns", [*WIDTHS.values(), 2**17], ids=[*WIDTHS, "so many that DeepGEMM multiplies"])
def test_a_layer_multiplies_what_blocks_leave(columns: int, tmp_path: Path) -> None:
    folder = aligned_model(tmp_path / "model", columns)
    [found] = run_ranks(multiply_in_fp8, 1, {"model": str(folder), "tokens": 256})
    print(found["kernels"])
    assert len(found["kernels"]) == (2 if columns == 2**17 else 0), "for the output and the gradient of the input"
    for name, (from_formula, from_float32, largest) in found["apart"].items():
        print(f"{name}: {from_formula:.2e} from the formula, {from_float32:.2e} from float32, up to {largest:.2e}")
        # bfloat16 keeps 8 bits; a number half-way between two of e4m3 may fall to the other side.
        assert from_formula < 0.01 * largest
        assert from_float32 > 2 * from_formula


def far(one: dict[str, Any], other: dict[str, Any]) -> torch.Tensor:
    """Return differences of logprobs."""
    assert "failed" not in one, one["failed"]
    assert "failed" not in other, other["failed"]
    return (torch.tensor(one["logprobs"]) - torch.tensor(other["logprobs"])).abs()


@pytest.mark.parametrize("widths", WIDTHS)
def test_fp8_is_near_bfloat16(widths: str, results: dict[str, dict[str, Any]]) -> None:
    usual, found = results[f"{widths}, {BFLOAT16}"], results[f"{widths}, fp8"]
    difference = far(found, usual)
    print(f"logprobs {difference.max():.3f} (median {difference.median():.3f}), losses {found['losses']}")
    # The formula in float32 on this model: up to 0.26, median 0.055, where bfloat16 has 0.057 and 0.011.
    assert 0.02 < difference.median() < 0.1
    assert difference.max() < 0.6
    assert found["losses"] == pytest.approx(usual["losses"], rel=0.02)
    assert found["grad_norms"] == pytest.approx(usual["grad_norms"], rel=0.05)
    for run in (usual, found):
        assert run["losses"][0] > run["losses"][1] > run["losses"][2]


@pytest.mark.parametrize("name", [name for name in CASES if name not in (BFLOAT16, "fp8")])
def test_ways_of_learning_agree(name: str, results: dict[str, dict[str, Any]]) -> None:
    for widths in WIDTHS:
        found, whole = results[f"{widths}, {name}"], results[f"{widths}, fp8"]
        difference = far(found, whole)
        print(f"{widths}: {difference.max():.2e}, {found['losses']}, {whole['losses']}")
        assert difference.median() < (0.1 if name == "shared prompts" else 1e-6)
        assert found["losses"] == pytest.approx(whole["losses"], rel=0.01)
        assert found["grad_norms"] == pytest.approx(whole["grad_norms"], rel=0.03)


@pytest.mark.parametrize("name", TWO_GPUS)
def test_two_gpus(name: str, tmp_path: Path) -> None:
    skip_without_gpus(2)
    layout, section = TWO_GPUS[name]
    folder = aligned_model(tmp_path / "model")
    alone = told(folder, {}, FP8)
    [[found, *_], [whole]] = (
        run_ranks(run_cases, Layout(**of_case["arguments"]["layout"]).size, {"cases": {"it": of_case}})
        for of_case in (told(folder, layout, section), alone)
    )
    difference = far(found["it"], whole["it"])
    print(f"{difference.max():.3f} (median {difference.median():.3f}), {found['it']['losses']}")
    assert difference.median() < 0.1 and difference.max() < 0.6
    assert found["it"]["losses"] == pytest.approx(whole["it"]["losses"], rel=0.02)


def test_gradients_point_where_those_of_bfloat16_do(tmp_path: Path) -> None:
    folder = aligned_model(tmp_path / "model")
    [found] = run_ranks(
        compare_with_bfloat16, 1, {"model": str(folder), "rows": long_rows(), "section": {"tokens_per_gpu": 512}}
    )
    print(f"cosine {found['cosine']:.4f}, the least {min(found['cosines'].values()):.4f}")
    # The formula in float32: 0.995, and 0.988 of the matrix where it is least.
    assert 0.99 < found["cosine"] < 0.9999
    assert min(found["cosines"].values()) > 0.97
    assert found["dtypes"] == ["torch.bfloat16"]
    before, *within, after = found["copies"]
    assert (before, set(within), after) == (0, {4 * 4}, 0)  # of four layers' four matrices


def test_a_run_in_fp8_that_goes_on_has_the_same_bits(tmp_path: Path) -> None:
    copied = {"rollout.share_weights": "never", "regather.verify": "1"}  # checksums of trainer and rollout
    check_resume(tmp_path, "actor.fp8=blockwise", *(f"{key}={value}" for key, value in copied.items()))
