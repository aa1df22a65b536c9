"""Families whose weights in vLLM are in no table, and scaled rotary embeddings: two steps in which vLLM follows.

Planned, trained, exported, and planned again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from end_to_end.commands import python, torchrun
from end_to_end.runs import LENGTH_REWARD, TRAIN, make_model, make_sums, steps_of
from hugging_face import load_model
from hugging_face import make_model as make_family
from rlhf_megatron.rollout.vllm.process_environment import has_gpu

pytestmark = pytest.mark.skipif(has_gpu(), reason="the engine of this machine needs a GPU, which is hidden here")

RECIPE: dict[str, Any] = {
    "name": "grpo",
    "loop": "rl",
    "steps": 2,
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train_files": ["train.parquet"], "max_prompt_length": 64},
    "batch": {"prompts_per_step": 4, "responses_per_prompt": 4, "minibatch_prompts": 2},
    "actor": {
        "tokens_per_gpu": 256,
        "optimizer": {"learning_rate": 1e-3},
    },
    "rollout": {"layout": {"tensor": 2}, "max_response_length": 12},
    "evaluation": {"at_start": False, "at_end": False},
    "reward": {"function": "reward.py"},
    "monitor": {"plots": False},
}


DENSE = {"tensor": 2}
ATTENTION = ("self_attn.q_proj.weight", "mlp.up_proj.weight")
# Family: (the actor's layout, tensors of layer 2 that move, GPUs that a rank of vLLM hears from, whether vLLM's side is
# learned).
FAMILIES: dict[str, tuple[dict[str, int], tuple[str, ...], int, bool]] = {
    "qwen2_moe": (
        {"tensor": 2, "expert": 2, "expert_tensor": 1},
        ("mlp.shared_expert.up_proj.weight", "mlp.shared_expert_gate.weight", "mlp.experts.down_proj"),
        1,
        True,
    ),
    "smollm3": (DENSE, ATTENTION, 0, True),
    "qwen2_yarn": (DENSE, ATTENTION, 0, False),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_follows_the_trainer(tmp_path: Path, family: str) -> None:
    layout, moving, others, is_learned = FAMILIES[family]
    (tmp_path / "reward.py").write_text(LENGTH_REWARD)
    recipe = RECIPE | {"actor": RECIPE["actor"] | {"layout": layout}}
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(recipe))
    make_model(tmp_path, layers=1)  # for its tokenizer
    vocabulary = len(load_model(tmp_path / "model").get_input_embeddings().weight)
    # vLLM's attention on CPUs has heads of 32 numbers and more.
    make_family(tmp_path / "model", family, tied=False, vocabulary=vocabulary, hidden_size=128, head_dim=32)
    make_sums(tmp_path, 16, "--seed=1")

    def planned() -> str:
        return python(TRAIN, "grpo.yaml", "--dry-run", "--world=2", folder=tmp_path).check().out

    assert ("not known yet: the first run under runs learns it from vLLM" in planned()) == is_learned
    with torchrun(2, TRAIN, "grpo.yaml", folder=tmp_path) as command:
        command.finish().check()
    steps = steps_of(tmp_path / "runs" / "grpo")
    for step in (1, 2):
        assert steps[step]["train/rollout_logprob_abs_diff_max"] < 1e-4, "vLLM and the trainer are one model in float32"
        assert steps[step]["train/grad_norm"] > 0 and steps[step]["train/skipped"] == 0
    assert f"of rollout weights per GPU come from {others} other GPUs" in planned()
    before, after = load_model(tmp_path / "model"), load_model(tmp_path / "runs" / "grpo" / "export" / "step-2")
    moved = after.state_dict()
    assert all(moved[name].shape == tensor.shape for name, tensor in before.state_dict().items())
    for name in moving:
        name = f"model.layers.2.{name}"
        assert not torch.equal(moved[name], before.state_dict()[name]), name
