"""Layers for multi-token prediction learn beside an actor as by transformers and torch.optim.AdamW, in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hugging_face import random_rows, stored_tensors
from parallel.parity import CLIP, OPTIMIZER, VOCABULARY
from parallel.prediction_ranks import predict
from parallel.ranks import run_ranks
from rlhf_megatron.topology.layout import Layout
from small_predictions import PredictionReference, make_predicting_model

FAMILIES = ["glm4_moe", "deepseek_v3"]
STEPS = 2
STREAMED = {"offload": {"streamed_optimizer": 1.0, "gradients": True}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "TP2": {"tensor": 2},
    "DP2 EP2": {"data": 2, "expert": 2},
    "CP2": {"context": 2},
    "DP2, streamed": {"data": 2},
    "PP2": {"pipeline": 2},
    "PP2 VP2, DP2": {"pipeline": 2, "virtual_pipeline": 2, "data": 2},
}


def learn_by_torch(reference: PredictionReference, rows: list[Any]) -> tuple[list[float], list[float]]:
    """Train the layer for all steps; return the loss and the norm of the gradient of each."""
    learned, losses, norms = reference.learned(), [], []
    optimizer = torch.optim.AdamW(
        learned, lr=OPTIMIZER["learning_rate"], eps=OPTIMIZER["epsilon"], betas=(0.9, 0.999), weight_decay=0.0
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = -torch.cat([reference.row_logprobs(p, r) for p, r in zip(*rows, strict=True)]).mean()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(learned, CLIP)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


# Sampled in ``make test``; the others are the grid's.
SAMPLED = {
    ("one rank", "deepseek_v3"),
    ("TP2", "glm4_moe"),
    ("DP2 EP2", "glm4_moe"),
    ("CP2", "deepseek_v3"),
    ("DP2, streamed", "glm4_moe"),
    ("PP2 VP2, DP2", "deepseek_v3"),
}


@pytest.mark.parametrize(
    ("name", "family"),
    [
        pytest.param(name, family, marks=() if (name, family) in SAMPLED else pytest.mark.grid)
        for name in LAYOUTS
        for family in FAMILIES
    ],
)
def test_steps_are_those_of_torch(name: str, family: str, tmp_path: Path) -> None:
    layout, rows = LAYOUTS[name], list(random_rows(7, VOCABULARY))
    model = make_predicting_model(tmp_path / "model", family, tied=False, vocabulary=VOCABULARY)
    given = {"model": str(model), "layout": layout, "rows": rows, "optimizer": OPTIMIZER, "steps": STEPS}
    given["section"] = STREAMED if "streamed" in name else {}
    by_rank = run_ranks(predict, Layout(**layout).size, given | {"exported": str(tmp_path / "exported")})
    assert all(metrics == by_rank[0] for metrics in by_rank)

    reference = PredictionReference(model)
    losses, norms = learn_by_torch(reference, rows)
    assert [metrics["draft_loss"] for metrics in by_rank[0]] == pytest.approx(losses, abs=1e-5)
    assert [metrics["draft_grad_norm"] for metrics in by_rank[0]] == pytest.approx(norms, rel=1e-5)
    assert all(metrics["draft_skipped"] == 0 for metrics in by_rank[0])
    written = stored_tensors(tmp_path / "exported")
    expected = reference.tensors(tmp_path / "learned")
    assert written.keys() == expected.keys()
    for tensor, value in written.items():
        torch.testing.assert_close(value, expected[tensor], atol=1e-5, rtol=0)
