"""Layers for multi-token prediction learn on GPUs as by torch in float32: by Megatron's and Transformer Engine's."""

from __future__ import annotations

from pathlib import Path

import pytest

from hugging_face import random_rows
from parallel.parity import OPTIMIZER, VOCABULARY
from parallel.prediction_ranks import predict
from parallel.ranks import run_ranks
from parallel.test_prediction_learning import LAYOUTS, STEPS, learn_by_torch
from rlhf_megatron.topology.layout import Layout
from small_predictions import PredictionReference, make_predicting_model

# Layers, their type, and how far losses and gradient norms may be from torch's: a share of them.
LAYERS = {
    "Megatron float32": ("local", "float32", 1e-4),
    "Transformer Engine bfloat16": ("transformer_engine", "bfloat16", 3e-2),
}


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize(
    ("name", "family"),
    [("one rank", "glm4_moe"), ("one rank", "deepseek_v3"), ("PP2", "glm4_moe"), ("TP2", "glm4_moe")],
)
def test_steps_are_those_of_torch(name: str, family: str, layers: str, tmp_path: Path) -> None:
    implementation, dtype, relative = LAYERS[layers]
    rows, layout = list(random_rows(7, VOCABULARY)), LAYOUTS[name]
    model = make_predicting_model(tmp_path / "model", family, tied=False, vocabulary=VOCABULARY)
    given = {
        "model": str(model),
        "layout": layout,
        "rows": rows,
        "optimizer": OPTIMIZER,
        "steps": STEPS,
        "exported": str(tmp_path / "exported"),
        "section": {"transformer_implementation": implementation},
        "dtype": dtype,
    }
    [metrics, *_] = run_ranks(predict, Layout(**layout).size, given)
    losses, norms = learn_by_torch(PredictionReference(model), rows)
    assert [each["draft_loss"] for each in metrics] == pytest.approx(losses, rel=relative)
    assert [each["draft_grad_norm"] for each in metrics] == pytest.approx(norms, rel=relative)
