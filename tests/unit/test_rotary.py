"""Rotary embeddings of packed sequences: the reference against transformers, the Triton kernel in its interpreter."""

from __future__ import annotations

import pytest
import torch

from rlhf_megatron.data.context_parallel import tokens_of_part
from rlhf_megatron.kernels.rotary import positions, rotate
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
