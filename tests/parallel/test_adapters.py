"""Roles that learn adapters, in several layouts, against PEFT and torch.optim.AdamW in one process, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import ParamWrapper
from safetensors.torch import load_file

from hugging_face import load_model, make_model, random_rows, row_logprobs, train
from parallel.parity import CLIP, LEARNING_RATE, OPTIMIZER, STEPS, VOCABULARY, Case, case, selected_names
from parallel.parity_ranks import run_cases
from parallel.ranks import run_ranks
from rlhf_megatron.models.architecture import read_architecture
from rlhf_megatron.models.lora import Adaptation, adapted_shapes, factor_shapes
from rlhf_megatron.models.peft_files import write_peft
from rlhf_megatron.models.weight_map import is_expert
from rlhf_megatron.topology.layout import Layout

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SOME = ["q_proj", "v_proj", "down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
DELTA_NEXT = ["in_proj_qkvz", "in_proj_ba", "out_proj"]
DELTA = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
# As in ``test_family_parity``.
ROUNDED = {"norms_within": 2e-4, "weights_within": 5e-5}
SEQUENCE = {"sequence_parallel": True}
AWAY = {
    "offload": {"parameters": True, "gradients": True, "optimizer": True},
    "recompute": {"granularity": "full", "layers": 1},
}
STREAMED = {"offload": {"streamed_optimizer": 0.7}}
CASES: dict[str, tuple[Case, list[str]]] = {
    "one rank": (Case("qwen3", True, {}), ALL),
    "some layers": (Case("llama", False, {}, {"recompute": {"granularity": "full"}}), SOME),
    "TP2": (Case("qwen2", True, {"tensor": 2}), ALL),
    "TP2, sequence parallel": (Case("qwen3", False, {"tensor": 2}, SEQUENCE), ALL),
    "PP2": (Case("qwen2", False, {"pipeline": 2}), ALL),
    "DP2, then TP2": (Case("qwen3", True, {"data": 2}, {"tokens_per_gpu": 25}, then={"tensor": 2}), ALL),
    "CP2, streamed": (Case("llama", False, {"context": 2}, STREAMED), ALL),
    "PP2 VP2, then CP2": (Case("qwen2", True, {"pipeline": 2, "virtual_pipeline": 2}, then={"context": 2}), SOME),
    "TP4, more ranks than key-value heads": (Case("qwen2", True, {"tensor": 4}, SEQUENCE), ALL),
    # Some ranks have no rows of what is adapted in a layer, and exchange for it all the same.
    "TP4, keys alone": (Case("qwen2", True, {"tensor": 4}, SEQUENCE), ["k_proj"]),
    "TP4, queries, recomputed": (
        Case("qwen2", False, {"tensor": 4}, SEQUENCE | {"recompute": {"granularity": "full"}}),
        ["q_proj", "o_proj"],
    ),
    "PP2 VP2, away between calls": (Case("qwen3", True, {"pipeline": 2, "virtual_pipeline": 2}, AWAY), ALL),
    "TP2 PP2, sequence parallel": (Case("qwen3", True, {"tensor": 2, "pipeline": 2}, SEQUENCE), ALL),
    "TP2 CP2, then PP2 VP2 DP2": (
        Case("mistral", False, {"tensor": 2, "context": 2}, then={"pipeline": 2, "virtual_pipeline": 2, "data": 2}),
        ALL,
    ),
    "fused tensors, TP2": (
        Case("phi3", False, {"tensor": 2}, SEQUENCE),
        ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    ),
    "latent attention": (Case("deepseek_v3", False, {}), LATENT),
    "latent attention, TP2, then EP2": (
        Case("deepseek_v3", False, {"tensor": 2}, then={"data": 2, "expert": 2}),
        LATENT,
    ),
    "latent attention without ranks of queries, TP2": (
        Case("deepseek_v2_lite", False, {"tensor": 2}),
        ["q_proj", "kv_a_proj_with_mqa"],
    ),
    "norms around sublayers, one rank": (Case("gemma2", True, {}), ALL),
    "heads by the type of a layer, TP2": (Case("gemma4_text", False, {"tensor": 2}, SEQUENCE), ALL),
    "parallel sublayers, TP2": (Case("cohere2", False, {"tensor": 2}, SEQUENCE), ALL),
    "experts with biases, EP2": (
        Case("gpt_oss", False, {"data": 2, "expert": 2}),
        [*ATTENTION, "gate_up_proj", "down_proj"],
    ),
    "experts, TP2 EP2": (
        Case("qwen3_moe", False, {"tensor": 2, "data": 2, "expert": 2, "expert_tensor": 1}, SEQUENCE),
        ALL,
    ),
    "delta nets, PP2, then TP2": (
        Case("qwen3_5_text", False, {"pipeline": 2}, then={"tensor": 2}, **ROUNDED),
        ALL + DELTA,
    ),
    "delta nets and experts, TP2 EP2": (
        Case("qwen3_next", False, {"tensor": 2, "data": 2, "expert": 2, "expert_tensor": 1}, **ROUNDED),
        ALL + DELTA_NEXT,
    ),
}
# Of experts and delta nets, in ``make grid``.
MORE_CASES: dict[str, tuple[Case, list[str]]] = {
    "experts, one rank": (Case("qwen3_moe", False, {}), ALL),
    "experts, then parts of them": (
        Case("qwen3_moe", False, {"data": 2, "expert": 2}, then={"tensor": 2, "expert_tensor": 2}),
        ALL,
    ),
    "parts of experts, EP2, then EP4": (
        Case(
            "qwen3_moe",
            False,
            {"tensor": 2, "data": 2, "expert": 2, "expert_tensor": 2},
            SEQUENCE,
            then={"data": 4, "expert": 4},
        ),
        ALL,
    ),
    "experts alone, PP2 VP2 EP2": (
        Case(
            "qwen3_moe",
            False,
            {"pipeline": 2, "virtual_pipeline": 2, "data": 2, "expert": 2},
            {"recompute": {"granularity": "full", "layers": 1}},
        ),
        ["gate_proj", "up_proj", "down_proj"],
    ),
    "down projections of experts, EP2": (Case("qwen3_moe", False, {"data": 2, "expert": 2}), ["q_proj", "down_proj"]),
    "a shared expert, TP2 EP2": (
        Case("qwen2_moe", False, {"tensor": 2, "data": 2, "expert": 2, "expert_tensor": 1}, SEQUENCE),
        ALL,
    ),
    "dense layers and a shared expert, EP2": (
        Case("deepseek_v3", False, {"data": 2, "expert": 2}),
        [*LATENT, "gate_proj", "up_proj", "down_proj"],
    ),
    "names of Mixtral's, EP2": (Case("mixtral", False, {"data": 2, "expert": 2}), [*ATTENTION, "w1", "w3", "w2"]),
    "experts with biases, one rank": (Case("gpt_oss", False, {}), ["gate_up_proj", "down_proj"]),
    "no gates, TP2": (Case("apertus", False, {"tensor": 2}, SEQUENCE), [*ATTENTION, "up_proj", "down_proj"]),
    "latent attention without experts, TP2": (Case("youtu", True, {"tensor": 2}), [*LATENT, "gate_proj", "down_proj"]),
    "latent attention, scaled by position, EP2": (
        Case("mistral4", False, {"data": 2, "expert": 2}),
        [*LATENT, "gate_proj", "up_proj", "down_proj"],
    ),
    "latent attention, of images and text, EP2": (
        Case("mistral3:mistral4", False, {"data": 2, "expert": 2}),
        [*LATENT, "gate_proj", "up_proj", "down_proj"],
    ),
    "experts of Kimi's images and text, EP2": (
        # The experts' sum counts 2.5 times, and so does what merging rounds.
        Case("kimi_k25", False, {"data": 2, "expert": 2}, weights_within=2e-5),
        [*LATENT, "gate_proj", "up_proj", "down_proj"],
    ),
    "experts in every layer, EP2": (Case("solar_open", False, {"data": 2, "expert": 2}), ALL),
    "windows and experts, EP2": (Case("exaone_moe", False, {"data": 2, "expert": 2}), ALL),
    "delta nets, one rank": (Case("qwen3_5_text", True, {}, **ROUNDED), ALL + DELTA),
    "delta nets, TP2": (Case("qwen3_5_text", False, {"tensor": 2}, **ROUNDED), ALL + DELTA),
    "delta nets, CP2": (Case("qwen3_5_text", False, {"context": 2}, **ROUNDED), ALL + DELTA),
    "delta nets and experts, CP2 EP2": (
        Case("qwen3_next", False, {"context": 2, "expert": 2}, **ROUNDED),
        ALL + DELTA_NEXT,
    ),
    "experts beside dense layers, TP2 EP2": (
        Case("gemma4_text_experts", False, {"tensor": 2, "data": 2, "expert": 2, "expert_tensor": 1}, SEQUENCE),
        ALL,
    ),
    "experts beside dense layers, of images and text, PP2": (
        Case("gemma4:experts", True, {"pipeline": 2}),
        ALL,
    ),
    # PEFT's own two steps in float32 are 1.4e-5 from those in float64.
    "values that are keys, PP2": (
        Case("gemma4_text", True, {"pipeline": 2}, weights_within=5e-5),
        ["k_proj", "v_proj"],
    ),
    # A part of what is one matrix in Megatron.
    "gates and strengths of delta nets, TP2": (
        Case("qwen3_5_text", False, {"tensor": 2}, **ROUNDED),
        ["q_proj", "in_proj_z", "in_proj_b"],
    ),
    "delta nets, PP2 VP2, recomputed": (
        Case(
            "qwen3_5_text",
            True,
            {"pipeline": 2, "virtual_pipeline": 2},
            {"recompute": {"granularity": "full"}},
            **ROUNDED,
        ),
        ALL + DELTA,
    ),
    "delta nets of images and text, TP2": (Case("qwen3_5", False, {"tensor": 2}, **ROUNDED), ALL + DELTA),
    "delta nets alone, DP2": (Case("qwen3_next", False, {"data": 2}, **ROUNDED), DELTA_NEXT),
    "delta nets and experts, one rank": (Case("qwen3_next", False, {}, **ROUNDED), ALL + DELTA_NEXT),
    "delta nets and experts, PP2": (Case("qwen3_next", False, {"pipeline": 2}, **ROUNDED), ALL + DELTA_NEXT),
    "Qwen3.5 with experts, DP2 EP2": (
        Case("qwen3_5_moe_text", False, {"data": 2, "expert": 2}, **ROUNDED),
        ALL + DELTA,
    ),
    "experts of images and text, EP2": (Case("qwen3_vl_moe", False, {"data": 2, "expert": 2}), ALL),
    "Qwen3.5 with experts, of images and text, PP2": (
        Case("qwen3_5_moe", False, {"pipeline": 2}, **ROUNDED),
        ALL + DELTA,
    ),
}
RANK, ALPHA = 3, 5.0


def make_adapter(folder: Path, modules: list[str], path: Path) -> Path:
    """Return an adapter by PEFT with random A and B: one that is trained; with experts one of ours."""
    if adapts_experts(folder, modules):
        architecture, adaptation = read_architecture(folder), Adaptation(RANK, ALPHA * RANK**-0.5, tuple(modules))
        draw = torch.Generator().manual_seed(3)
        shapes = factor_shapes(architecture, adaptation).items()
        factors = [(name, 0.1 * torch.randn(shape, generator=draw)) for name, shape in shapes]
        write_peft(path, factors, architecture, adaptation, str(folder))
        return path
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=modules, use_rslora=True, task_type="CAUSAL_LM")
    model = get_peft_model(load_model(folder), config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(path)
    return path


def adapts_experts(folder: Path, modules: list[str]) -> bool:
    adapted = adapted_shapes(read_architecture(folder), Adaptation(RANK, 1.0, tuple(modules)))
    return any(map(is_expert, adapted))


def keep_gates_from_ups(model: PeftModel) -> None:
    """Keep gates from ups: PEFT has A and B of gate and up of an expert as blocks of one A and B of twice the rank.
    Between the blocks are zeros, and here they stay there."""
    for module in model.modules():
        if isinstance(module, ParamWrapper) and module.r["default"] == 2 * RANK:
            b = module.lora_B["default"].weight
            mask = torch.zeros(len(b), 2 * RANK, module.num_experts)
            mask[: len(b) // 2, :RANK] = mask[len(b) // 2 :, RANK:] = 1
            b.register_hook(mask.flatten(1).mul)


def given_adapter(name: str, modules: list[str], path: Path) -> dict[str, Any]:
    """Return what a recipe's section says to start from it."""
    lora = {"rank": RANK, "alpha": ALPHA, "rank_stabilized": True, "target_modules": modules, "path": str(path)}
    return {"lora": lora | {"offload_base": name == "PP2"}}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def results(home: Path, request: pytest.FixtureRequest) -> dict[str, list[dict[str, Any]]]:
    """Return each case's results by rank; all cases of as many ranks share a launch."""
    cases: dict[int, dict[str, Any]] = {1: {}, 2: {}, 4: {}}
    for name in selected_names(request):
        given, modules = (CASES | MORE_CASES)[name]
        folder = make_model(home / name, given.family, tied=given.tied, vocabulary=VOCABULARY)
        adapter = make_adapter(folder, modules, home / f"{name}, adapter")
        cases[Layout(**given.layout).size][name] = case(
            folder,
            given.layout,
            list(random_rows(7, VOCABULARY)),
            section=(given.section or {}) | given_adapter(name, modules, adapter),
            then=given.then,
            exported=str(home / f"{name}, exported"),
        )
    found: dict[str, list[dict[str, Any]]] = {}
    for ranks, of_size in ((ranks, of_size) for ranks, of_size in cases.items() if of_size):
        by_rank = run_ranks(run_cases, ranks, {"cases": of_size}, timeout=600)
        found |= {name: [result[name] for result in by_rank] for name in of_size}
    return found


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.grid) for name in MORE_CASES)])
def test_outputs_and_steps_equal_peft(name: str, home: Path, results: dict[str, list[dict[str, Any]]]) -> None:
    by_rank, (given, modules) = results[name], (CASES | MORE_CASES)[name]
    assert all(result["losses"] == by_rank[0]["losses"] for result in by_rank)
    assert all(result["parallel_state_untouched"] for result in by_rank)
    result = by_rank[0]
    prompts, responses = random_rows(7, VOCABULARY)
    model = PeftModel.from_pretrained(load_model(home / name), home / f"{name}, adapter", is_trainable=True)
    keep_gates_from_ups(model)
    with torch.no_grad():
        expected = torch.cat([row_logprobs(model, p, r) for p, r in zip(prompts, responses, strict=True)])
        with model.disable_adapter():
            base = torch.cat([row_logprobs(model, p, r) for p, r in zip(prompts, responses, strict=True)])
    assert (expected - base).abs().max() > 0.01
    assert (torch.tensor(result["logprobs"]) - expected).abs().max() < 1e-5
    assert (torch.tensor(result["base_logprobs"]) - base).abs().max() < 1e-5

    losses, norms = train(model, prompts, responses, STEPS, LEARNING_RATE, CLIP, OPTIMIZER["epsilon"])
    assert result["losses"] == pytest.approx(losses, abs=1e-5)
    assert result["grad_norms"] == pytest.approx(norms, rel=given.norms_within)
    exported = home / f"{name}, exported"
    model.save_pretrained(home / f"{name}, expected")
    wanted = load_file(home / f"{name}, expected" / "adapter_model.safetensors")
    again = PeftModel.from_pretrained(load_model(home / name), exported / "adapter")
    found = load_file(exported / "adapter" / "adapter_model.safetensors")
    if adapts_experts(home / name, modules):
        again.save_pretrained(home / f"{name}, again")
        found = load_file(home / f"{name}, again" / "adapter_model.safetensors")
    assert found.keys() == wanted.keys()
    for tensor, value in wanted.items():
        assert (found[tensor] - value).abs().max() < given.weights_within, tensor
    merged, trained = load_model(exported), model.merge_and_unload()
    with torch.no_grad():
        for row in zip(prompts, responses, strict=True):
            assert (row_logprobs(merged, *row) - row_logprobs(trained, *row)).abs().max() < given.weights_within
    # The same weights, but one adds B A x to W x, and one B A to W: delta nets amplify what float32 makes of that.
    if not any("experts" in tensor for tensor in merged.state_dict()):  # whose products torch has not in float64
        merged, again = merged.double(), again.double()
    with torch.no_grad():
        for row in zip(prompts, responses, strict=True):
            assert (row_logprobs(merged, *row) - row_logprobs(again, *row)).abs().max() < 1e-5
