"""Critics and reward models on GPUs against transformers in float32, also with sequence parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hugging_face import load_classifier, make_model, optimise, random_rows, row_score, row_values
from parallel.ranks import run_ranks
from parallel.test_value_model import each, pair_loss
from parallel.value_ranks import learn_scalars
from rlhf_megatron.topology.layout import Layout
from tiny_tokenizer import write_bpe_tokenizer

STEPS = 2
OPTIMIZER = {"learning_rate": 1e-4, "clip_grad": 1.0, "weight_decay": 0.0, "epsilon": 1e-6}
MARGINS = [0.0, 0.5, 0.0, 1.25]


def check(folder: Path, layouts: dict[str, dict[str, int]], implementation: str, dtype: str, tolerance: float) -> None:
    ranks = Layout(**layouts[next(iter(layouts))]).size
    model = make_model(folder / "model", "qwen3", vocabulary=400, classifier=True)
    tokenizer = str(write_bpe_tokenizer(folder / "tokenizer"))
    template = folder / "template.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }} {% endfor %}")
    rows = list(random_rows(8, 400))
    returns = torch.randn(sum(map(len, rows[1])), generator=torch.Generator().manual_seed(3)).tolist()
    section = {
        "tokens_per_gpu": 100,
        "transformer_implementation": implementation,
        "sequence_parallel": implementation == "transformer_engine",
    }
    results: list[dict[str, Any]] = run_ranks(
        learn_scalars,
        ranks,
        {
            "models": dict.fromkeys(layouts, str(model)),
            "layouts": layouts,
            "section": section,
            "optimizer": OPTIMIZER,
            "steps": STEPS,
            "rows": rows,
            "returns": returns,
            "pairs": rows,
            "margins": MARGINS,
            "folder": str(folder),
            "actor": str(make_model(folder / "actor", "qwen3", vocabulary=400)),
            "rollouts": {
                "conversations": [[{"role": "user", "content": "What is two plus three?"}]],
                "answers": ["five"],
                "policy_tokenizer": tokenizer,
                "chat_template": str(template),
                "judge_tokenizer": tokenizer,
            },
            "dtype": dtype,
        },
    )
    for name in layouts:
        result = results[0][name]
        critic, judge = load_classifier(model), load_classifier(model)
        with torch.no_grad():
            values, scores = each(row_values, critic, rows), each(row_score, critic, rows)
        assert (torch.tensor(result["values"]) - values).abs().max() < tolerance
        assert (torch.tensor(result["scores"]) - scores).abs().max() < tolerance
        expected = {
            "value_updates": optimise(
                critic,
                lambda model=critic: (each(row_values, model, rows) - torch.tensor(returns)).square().mean(),
                STEPS, 1e-4, 1.0, 1e-6,
            ),
            "score_updates": optimise(
                judge, lambda model=judge: pair_loss(each(row_score, model, rows), MARGINS), STEPS, 1e-4, 1.0, 1e-6
            ),
        }  # fmt: skip
        compared = STEPS if dtype == "float32" else 1  # weights in bfloat16 hardly see steps of 1e-4
        for key, (losses, norms) in expected.items():
            updates = result[key][:compared]
            assert [update["loss"] for update in updates] == pytest.approx(losses[:compared], rel=tolerance), name
            assert [update["grad_norm"] for update in updates] == pytest.approx(norms[:compared], rel=tolerance), name


@pytest.mark.parametrize(
    ("implementation", "dtype", "tolerance"),
    [("local", "float32", 1e-4), ("transformer_engine", "float32", 2e-2), ("transformer_engine", "bfloat16", 1e-1)],
)
def test_one_gpu(implementation: str, dtype: str, tolerance: float, tmp_path: Path) -> None:
    check(tmp_path, {"one": {}}, implementation, dtype, tolerance)


def test_two_ranks(tmp_path: Path) -> None:
    layouts = {"data": {"data": 2}, "pipeline": {"pipeline": 2}, "tensor": {"tensor": 2}}
    check(tmp_path, layouts, "transformer_engine", "float32", 2e-2)
