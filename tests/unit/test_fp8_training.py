"""Training in fp8 without a GPU: which models and machines it is for, Megatron's config, and its plan."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_megatron.compat.transformer_engine import forget_quantized_weights
from rlhf_megatron.errors import RecipeError, UserError
from rlhf_megatron.models.architecture import Architecture, read_architecture
from rlhf_megatron.models.fp8 import check_fp8, parts_of_blocks, unsupported_in_fp8
from rlhf_megatron.models.transformer_config import transformer_config
from rlhf_megatron.planning.feasibility import check_architectures
from rlhf_megatron.planning.memory import estimate
from rlhf_megatron.planning.model_folders import planned_architectures
from rlhf_megatron.planning.report import plan_text
from rlhf_megatron.planning.stage_memory import GB, micro_batch_tokens
from rlhf_megatron.planning.step_time import FP8_SPEED, expected_time
from rlhf_megatron.recipe import RLRecipe, load_recipe
from rlhf_megatron.topology.layout import Layout

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def architecture(model: str, **changed: Any) -> Architecture:
    return dataclasses.replace(read_architecture(ROOT / "recipes" / "models" / model), **changed)


def recipe(name: str, *overrides: str) -> RLRecipe:
    loaded = load_recipe(ROOT / "recipes" / f"{name}.yaml", overrides)
    assert isinstance(loaded, RLRecipe)
    return loaded


def test_megatron_is_told_of_blocks() -> None:
    model = architecture("qwen2.5-0.5b")
    usual, config = (transformer_config(model, Layout(), "bfloat16", fp8=fp8) for fp8 in (None, "blockwise"))  # type: ignore[arg-type]
    differing = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.compare and getattr(config, field.name) != getattr(usual, field.name)
        and not callable(getattr(config, field.name))
    }  # fmt: skip
    assert differing == {"fp8": "e4m3", "fp8_recipe": "blockwise"}
    assert not config.fp8_param and not config.fp8_dot_product_attention and not config.fp8_output_proj


@pytest.mark.parametrize(
    ("model", "tensor"),
    [
        ("qwen2.5-0.5b", 1), ("qwen2.5-0.5b", 2), ("qwen2.5-7b", 4), ("llama3.1-8b", 8), ("qwen2.5-72b", 8),
        ("smollm2-135m", 1),
    ],
)  # fmt: skip
def test_dense_models_can(model: str, tensor: int) -> None:
    assert unsupported_in_fp8(architecture(model), tensor) is None


@pytest.mark.parametrize(
    ("model", "tensor", "changed", "reason"),
    [
        ("qwen3-30b-a3b", 1, {}, "the model has experts"),
        ("deepseek-v3", 1, {"experts": None}, "the model has latent attention"),
        ("qwen3-next-80b-a3b", 1, {"experts": None}, "the model has delta nets"),
        ("qwen2.5-7b", 1, {"hidden": 3592}, "widths must be multiples of 16, and hidden_size 3592 is not"),
        ("qwen2.5-7b", 4, {"feed_forward": 18976}, "and the columns of a GPU (intermediate_size) 4744 is not"),
        ("qwen2.5-7b", 4, {"head_dim": 24}, "and the heads of a GPU 168 is not"),
    ],
)
def test_other_models_are_refused(model: str, tensor: int, changed: dict[str, Any], reason: str) -> None:
    found = unsupported_in_fp8(architecture(model, **changed), tensor)
    assert found is not None and reason in found


@pytest.mark.parametrize(
    ("model", "tensor", "reason"),
    [
        ("qwen2.5-0.5b", 1, None),
        ("qwen2.5-7b", 4, None),
        ("qwen3-30b-a3b", 8, None),
        ("qwen2.5-0.5b", 2, "the heads of a GPU 448 is not"),
        ("smollm2-135m", 1, "hidden_size 576 is not"),
        ("qwen2.5-14b", 8, "the columns of a GPU (intermediate_size) 1728 is not"),
    ],
)
def test_a_rollout_by_blocks_needs_whole_ones(model: str, tensor: int, reason: str | None) -> None:
    found = parts_of_blocks(architecture(model), tensor)
    assert found is None if reason is None else found is not None and found.endswith(reason)


def test_a_plan_refuses_them_in_one_line() -> None:
    of_blocks = ("rollout.quantization=fp8_blockwise", "algorithm.rollout_correction={type: tis}")
    small = recipe("smollm_grpo", *of_blocks)
    with pytest.raises(RecipeError, match=r"^rollout\.quantization=fp8_blockwise: widths .* 576 is not; use fp8$"):
        check_architectures(small, planned_architectures(small))
    mixture = recipe("qwen3_30b_a3b_grpo", "actor.fp8=blockwise")
    with pytest.raises(RecipeError, match=r"^actor\.fp8=blockwise: the model has experts, .*; leave it out$"):
        check_architectures(mixture, planned_architectures(mixture))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_start_without_a_gpu_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="^actor.fp8=blockwise needs a Hopper GPU, and there is none; leave it out$"):
        check_fp8("actor", "blockwise", "local")


def test_a_plan_counts_weights_in_8_bits_and_faster_passes() -> None:
    plain = ("cluster.gpu=H100", "actor.layout.tensor=2", "actor.sequence_parallel=true", "actor.recompute={}")
    usual, in_8_bits = (recipe("qwen7b_grpo", *plain, *more) for more in ([], ["actor.fp8=blockwise"]))
    architectures = planned_architectures(usual)
    before, after = (estimate(each, architectures, 8) for each in (usual, in_8_bits))
    [(stage, more)] = zip(before.roles["actor"], after.roles["actor"], strict=True)
    layers = 28 * (3584 * (3584 + 2 * 512) + 3584 * 3584 + 3 * 3584 * 18944)  # without norms and biases
    assert more.fp8 == pytest.approx(2 * layers / 2 / GB, rel=1e-3)  # and the transposes
    kept = micro_batch_tokens(usual, usual.actor) * 28 * (2 * 3584 + 18944) / 2 / GB  # a byte less of each
    assert more.update - stage.update == pytest.approx(more.fp8 - kept, rel=1e-3)
    assert 0 < more.forward - stage.forward <= more.fp8 / 2
    assert more.resident == stage.resident and after.phases["generate"] == before.phases["generate"]
    assert "weights in 8 bits" in plan_text(in_8_bits, 8) and "weights in 8 bits" not in plan_text(usual, 8)
    times = [expected_time(each, architectures, 8) for each in (usual, in_8_bits)]
    of_updates = [time.phases["update"] for time in times if time]
    assert 1.05 < of_updates[0] / of_updates[1] < FP8_SPEED + 1e-6
    assert times[0] and times[1] and times[0].phases["generate"] == times[1].phases["generate"]


def test_copies_are_forgotten() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    module[0]._fp8_workspaces = {"weight": torch.zeros(2)}  # type: ignore[assignment]
    forget_quantized_weights(module)
    assert module[0]._fp8_workspaces == {}
