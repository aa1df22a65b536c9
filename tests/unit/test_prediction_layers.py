"""Layers for multi-token prediction: which models have one that drafts, and what plans know of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from hugging_face import make_model
from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.architecture import prediction_layer, read_architecture
from rlhf_megatron.models.weight_map import tensor_shapes
from rlhf_megatron.planning.dry_run import dry_run
from rlhf_megatron.planning.parameters import model_parameters
from rlhf_megatron.recipe import load_recipe
from small_predictions import make_predicting_model

RECIPES = Path(__file__).parents[2] / "recipes"
MTP = "rollout.speculative={method: mtp, optimizer: {learning_rate: 1e-5}}"


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "glm4_moe_lite"])
def test_a_layer_is_what_the_file_has_behind_the_model(family: str, tmp_path: Path) -> None:
    folder = make_predicting_model(tmp_path, family, layers=2, tied=False)
    layer = prediction_layer(read_architecture(folder), folder)
    stored = load_file(folder / "model.safetensors")
    behind = {name: tuple(tensor.shape) for name, tensor in stored.items() if name.startswith("model.layers.2.")}
    assert tensor_shapes(layer) == behind
    assert model_parameters(layer) == sum(stored[name].numel() for name in behind)


def test_what_has_no_layer_that_drafts_is_refused(tmp_path: Path) -> None:
    plain = make_model(tmp_path / "plain", "qwen3")
    with pytest.raises(ModelError, match="the model has no layer for multi-token prediction"):
        prediction_layer(read_architecture(plain), plain)
    ernie = make_model(tmp_path / "ernie", "ernie4_5_moe")
    config = json.loads((ernie / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (ernie / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="1 layers for multi-token prediction in ernie4_5_moe are not supported"):
        prediction_layer(read_architecture(ernie), ernie)


def test_plans_know_the_layer() -> None:
    plain, drafted = (dry_run(load_recipe(RECIPES / "deepseek_v3_grpo.yaml", list(keys)), 96) for keys in ((), (MTP,)))
    assert "layers for multi-token prediction (num_nextn_predict_layers=1) are left out" in plain
    assert "are left out" not in drafted
    assert re.search(r"\n  draft: tensor \d+ x data \d+ on the actor's last stage", drafted)
    assert re.search(r"\n  draft: [\d,]+ parameters; weights [\d.]+", drafted)
    weights = [float(re.search(r"rollout: weights ([\d.]+)", text)[1]) for text in (plain, drafted)]  # type: ignore[index]
    assert weights[1] > weights[0]
