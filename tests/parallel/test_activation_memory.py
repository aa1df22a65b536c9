"""Planned activations beside those that Megatron's local layers keep for a backward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hugging_face import make_model
from parallel.activations import kept_bytes
from parallel.ranks import run_ranks
from rlhf_megatron.models.architecture import read_architecture
from rlhf_megatron.planning.activation_memory import layer_activations, recomputed_activations
from rlhf_megatron.recipe import ActorSection, OptimizerSection
from rlhf_megatron.recipe.memory_savings import RecomputeSection
from rlhf_megatron.topology.layout import Layout

TOKENS = 256
MODULES: dict[str, list[Any]] = {
    "qwen3": ["mlp"],
    "qwen2_moe": ["moe"],
    "deepseek_v3": ["shared_experts", "mlp"],
}
FAMILIES = ["qwen2", "qwen3", "qwen2_moe", "deepseek_v3", "gemma2", "gpt_oss", "qwen3_next"]
FAMILIES += ["gemma4_text", "gemma4_text_experts"]
# On CPUs torch's attention keeps a mask of all tokens for a window, and keys and values repeated for all heads.
_PLAIN = {"layer_types": ["full_attention"] * 4, "num_global_key_value_heads": 4}
FIELDS = dict.fromkeys(("gemma4_text", "gemma4_text_experts"), _PLAIN)


@pytest.mark.grid
def test_a_plan_counts_what_layers_keep(tmp_path: Path) -> None:
    """Up to what norms and activations of small models keep in float32 beside it: a half."""
    models = {family: str(make_model(tmp_path / family, family, **FIELDS.get(family, {}))) for family in FAMILIES}
    [kept] = run_ranks(kept_bytes, 1, {"models": models, "tokens": TOKENS})
    learning = OptimizerSection(learning_rate=1e-3)
    section = ActorSection(tokens_per_gpu=TOKENS, optimizer=learning, transformer_implementation="local")
    for family, model in models.items():
        architecture = read_architecture(model)
        parts = section, architecture
        counted = sum(
            layer_activations(*parts, kind, Layout(), 4, TOKENS)
            - recomputed_activations(*parts, kind, Layout(), 4, TOKENS)
            for kind in architecture.layer_kinds
        )
        assert 0.9 < kept[family] / (TOKENS * counted) < 1.5, family


@pytest.mark.grid
def test_ranks_of_a_row_keep_as_much_of_delta_nets_for_their_tokens(tmp_path: Path) -> None:
    model = make_model(tmp_path, "qwen3_5_text", layer_types=["linear_attention"] * 4)
    arguments = {"models": {"delta nets": str(model)}, "tokens": TOKENS}
    [alone] = run_ranks(kept_bytes, 1, arguments)
    for of_rank in run_ranks(kept_bytes, 2, arguments | {"tokens": 2 * TOKENS, "context": 2}):
        assert 0.97 < of_rank["delta nets"] / alone["delta nets"] < 1.03, (of_rank, alone)


@pytest.mark.grid
def test_a_plan_counts_what_recomputed_modules_do_not_keep(tmp_path: Path) -> None:
    models = {family: str(make_model(tmp_path / family, family)) for family in MODULES}
    arguments = {"models": models, "tokens": TOKENS}
    [kept] = run_ranks(kept_bytes, 1, arguments)
    [less] = run_ranks(kept_bytes, 1, arguments | {"modules": MODULES})
    for family, model in models.items():
        section = ActorSection(
            tokens_per_gpu=TOKENS,
            optimizer=OptimizerSection(learning_rate=1e-3),
            transformer_implementation="local",
            recompute=RecomputeSection(granularity="selective", modules=MODULES[family]),
        )
        architecture = read_architecture(model)
        counted = sum(
            recomputed_activations(section, architecture, kind, Layout(), 4, TOKENS)
            for kind in architecture.layer_kinds
        )
        assert 0.8 < (kept[family] - less[family]) / (TOKENS * counted) < 1.5, family
