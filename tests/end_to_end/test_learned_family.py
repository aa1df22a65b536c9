"""Families whose weights in vLLM are in no table, and scaled rotary embeddings: two steps in which vLLM follows.

Planned, trained, exported, and planned again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

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


ATTENTION = ("self_attn.q_proj.weight", "mlp.up_proj.weight")
# Of rows of 64 and 12 tokens: vLLM takes the long factors for the shortest of them too.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + pair / 10 for pair in range(16)],
    "long_factor": [2.0 + pair / 3 for pair in range(16)],
    "original_max_position_embeddings": 75,
}


class Case(NamedTuple):
    """A model, tensors of its layer 2 that move, GPUs that a rank of vLLM hears from, and how it knows its weights."""

    family: str
    moving: tuple[str, ...] = ATTENTION
    layout: Mapping[str, int] = MappingProxyType({"tensor": 2})
    others: int = 0
    is_learned: bool = False
    fields: Mapping[str, Any] = MappingProxyType({})
    algorithm: Mapping[str, Any] = MappingProxyType({})


CASES = {
    "a shared expert": Case(
        "qwen2_moe",
        ("mlp.shared_expert.up_proj.weight", "mlp.shared_expert_gate.weight", "mlp.experts.down_proj"),
        {"tensor": 2, "expert": 2, "expert_tensor": 1},
        others=1,
        is_learned=True,
        algorithm={"router_replay": "rollout"},
    ),
    "LongRoPE": Case("llama", fields={"rope_parameters": LONGROPE}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_vllm_follows_the_trainer(tmp_path: Path, case: Case) -> None:
    (tmp_path / "reward.py").write_text(LENGTH_REWARD)
    changes = {"actor": RECIPE["actor"] | {"layout": dict(case.layout)}, "algorithm": dict(case.algorithm)}
    recipe = RECIPE | changes
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(recipe))
    make_model(tmp_path, layers=1)  # for its tokenizer
    vocabulary = len(load_model(tmp_path / "model").get_input_embeddings().weight)
    # vLLM's attention on CPUs has heads of 32 numbers and more.
    sizes = {"hidden_size": 128, "head_dim": 32}
    make_family(tmp_path / "model", case.family, tied=False, vocabulary=vocabulary, **sizes, **case.fields)
    make_sums(tmp_path, 16, "--seed=1")

    def planned() -> str:
        return python(TRAIN, "grpo.yaml", "--dry-run", "--world=2", folder=tmp_path).check().out

    assert ("not known yet: the first run under runs learns it from vLLM" in planned()) == case.is_learned
    if case.is_learned:
        python("tools/learn_weight_map.py", "grpo.yaml", "run_root=before", folder=tmp_path).check()
    with torchrun(2, TRAIN, "grpo.yaml", folder=tmp_path) as command:
        command.finish().check()
    if case.is_learned:
        (learned,), (before,) = ((tmp_path / root / ".weight_maps").iterdir() for root in ("runs", "before"))
        assert learned.name == before.name and learned.read_bytes() == before.read_bytes()
    steps = steps_of(tmp_path / "runs" / "grpo")
    for step in (1, 2):
        assert steps[step]["train/rollout_logprob_abs_diff_max"] < 1e-4, "vLLM and the trainer are one model in float32"
        assert steps[step]["train/grad_norm"] > 0 and steps[step]["train/skipped"] == 0
    assert f"of rollout weights per GPU come from {case.others} other GPUs" in planned()
    start, after = load_model(tmp_path / "model"), load_model(tmp_path / "runs" / "grpo" / "export" / "step-2")
    moved = after.state_dict()
    assert all(moved[name].shape == tensor.shape for name, tensor in start.state_dict().items())
    for name in case.moving:
        name = f"model.layers.2.{name}"
        assert not torch.equal(moved[name], start.state_dict()[name]), name
