"""Roles on GPUs against transformers in float32: Transformer Engine's layers and Megatron's own, in several layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hugging_face import load_model, make_model, random_rows, row_logprobs, train
from parallel.parity_ranks import learn
from parallel.ranks import run_ranks

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


def check(folder: Path, layout: list[int], implementation: str, dtype: str) -> None:
    if torch.cuda.device_count() < layout[0] * layout[1] * layout[2]:
        pytest.skip(f"needs {layout[0] * layout[1] * layout[2]} GPUs, there are {torch.cuda.device_count()}")
    prompts, responses = random_rows(24, VOCABULARY)
    results: list[dict[str, Any]] = run_ranks(
        learn,
        layout[0] * layout[1] * layout[2],
        {
            "model": str(folder),
            "layout": layout,
            "rows": [prompts, responses],
            "section": {"tokens_per_gpu": 100, "transformer_implementation": implementation},
            "optimizer": OPTIMIZER,
            "steps": STEPS,
            "dtype": dtype,
        },
    )
    model = load_model(folder)
    with torch.no_grad():
        expected = torch.cat([row_logprobs(model, p, r) for p, r in zip(prompts, responses, strict=True)])
    difference = (torch.tensor(results[0]["logprobs"]) - expected).abs()
    largest, median = BOUNDS[implementation, dtype]
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
    check(make_model(tmp_path, family, tied=family != "qwen2", vocabulary=VOCABULARY), [1, 1, 1], implementation, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", [[2, 1, 1], [1, 2, 1], [1, 1, 2]], ids=["TP2", "PP2", "DP2"])
def test_two_gpus(layout: list[int], dtype: str, tmp_path: Path) -> None:
    check(make_model(tmp_path, "qwen3", vocabulary=VOCABULARY), layout, "transformer_engine", dtype)
