"""Adapters by Hugging Face's names: what is adapted, where it lies, what a recipe may ask, and PEFT's files."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode

from hugging_face import load_model, make_model
from rlhf_megatron.models.architecture import ModelError, read_architecture
from rlhf_megatron.models.flops import training_flops
from rlhf_megatron.models.lora import (
    Adaptation,
    adapter_blocks,
    adapter_layout,
    factor_shapes,
    whole_adapter_blocks,
)
from rlhf_megatron.models.new_adapters import NewAdapters
from rlhf_megatron.models.peft_files import PeftAdapter
from rlhf_megatron.planning.dry_run import dry_run
from rlhf_megatron.planning.memory import checkpoint_bytes, estimate
from rlhf_megatron.planning.model_folders import planned_architectures
from rlhf_megatron.planning.parameters import adapter_parameters
from rlhf_megatron.planning.stage_memory import GB
from rlhf_megatron.recipe import LoraSection, RecipeError, load_recipe
from rlhf_megatron.topology.layout import Layout

ROOT = Path(__file__).resolve().parents[2]
ALL = Adaptation.of(LoraSection(rank=3))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen2")


def adapted(model: Path, **config: Any) -> Any:
    return get_peft_model(load_model(model), LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **config))


@pytest.mark.parametrize("family", ["qwen2", "qwen3_5_text"])
def test_what_is_adapted_is_what_peft_adapts(family: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, family)
    architecture = read_architecture(model)
    expected = {
        name.removeprefix("base_model.model.").replace(".default", ""): tuple(parameter.shape)
        for name, parameter in adapted(model, r=3).named_parameters()
        if parameter.requires_grad
    }
    assert factor_shapes(architecture, ALL) == expected
    learns = sum(rows * columns for rows, columns in expected.values())
    assert adapter_parameters(architecture, LoraSection(rank=3)) == learns
    some = {name for name in expected if ".q_proj." in name or ".down_proj." in name}
    assert set(factor_shapes(architecture, Adaptation(3, 1.0, ("q_proj", "down_proj")))) == some


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tensor=2, context=2, data=3), Layout(pipeline=2, virtual_pipeline=2, tensor=2)]
)
def test_a_stage_has_all_of_its_adapters_on_every_rank(model: Path, layout: Layout) -> None:
    architecture, flat = read_architecture(model), adapter_layout(layout)
    assert flat.size == layout.size
    held = [adapter_blocks(architecture, ALL, flat, position) for position in range(flat.size)]
    copies = Counter(block.tensor for blocks in held for block in blocks)
    assert copies == dict.fromkeys(factor_shapes(architecture, ALL), layout.size // layout.pipeline)
    for position, blocks in enumerate(held):
        stage = layout.stage_chunks(architecture.layers)[layout.coordinates(position).pipeline]
        assert {int(block.tensor.split(".")[2]) for block in blocks} == {layer for chunk in stage for layer in chunk}
        assert len({block.parameter for block in blocks}) == len(blocks)


def test_new_ones_leave_the_model_as_it_is(model: Path) -> None:
    architecture = read_architecture(model)
    source = NewAdapters(architecture, ALL, seed=5)
    drawn = []
    for block in whole_adapter_blocks(architecture, ALL):
        whole = source.read(block.tensor, block.region)
        if "lora_B" in block.tensor:
            assert not whole.any()
        else:
            drawn.append((whole * whole.shape[1] ** 0.5).flatten())
            rows = source.read(block.tensor, ((1, 2), block.region[1]))
            assert torch.equal(rows, whole[1:2])
    values = torch.cat(drawn)
    # As torch.nn.Linear's weights, and so PEFT's A: uniform within 1 / sqrt(columns).
    assert values.abs().max() <= 1 and abs(float(values.mean())) < 0.03
    assert float(values.std()) == pytest.approx(3**-0.5, rel=0.03)


@pytest.mark.parametrize(
    ("config", "change", "expected"),
    [
        ({"r": 3}, {}, None),
        ({"r": 3, "lora_alpha": 3 * 3**0.5, "use_rslora": True}, {}, "scale 3"),
        ({"r": 4}, {}, "rank 4 and scale 2, but actor.lora has rank 3 and scale 2"),
        ({"r": 3, "target_modules": ["q_proj"]}, {}, "has shape none and actor.lora asks for"),
        ({"r": 3}, {"use_dora": True}, "use_dora=True is not supported"),
        ({"r": 3}, {"bias": "all"}, "bias='all' is not supported"),
        ({"r": 3}, {"peft_type": "IA3"}, "is not that of a LoRA"),
        ({"r": 3}, {"r": None}, "is not that of a LoRA"),
        ({"r": 3}, {"r": 0}, "is not that of a LoRA"),
        ({"r": 3}, {"lora_alpha": math.nan}, "is not that of a LoRA"),
        ({"r": 3}, {"lora_alpha": 10**400}, "is not that of a LoRA"),
        ({"r": 3}, {"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported"),
        ({"r": 3}, {"fan_in_fan_out": True}, "fan_in_fan_out=True is not supported"),
        ({"r": 3}, {"use_rslora": "no"}, "use_rslora='no' is not supported"),
        ({"r": 3}, {"invented_config": {"a": 1}}, "invented_config={'a': 1} is not supported"),
        ({"r": 3}, {"invented_config": None}, None),
    ],
)
def test_a_folder_of_pefts(
    model: Path, tmp_path: Path, config: dict[str, Any], change: dict[str, Any], expected: str | None
) -> None:
    rank = config["r"]
    wanted = {"target_modules": "all-linear", "lora_alpha": 2 * rank} | config
    trained = get_peft_model(load_model(model), LoraConfig(task_type="CAUSAL_LM", **wanted))
    trained.save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    adaptation = Adaptation.of(LoraSection(rank=3, alpha=6))
    if expected is None:
        source = PeftAdapter(tmp_path, read_architecture(model), adaptation)
        own = dict(trained.named_parameters())["base_model.model.model.layers.1.mlp.up_proj.lora_A.default.weight"]
        assert torch.equal(source.read("model.layers.1.mlp.up_proj.lora_A.weight", ((0, 2), (3, 5))), own[:2, 3:5])
        return
    with pytest.raises(ModelError, match=expected):
        PeftAdapter(tmp_path, read_architecture(model), adaptation)


def test_a_folder_that_is_not_pefts_says_so(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"actor\.lora\.path must be a folder that PEFT has written"):
        PeftAdapter(tmp_path, read_architecture(model), ALL)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 3, "lora_alpha": 3}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        PeftAdapter(tmp_path, read_architecture(model), ALL)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["loop=reward_modeling", "rollout=null", "batch={prompts_per_step: 4}", "algorithm={}"],
            "a reward model's head has to learn too",
        ),
        (["reference={tokens_per_gpu: 64}"], "reference: with actor.lora it is the actor without its adapters"),
        (["actor.lora.target_modules=[]"], "target_modules names no layer"),
        (["actor.lora.target_modules=[lm_head]"], "lm_head"),
        (["actor.lora.rank=0"], "actor.lora.rank"),
    ],
)
def test_recipes_that_are_refused(overrides: list[str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(RecipeError, match=expected):
        load_recipe(ROOT / "recipes" / "qwen7b_lora.yaml", overrides)


def test_the_plan_of_a_mixture_with_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    layout = "actor.layout={expert: 8}"
    recipe = load_recipe(
        ROOT / "recipes" / "qwen3_30b_a3b_grpo.yaml", ["actor.lora={rank: 8}", "reference=null", layout]
    )
    attention = 8 * 48 * (2 * (2048 + 4096) + 2 * (2048 + 512))
    experts = 8 * 48 * 128 * 3 * (2048 + 768)
    assert f"{attention + experts:,} parameters of adapters learn" in dry_run(recipe, 16)
    [stage] = estimate(recipe, planned_architectures(recipe), 16).roles["actor"]
    assert stage.gradients * GB == 4 * (attention + experts / 8)
    assert stage.optimizer * GB == 8 * (attention / 16 + experts / 8 / 2)
    adapted = 48 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 128 // 8 * 3 * 2048 * 768)
    assert stage.adapters * GB == 4 * (attention + experts / 8) + 2 * adapted
    for modules, expected in (
        ("[q_proj, gate_proj]", "gate_proj and up_proj are one parameter of PEFT's experts; name both or none"),
        ("[q_proj, qkv_proj]", "the layers of qwen3_moe have no qkv_proj; name some of q_proj, k_proj"),
    ):
        given = ["actor.lora={rank: 8, target_modules: " + modules + "}", "reference=null", layout]
        with pytest.raises(RecipeError, match=expected):
            dry_run(load_recipe(ROOT / "recipes" / "qwen3_30b_a3b_grpo.yaml", given), 16)


def test_the_plan_of_adapters_on_delta_nets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)

    def planned(modules: str) -> str:
        given = ["actor.lora={rank: 16, target_modules: " + modules + "}", "reference=null"]
        return dry_run(load_recipe(ROOT / "recipes" / "qwen3_next_grpo.yaml", given), 32)

    of_nets = 36 * 16 * ((12288 + 2048) + (64 + 2048) + (2048 + 4096))
    text = planned("[in_proj_qkvz, in_proj_ba, out_proj]")
    assert f"{of_nets:,} parameters of adapters learn" in text
    of_queries = 12 * 16 * (2 * 4096 + 2048)  # a gate behind each query
    assert f"{of_nets + of_queries:,} parameters of adapters learn" in planned(
        "[q_proj, in_proj_qkvz, in_proj_ba, out_proj]"
    )
    with pytest.raises(RecipeError, match=r"have no in_proj_z; name some of q_proj, .*, in_proj_qkvz, in_proj_ba, out"):
        planned("[in_proj_z]")


def test_the_plan_of_a_recipe_with_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    recipe = load_recipe(ROOT / "recipes" / "qwen7b_lora.yaml")
    assert list(recipe.roles_made) == ["actor"] and recipe.reference_is_base
    architectures = planned_architectures(recipe)
    learns = 80_740_352  # as PEFT counts for Qwen2.5-7B with r=32
    text = dry_run(recipe, 1)
    assert f"{learns:,} parameters of adapters learn, 1.06% of these: rank 32 on q_proj" in text
    assert "reference: the actor without its adapters" in text
    assert checkpoint_bytes(recipe, architectures) == 12 * learns
    [stage] = estimate(recipe, architectures, 1).roles["actor"]
    assert stage.gradients * GB == 4 * learns and stage.optimizer * GB == 8 * learns
    linear = 28 * (2 * 3584 * 3584 + 2 * 512 * 3584 + 3 * 18944 * 3584)
    assert stage.adapters * GB == 4 * learns + 2 * linear
    on_host = load_recipe(ROOT / "recipes" / "qwen7b_lora.yaml", ["actor.lora.offload_base=true"])
    [stage] = estimate(on_host, architectures, 1).roles["actor"]
    assert stage.adapters * GB == 4 * learns and stage.base_on_host * GB == 2 * linear
    assert "12.2 of weights without adapters in host memory" in dry_run(on_host, 1)


def test_operations_of_frozen_weights_are_those_that_torch_counts(model: Path) -> None:
    frozen = load_model(model).requires_grad_(False)
    frozen.set_attn_implementation("eager")
    embedded = frozen.model.embed_tokens(torch.arange(24).reshape(2, 12)).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        frozen(inputs_embeds=embedded).logits.sum().backward()
    architecture = read_architecture(model)
    counted = training_flops(architecture, [12, 12], 24, causal=False, frozen=True)
    assert counter.get_total_flops() == pytest.approx(counted, rel=0.01)
