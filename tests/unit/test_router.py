"""Routers against transformers', and correction biases, which stay as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

from hugging_face import make_model
from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.architecture import read_architecture
from rlhf_megatron.models.config_fields import LAYERS_LEFT_OUT
from rlhf_megatron.models.description import Routing
from rlhf_megatron.models.hf_export import Companions, write_checkpoint
from rlhf_megatron.models.hf_files import CheckpointFiles
from rlhf_megatron.models.router import chosen_experts, expert_scores


@pytest.mark.parametrize("groups, kept", [(1, 1), (4, 2), (4, 3), (8, 1)])
def test_experts_are_chosen_by_sigmoids_and_biases_within_the_best_groups(groups: int, kept: int) -> None:
    torch.manual_seed(1)
    config = Glm4MoeConfig(n_routed_experts=16, hidden_size=12, num_experts_per_tok=2, n_group=groups, topk_group=kept)
    router, hidden = Glm4MoeTopkRouter(config), torch.randn(200, 12)
    torch.nn.init.normal_(router.weight)
    torch.nn.init.normal_(router.e_score_correction_bias)
    logits, _, theirs = router(hidden)
    routing = Routing("sigmoid", True, groups, kept, counted_of_group=2)
    ours = chosen_experts(expert_scores(logits, routing), router.e_score_correction_bias, routing, 2)
    assert torch.equal(ours.sort().values, theirs.sort().values)
    uncorrected = chosen_experts(expert_scores(logits, routing), None, routing, 2)
    assert not torch.equal(uncorrected.sort().values, theirs.sort().values)


def test_layers_for_multi_token_prediction_are_left_out(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "glm4_moe", num_hidden_layers=2)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.layers.2.eh_proj.weight": torch.ones(4)}, folder / "model.safetensors")
    architecture = read_architecture(folder)
    assert architecture.prediction_layers == 1 and "num_nextn_predict_layers=1" in architecture.notes(predicts=False)[0]
    with CheckpointFiles(folder, architecture):
        pass
    write_checkpoint(tmp_path / "exported", Companions(folder), tensors.items(), torch.float32)
    written = json.loads((tmp_path / "exported/config.json").read_text())
    assert {written.get(field, 0) for field in LAYERS_LEFT_OUT} == {0}
    assert architecture.notes(predicts=True) == () == read_architecture(tmp_path / "exported").notes(predicts=False)
    save_file(tensors | {"model.layers.3.eh_proj.weight": torch.ones(4)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.layers\.3\.eh_proj\.weight is no tensor of the model"):
        CheckpointFiles(folder, architecture)
