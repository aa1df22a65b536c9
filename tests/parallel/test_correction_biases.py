"""Correction biases of experts in bfloat16 runs: float32, bit for bit, in updates, checkpoints, exports and rollout."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from hugging_face import make_model, random_rows
from parallel.parity_ranks import run_cases
from parallel.ranks import run_ranks
from rlhf_megatron.models.architecture import read_architecture
from rlhf_megatron.models.hf_files import CheckpointFiles
from rlhf_megatron.models.weight_map import stays_float32, tensor_shapes, whole_blocks
from rlhf_megatron.regather.by_type import RegatherByType
from rlhf_megatron.regather.plan import ShardSpec, plan_regather
from rlhf_megatron.regather.shard_specs import trainer_shards
from rlhf_megatron.topology.layout import Layout
from shards import filled


def to_whole_models(folder: str) -> dict[str, int]:
    """Regather from two pipeline stages to all of the model on each of two ranks: tensors that arrived right, by
    type."""
    a, rank = read_architecture(folder), dist.get_rank()
    with CheckpointFiles(folder, a) as files:
        tensors = {name: files.read(name, ()) for name in tensor_shapes(a)}
    typed = {name: value if stays_float32(name) else value.bfloat16() for name, value in tensors.items()}
    sources, wanted = (
        trainer_shards(a, Layout(pipeline=2), range(2)),
        ShardSpec.of(dict.fromkeys(range(2), whole_blocks(a))),
    )
    held = {
        name: value if stays_float32(name) else value.bfloat16()
        for name, value in filled(sources.blocks(rank), tensors).items()
    }
    targets = {name: torch.full_like(value, torch.nan) for name, value in typed.items()}
    regather = RegatherByType(plan_regather(sources, wanted, rank), tensors, torch.bfloat16, "cpu")
    regather.run(held, targets)
    regather.verify(held, targets)
    right = [name for name, value in typed.items() if torch.equal(value, targets[name])]
    exact = sum(map(stays_float32, right))
    return {"exact": exact, "others": len(right) - exact, "all": len(tensors)}


def test_biases_arrive_as_they_are(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "glm4_moe")
    for result in run_ranks(to_whole_models, 2, {"folder": str(folder)}):
        assert result["exact"] == 3 and result["others"] + 3 == result["all"]


def test_biases_are_neither_rounded_nor_trained(tmp_path: Path) -> None:
    folder, exported = make_model(tmp_path / "model", "glm4_moe"), tmp_path / "exported"
    arguments = {
        "model": str(folder), "layout": {"pipeline": 2}, "then": {"data": 2, "expert": 2}, "dtype": "bfloat16",
        "rows": list(random_rows(7, 250)), "section": {"tokens_per_gpu": 60}, "optimizer": {"learning_rate": 1e-3},
        "steps": 2, "exported": str(exported),
    }  # fmt: skip
    run_ranks(run_cases, 2, {"cases": {"bfloat16": {"function": "learn", "arguments": arguments}}})
    before, after = load_file(folder / "model.safetensors"), load_file(exported / "model.safetensors")
    biases = [name for name in before if stays_float32(name)]
    assert len(biases) == 3
    for name in biases:
        assert torch.equal(before[name], after[name]) and after[name].dtype == torch.float32
        assert not torch.equal(before[name].bfloat16().float(), before[name])
    assert not torch.equal(before["model.norm.weight"], after["model.norm.weight"])
