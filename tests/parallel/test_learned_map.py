"""The hand-written table of vLLM's weights is what vLLM's own loader does; a recorder sees what other loaders do."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hugging_face import CONFIGS, VARIANTS, make_model
from parallel import learn_maps
from parallel.learn_maps import learned_blocks
from rlhf_megatron.models.architecture import ModelError, read_architecture
from rlhf_megatron.models.families import FAMILIES
from rlhf_megatron.models.map_files import read_map
from rlhf_megatron.models.weight_map import rollout_blocks
from rlhf_megatron.planning.parameters import block_shapes, block_sizes
from rlhf_megatron.planning.rollout_parameters import replica_of, rollout_parameters, shareable_parameters
from rlhf_megatron.regather.plan import plan_regather
from rlhf_megatron.regather.shard_specs import rollout_shards, trainer_shards
from rlhf_megatron.regather.views import shareable
from rlhf_megatron.rollout.copy_trace import CopyRecorder
from rlhf_megatron.rollout.vllm.weight_loading import trace_model
from rlhf_megatron.topology.layout import Layout

NOT_IN_VLLM = {"dots1", "mistral4", "solar_open", "youtu"}
ALL = sorted(CONFIGS.keys() - VARIANTS - NOT_IN_VLLM)
TIED = ("cohere", "cohere2", "gemma", "gemma2", "qwen3")  # in vLLM Gemmas and Cohere's always
MIXTURES = (
    "deepseek_v2",
    "deepseek_v3",
    "ernie4_5_moe",
    "exaone_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "granitemoe",
    "hunyuan_v1_moe",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
)
# vLLM takes hidden_size / num_attention_heads for some, and latent attention has no such size.
WIDTH: dict[str, int] = {"head_dim": 32}
OTHERWISE = {
    "granitemoe": {"head_dim": 16},
    "granitemoehybrid": {"head_dim": 16},
    "olmoe": {"head_dim": 16},
    "qwen2": {"head_dim": 16},
    "qwen2_moe": {"head_dim": 16},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "glm4_moe_lite": {},
}
# Heads and columns enough for four ranks, which vLLM does not divide here without expert parallelism.
OTHERWISE["gpt_oss"] = WIDTH | {"num_key_value_heads": 4, "intermediate_size": 128}
TABLES = [family for family in ALL if FAMILIES[family].has_rollout_table]

WIDE = "qwen2_of_wide_heads"  # whose head_dim is not hidden_size / num_attention_heads


@pytest.fixture(scope="module")
def maps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the models and the maps of all families, learned in one process."""
    folder = tmp_path_factory.mktemp("maps")
    for family in ALL:
        make_model(folder / family, family, tied=family in TIED, **OTHERWISE.get(family, WIDTH))
    make_model(folder / WIDE, "qwen2")
    models = [str(folder / name) for name in (*ALL, WIDE)]
    command = [sys.executable, "-P", learn_maps.__file__, str(folder), *models]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize(
    ("family", "tensor", "expert_parallel"),
    [(family, *layout) for family in TABLES for layout in learn_maps.LAYOUTS if not layout[1] or family in MIXTURES],
)
def test_the_table_is_what_vllms_loader_does(maps: Path, family: str, tensor: int, expert_parallel: bool) -> None:
    architecture = read_architecture(maps / family)
    learned = read_map(learn_maps.map_file(maps, family, tensor, expert_parallel))
    assert len(learned) == tensor
    for rank, blocks in enumerate(learned):
        assert sorted(blocks) == sorted(rollout_blocks(architecture, tensor, rank, expert_parallel))


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("family", ALL)
def test_a_plan_knows_what_of_a_learned_map_is_shared(maps: Path, family: str, tensor: int) -> None:
    file = learn_maps.map_file(maps, family, tensor, expert_parallel=False)
    if not file.exists():
        pytest.skip(file.with_suffix(".refused").read_text())
    architecture, learned, layout = read_architecture(maps / family), read_map(file), Layout(tensor)
    replica = replica_of(architecture, tensor, learned=learned)
    assert replica is not None
    sources = trainer_shards(architecture, layout, range(tensor))
    wanted = rollout_shards(architecture, tensor, range(tensor), False, learned)
    counts = []
    for rank in range(tensor):
        own, others = (block_shapes(architecture, side.blocks(rank), tensor) for side in (sources, wanted))
        views = shareable(
            plan_regather(sources, wanted, rank),
            {name: torch.empty(shape, device="meta") for name, shape in own.items()},
        )
        counts.append(sum(view.numel() for name, view in views.items() if view.numel() == math.prod(others[name])))
    assert shareable_parameters(architecture, layout, 0, replica, in_buckets=False) == min(counts) > 0
    held = max(sum(block_sizes(architecture, blocks, tensor).values()) for blocks in learned)
    assert rollout_parameters(architecture, tensor, False, replica).total == held


@pytest.mark.parametrize("family", ALL)
def test_a_learned_map_is_what_vllm_loads_bit_for_bit(maps: Path, family: str) -> None:
    loaded = json.loads((maps / f"{family}.loaded").read_text())
    assert loaded["different"] == [] and len(loaded["compared"]) == (2 if family in MIXTURES else 1)


def test_biases_that_vllm_leaves_to_one_rank_are_refused(maps: Path) -> None:
    said = learn_maps.map_file(maps, "gpt_oss", 2, False).with_suffix(".refused").read_text()
    assert "routed_experts.w2_bias is computed (aten.zero_.default)" in said


