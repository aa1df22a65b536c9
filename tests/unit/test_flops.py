"""Operations counted by formula against those that torch counts while transformers runs the same model."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hugging_face import WINDOW, load_model, make_model
from rlhf_megatron.gpu_kinds import GPUS, peak_flops
from rlhf_megatron.models.architecture import read_architecture
from rlhf_megatron.models.flops import (
    attention_cost,
    forward_flops,
    kv_cache_bytes,
    kv_cache_bytes_per_token,
    training_flops,
)
from rlhf_megatron.recipe.operations import ClusterSection


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "qwen2", "qwen3", "qwen2_moe", "glm4_moe", "deepseek_v2", "deepseek_v3"),
        *("gemma4_text", "gemma4_text_experts"),
    ],
)
def test_operations_are_those_that_torch_counts(family: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / family, family)
    architecture, model = read_architecture(folder), load_model(folder)
    model.set_attn_implementation("eager")
    if architecture.experts:
        model.set_experts_implementation("eager")  # grouped products are not counted
    tokens = torch.arange(24).reshape(2, 12)
    with FlopCounterMode(display=False) as counter:
        loss = model(tokens).logits.sum()
        forward = counter.get_total_flops()
        loss.backward()
        both = counter.get_total_flops()
    lengths = [12, 12]
    # transformers also multiplies positions by frequencies, in a product of matrices.
    angles = 2 * tokens.shape[1] * architecture.rope.rotated(architecture.head_dim) // 2 * 1
    assert forward - forward_flops(architecture, lengths, 24, causal=False) in (0, angles, 2 * angles)
    assert both == pytest.approx(training_flops(architecture, lengths, 24, causal=False), rel=0.01)


def test_a_causal_row_has_half_the_pairs_and_the_head_reads_what_it_is_asked(tmp_path: Path) -> None:
    architecture = read_architecture(make_model(tmp_path / "model", "qwen3"))
    query = architecture.heads * architecture.head_dim
    whole, causal = (forward_flops(architecture, [100], 0, causal=c) for c in (False, True))
    assert whole - causal == 2 * architecture.layers * 2 * query * (100 * 100 - 100 * 101 / 2)
    assert forward_flops(architecture, [7], 3) - forward_flops(architecture, [7], 0) == (
        2 * 3 * architecture.hidden * architecture.vocabulary
    )


def test_latents_are_cached_whole_on_every_rank(tmp_path: Path) -> None:
    architecture = read_architecture(make_model(tmp_path / "model", "deepseek_v3"))
    for tensor in (1, 2):
        assert kv_cache_bytes_per_token(architecture, tensor, 2) == 2 * architecture.layers * (32 + 8)


def test_a_window_takes_pairs_and_tokens_of_the_cache_away(tmp_path: Path) -> None:
    of_all, of_some = (
        read_architecture(make_model(tmp_path / name, name)) for name in ("mistral_window", "qwen2_window")
    )
    full = read_architecture(make_model(tmp_path / "full", "qwen2"))
    pairs = sum(min(token + 1, WINDOW) for token in range(10))
    query = of_all.heads * of_all.head_dim
    weights = forward_flops(of_all, [1] * 10, 0) - 4 * 4 * query * 10
    assert forward_flops(of_all, [10], 0) - weights == 4 * 4 * query * pairs
    assert forward_flops(full, [10], 0) - forward_flops(of_some, [10], 0) == 2 * 4 * query * (55 - pairs)
    assert forward_flops(full, [WINDOW], 0) == forward_flops(of_some, [WINDOW], 0)
    assert [kv_cache_bytes(of_all, 1, 2, tokens) for tokens in (1, 4, 10)] == [1024, 4096, 4096]
    assert [kv_cache_bytes(of_some, 1, 2, tokens) for tokens in (1, 4, 10)] == [1024, 4096, 2 * 256 * (10 + WINDOW)]


def test_rows_cost_their_tokens_and_their_square(tmp_path: Path) -> None:
    architecture = read_architecture(make_model(tmp_path / "model", "qwen3"))
    attention = attention_cost(architecture)
    short, long = (forward_flops(architecture, [length], length) for length in (50, 700))
    assert long / short == pytest.approx((700 + attention * 700**2) / (50 + attention * 50**2))


def test_a_token_in_the_cache_has_a_key_and_a_value_in_each_layer(tmp_path: Path) -> None:
    architecture = read_architecture(make_model(tmp_path / "model", "qwen3"))  # 4 layers, 2 key-value heads of 32
    assert [kv_cache_bytes_per_token(architecture, tensor, 2) for tensor in (1, 2, 4)] == [1024, 512, 512]


def test_a_gpu_is_known_by_its_name() -> None:
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA H100 80GB HBM3") == peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA H20") == 148e12 and peak_flops("NVIDIA GB200") > peak_flops("NVIDIA B200")
    assert peak_flops("NVIDIA GeForce RTX 4090") is None


def test_a_recipe_may_name_every_gpu_that_is_known() -> None:
    assert {*get_args(get_args(ClusterSection.model_fields["gpu"].annotation)[0])} == {*GPUS}
