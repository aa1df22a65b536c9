"""Megatron roles in several layouts against transformers and torch.optim.AdamW in one process, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hugging_face import load_model, make_model, random_rows, row_logits, row_logprobs, train
from parallel.parity_ranks import learn, learn_past_a_nan
from parallel.ranks import run_ranks

LEARNING_RATE, CLIP, STEPS = 1e-3, 1.0, 2
VOCABULARY = 250
# AdamW divides by the square root of tiny second moments: an epsilon of 1e-8 would blow rounding in gradients of about
# that size up to whole learning rates, in any implementation. 1e-6 leaves every other element as it is.
OPTIMIZER = {"learning_rate": LEARNING_RATE, "clip_grad": CLIP, "weight_decay": 0.0, "epsilon": 1e-6}


def run(folder: Path, layout: list[int], rows: Any, *, tokens_per_gpu: int = 60, **arguments: Any) -> dict[str, Any]:
    results = run_ranks(
        learn,
        layout[0] * layout[1] * layout[2],
        {
            "model": str(folder),
            "layout": layout,
            "rows": rows,
            "section": {"tokens_per_gpu": tokens_per_gpu},
            "optimizer": OPTIMIZER,
            "steps": STEPS,
            **arguments,
        },
    )
    for name in ("logprobs", "entropy", "losses", "grad_norms"):  # every rank has the whole result
        assert all(result[name] == results[0][name] for result in results), name
    assert all(result["parallel_state_untouched"] for result in results)
    first: dict[str, Any] = results[0]
    return first


@pytest.mark.parametrize(
    ("family", "tied", "layout"),
    [
        ("qwen3", True, [1, 1, 1]),
        ("qwen3", True, [2, 1, 1]),
        ("qwen2", False, [1, 2, 1]),
        ("llama", True, [1, 2, 1]),
        ("qwen3", False, [1, 1, 2]),
        ("qwen2", True, [2, 2, 1]),
    ],
)
def test_outputs_and_steps_equal_transformers(family: str, tied: bool, layout: list[int], tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", family, tied=tied, vocabulary=VOCABULARY)
    prompts, responses = random_rows(7, VOCABULARY)
    result = run(folder, layout, [prompts, responses], exported=str(tmp_path / "exported"))

    model = load_model(folder)
    with torch.no_grad():
        expected = torch.cat([row_logprobs(model, p, r) for p, r in zip(prompts, responses, strict=True)])
        distributions = torch.cat(
            [
                row_logits(model, p, r)[len(p) - 1 : -1].log_softmax(-1)
                for p, r in zip(prompts, responses, strict=True)
            ]
        )
    entropy = -(distributions.exp() * distributions).sum(-1)
    assert (torch.tensor(result["logprobs"]) - expected).abs().max() < 1e-5
    assert (torch.tensor(result["entropy"]) - entropy).abs().max() < 1e-5

    losses, norms = train(model, prompts, responses, STEPS, LEARNING_RATE, CLIP, OPTIMIZER["epsilon"])
    assert result["losses"] == pytest.approx(losses, abs=1e-5)
    assert result["grad_norms"] == pytest.approx(norms, rel=1e-5)
    exported = load_model(tmp_path / "exported").state_dict()
    for name, parameter in model.state_dict().items():
        assert (exported[name] - parameter).abs().max() < 1e-5, name


def test_loss_and_gradients_do_not_depend_on_micro_batches_or_data_parallelism(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "qwen3", vocabulary=VOCABULARY)
    rows = list(random_rows(9, VOCABULARY))
    whole = run(folder, [1, 1, 1], rows, tokens_per_gpu=10_000)
    for layout, tokens in (([1, 1, 1], 25), ([1, 1, 2], 25), ([1, 1, 2], 10_000)):
        cut = run(folder, layout, rows, tokens_per_gpu=tokens)
        assert cut["losses"] == pytest.approx(whole["losses"], abs=2e-6)
        assert cut["grad_norms"] == pytest.approx(whole["grad_norms"], rel=2e-6)
    order = [4, 2, 8, 0, 6, 1, 3, 7, 5]
    shuffled = run(folder, [1, 1, 1], [[part[row] for row in order] for part in rows], tokens_per_gpu=25)
    assert shuffled["losses"] == pytest.approx(whole["losses"], abs=2e-6)


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "qwen3", vocabulary=VOCABULARY)
    rows = list(random_rows(9, VOCABULARY))
    full = run(folder, [1, 1, 1], rows)
    half = run(folder, [2, 1, 1], rows, dtype="bfloat16")
    difference = (torch.tensor(half["logprobs"]) - torch.tensor(full["logprobs"])).abs()
    assert difference.median() < 1e-2
    assert half["losses"] == pytest.approx(full["losses"], rel=5e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_that_is_not_finite_is_skipped_by_all_ranks(dtype: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "qwen3", vocabulary=VOCABULARY)
    arguments = {"model": str(folder), "rows": list(random_rows(8, VOCABULARY)), "dtype": dtype}
    for result in run_ranks(learn_past_a_nan, 2, arguments):
        assert result["poisoned"]["skipped"] == 1.0
        assert not result["poisoned_moved"]
        assert result["ordinary"]["skipped"] == 0.0
        assert result["ordinary_moved"] and result["ordinary_finite"]