def test_a_model_that_the_engine_would_read_in_part_is_refused(maps: Path) -> None:
    # vLLM's Qwen2 takes hidden_size / num_attention_heads for the size of a head, whatever config.json says.
    said = learn_maps.map_file(maps, WIDE, 1, False).with_suffix(".refused").read_text()
    assert "qwen2_of_wide_heads: vLLM's loader reads " in said and "self_attn.q_proj.weight" in said


class Model(nn.Module):
    """One parameter of 4 x 6, filled from a checkpoint's tensors by ``load``."""

    def __init__(self, load: Callable[[Tensor, dict[str, Tensor]], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 6))
        self._load = load

    def load_weights(self, tensors: object) -> None:
        self._load(self.weight.data, dict(tensors))  # type: ignore[call-overload]


SHAPES = {"a": (2, 6), "b": (2, 6), "wide": (6, 4)}


def halves(weight: Tensor, of: dict[str, Tensor]) -> None:
    weight[:2].copy_(of["a"])
    weight[2:].copy_(of["b"])


def stacked(weight: Tensor, of: dict[str, Tensor]) -> None:
    weight.copy_(torch.cat([of["a"].contiguous(), of["b"].clone()]))


def test_copies_are_read_off_their_strides_and_nothing_is_written() -> None:
    for load in (halves, stacked):
        model = Model(load)
        trace = trace_model(model, SHAPES, torch.float32)
        assert trace.problems == [] and not model.weight.any()
        with pytest.raises(ModelError, match=r"^here: vLLM's loader reads 0 of the 24 elements of wide$"):
            learned_blocks([trace], SHAPES, "here")
        of_two = {name: SHAPES[name] for name in ("a", "b")}
        blocks = learned_blocks([trace], of_two, "here")
        assert blocks[0] == [("a", ((0, 2), (0, 6)), "weight", (0, 0)), ("b", ((0, 2), (0, 6)), "weight", (2, 0))]


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (lambda weight, of: weight.copy_(torch.cat([of["a"], of["b"]]) + 1), r"weight is computed \(aten.add"),
        (lambda weight, of: weight[:2].copy_(of["a"]), r"weight has 24 elements, of which the loader writes 12"),
        (lambda weight, of: weight.copy_(torch.ones(4, 6)), "weight is written from no checkpoint tensor"),
        (lambda weight, of: weight.copy_(torch.cat([of["a"], of["b"]]).half()), r"tensors are cast \(torch.float32->"),
        (lambda weight, of: [of["a"].zero_(), halves(weight, of)], r"weight is computed \(aten.zero_"),
        (lambda weight, of: weight.copy_(of["wide"].t()), "wide reaches vLLM's weight turned or interleaved"),
        (lambda weight, of: [weight[:2].copy_(of["a"]), weight[1:3].copy_(of["b"])], "a part of weight twice"),
        (lambda weight, of: [halves(weight, of), weight.mul_(2)], r"written from no checkpoint tensor \(aten.mul_"),
    ],
)
def test_a_loader_that_does_not_only_copy_is_refused(
    load: Callable[[Tensor, dict[str, Tensor]], None], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        learned_blocks([trace_model(Model(load), SHAPES, torch.float32)], SHAPES, "here")


@pytest.mark.parametrize(
    "load",
    [
        lambda weight, of: weight.copy_(of["wide"].t()),
        lambda weight, of: weight.view(2, 2, 6).transpose(0, 1).copy_(torch.stack([of["a"], of["b"]])),
        lambda weight, of: weight.copy_(torch.cat([of["a"], of["b"]], dim=1).view(4, 6)),
        lambda weight, of: weight.flatten()[3:21].view(3, 6).copy_(torch.cat([of["b"], of["a"]])[1:]),
        lambda weight, of: weight[:, ::2].copy_(torch.cat([of["a"], of["b"]])[:, 1::2]),
    ],
)
def test_recorded_copies_carried_out_are_the_load_itself(load: Callable[[Tensor, dict[str, Tensor]], object]) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    loaded, ours = torch.zeros(4, 6), torch.zeros(4, 6)
    load(loaded, tensors)
    with CopyRecorder(tensors, {"weight": ours}) as recorder:
        load(ours, tensors)
    assert recorder.computed == recorder.constant == [] and not ours.any()
    for copy in recorder.copies:
        source = tensors[copy.tensor].as_strided(copy.sizes, copy.tensor_strides, copy.tensor_offset)
        ours.as_strided(copy.sizes, copy.parameter_strides, copy.parameter_offset).copy_(source)
    assert torch.equal(ours, loaded)


def test_a_damaged_map_is_told_in_one_line(tmp_path: Path) -> None:
    for text in ("[]", "{}", '{"format": 1, "ranks": [1]}', '{"format": 1, "ranks": [{"rest": [[1]], "layers": []}]}'):
        (tmp_path / "map.json").write_text(text)
        with pytest.raises(ModelError, match=r"map\.json: is no weight map; remove it and learn the map again$"):
            read_map(tmp_path / "map.json")
    (tmp_path / "map.json").write_text('{"format": 2}')
    with pytest.raises(ModelError, match="format 2; this version reads 1"):
        read_map(tmp_path / "map.json")
