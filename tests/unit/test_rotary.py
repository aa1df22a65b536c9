"""Rotary embeddings of packed sequences: the reference against transformers, the Triton kernel in its interpreter."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hugging_face import CONFIGS, SPECIAL
from rlhf_megatron.compat import megatron
from rlhf_megatron.data.context_parallel import tokens_of_part
from rlhf_megatron.kernels.rotary import positions, rotate
from rlhf_megatron.models.architecture import parse_architecture
from rlhf_megatron.models.rotary import Rotary
from rlhf_megatron.models.rotary_table import RotaryTable, rotary_tables
from rotary_embeddings import LENGTHS, angles_of, sequences
from triton_kernels import assembly_for_hopper, run_in_interpreter


@pytest.mark.parametrize("lengths", LENGTHS, ids=["one token", "an empty one", "many"])
def test_each_sequence_is_turned_as_transformers_turns_it(lengths: list[int]) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    values = torch.randn(sum(lengths), 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    angles = angles_of(max(lengths), 16).double()
    expected = []
    for sequence in values.split(lengths):
        turned = torch.cat([angles, angles], dim=-1)[: len(sequence)]
        alone, _ = apply_rotary_pos_emb(sequence, sequence, turned.cos(), turned.sin(), unsqueeze_dim=1)
        expected.append(alone)
    torch.testing.assert_close(rotate(values, sequences(lengths), angles), torch.cat(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_positions_of_what_a_context_parallel_rank_has(parts: int) -> None:
    lengths = [length * 2 * parts for length in (3, 1, 0, 5)]
    cu_seqlens = sequences(lengths)
    of_all = torch.cat([torch.arange(length) for length in lengths])
    for part in range(parts):
        held = tokens_of_part(cu_seqlens, parts, part)
        assert positions(cu_seqlens, len(held), parts, part).tolist() == of_all[held].tolist()


def test_the_kernel_equals_float64() -> None:
    run_in_interpreter("rotary_embeddings.py")


@pytest.mark.parametrize(("heads", "half"), [(14, 32), (28, 64)], ids=["0.5B", "7B"])
def test_the_kernel_compiles_for_a_gpu_with_wide_accesses(heads: int, half: int) -> None:
    pytest.importorskip("triton", reason="the compiler is Triton's")
    from rlhf_megatron.kernels.triton_rotary import HEADS_TOGETHER, NUMBERS, WARPS, _rotate

    pointers = {"values": "*bf16", "rotated": "*bf16", "cu_seqlens": "*i32", "angles": "*fp32"}
    numbers = ["tokens", "sequences", "halvings", "token_stride", "head_stride", "angle_stride", "parts", "part"]
    constants = {"HEADS": heads, "HALF": half, "TOKENS": NUMBERS // (2 * HEADS_TOGETHER * half)}
    constants |= {"HEADS_TOGETHER": HEADS_TOGETHER, "WIDTH": half, "BACK": False}
    aligned = ["values", "rotated", "token_stride", "head_stride"]
    assembly = assembly_for_hopper(_rotate, pointers | dict.fromkeys(numbers, "i32"), constants, aligned, WARPS)
    assert "ld.global.v4.b32" in assembly and "st.global.v4.b32" in assembly


def config_of(family: str, **fields: Any) -> dict[str, Any]:
    """The config.json of a small model, as transformers writes it."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 100}
    config = CONFIGS[family](**(sizes | SPECIAL.get(family, {}) | {"num_hidden_layers": 3} | fields))
    written: dict[str, Any] = json.loads(json.dumps(config.to_dict()))
    return {key: value for key, value in written.items() if key != "sliding_window" or family == "mistral"}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0, 1_000_000.0])
def test_frequencies_are_transformers_and_megatrons_to_the_last_bit(family: str, theta: float) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_type": "default", "rope_theta": theta}
    if family == "llama3":
        rope = SPECIAL[family]["rope_parameters"] | {"rope_theta": theta}
    config = config_of(family, rope_parameters=rope)
    architecture = parse_architecture(config, "here")
    tables = rotary_tables(architecture, "cpu")
    assert len(tables) == 3
    theirs = LlamaRotaryEmbedding(CONFIGS[family].from_dict(config))
    megatron.install()
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    factor = architecture.rope_scaling_factor
    megatrons = RotaryEmbedding(
        architecture.head_dim, 1.0, rotary_base=theta, rope_scaling=factor is not None,
        rope_scaling_factor=factor or 1.0, use_cpu_initialization=True,
    )  # fmt: skip
    for table in tables:
        assert torch.equal(table.inverse_frequencies, theirs.inv_freq)
        assert torch.equal(table.inverse_frequencies, megatrons.inv_freq)
        assert table.attention_factor == theirs.attention_scaling == 1.0


def test_each_layer_turns_by_its_own_table() -> None:
    boundaries = sequences([3, 5])
    packed = SimpleNamespace(cu_seqlens_q=boundaries, cu_seqlens_q_padded=None, max_seqlen_q=5)
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    frequencies = [torch.rand(4, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    rotary = Rotary([RotaryTable(frequencies[0]), RotaryTable(frequencies[1], attention_factor=1.25)])
    values = torch.randn(8, 2, 8, generator=torch.Generator().manual_seed(2))
    for layer, factor in enumerate((1.0, 1.25)):
        expected = rotate(values, boundaries, torch.outer(torch.arange(5.0), frequencies[layer])) * factor
        assert torch.equal(rotary.turn(values, layer, packed, group), expected)
