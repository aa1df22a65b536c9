"""Rotary embeddings of packed sequences: the reference against transformers, the Triton kernel in its interpreter."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hugging_face import CONFIGS, SPECIAL
from rlhf_megatron.compat import megatron
from rlhf_megatron.data.context_parallel import tokens_of_part
from rlhf_megatron.kernels.rotary import positions, rotate
from rlhf_megatron.models.architecture import parse_architecture
from rlhf_megatron.models.families.rope_reading import read_rope
from rlhf_megatron.models.rotary import Rotary
from rlhf_megatron.models.rotary_table import RotaryTable, rotary_table, rotary_tables
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


def test_a_part_of_a_head_turns_as_transformers_turns_it() -> None:
    from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as interleaved
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as halves

    values = torch.randn(7, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    angles = angles_of(7, 12).double()
    both = torch.cat([angles, angles], dim=-1)
    for theirs, pairs in ((halves, False), (interleaved, True)):
        expected, _ = theirs(
            values[None], values[None], both.cos()[None] * 1.5, both.sin()[None] * 1.5, unsqueeze_dim=2
        )
        found = rotate(values, sequences([7]), angles, factor=1.5, interleaved=pairs)
        torch.testing.assert_close(found, expected[0], rtol=0, atol=1e-12)


def test_the_kernel_equals_float64() -> None:
    run_in_interpreter("rotary_embeddings.py")


@pytest.mark.parametrize(("heads", "half"), [(14, 32), (28, 64)], ids=["0.5B", "7B"])
def test_the_kernel_compiles_for_a_gpu_with_wide_accesses(heads: int, half: int) -> None:
    pytest.importorskip("triton", reason="the compiler is Triton's")
    from rlhf_megatron.kernels.triton_rotary import HEADS_TOGETHER, NUMBERS, WARPS, _rotate

    pointers = {"values": "*bf16", "rotated": "*bf16", "cu_seqlens": "*i32", "angles": "*fp32"}
    numbers = ["tokens", "sequences", "halvings", "token_stride", "head_stride", "angle_stride", "parts", "part"]
    types = pointers | dict.fromkeys(numbers, "i32") | {"factor": "fp32"}
    constants = {"HEADS": heads, "HALF": half, "REST": 0, "INTERLEAVED": False}
    constants |= {"TOKENS": NUMBERS // (2 * HEADS_TOGETHER * half), "HEADS_TOGETHER": HEADS_TOGETHER}
    constants |= {"WIDTH": half, "REST_WIDTH": 1, "BACK": False}
    aligned = ["values", "rotated", "token_stride", "head_stride"]
    # torch.compile makes constants of numbers that stay the same.
    for unchanging in ({}, {"sequences": 5, "halvings": 3, "parts": 1, "part": 0}):
        assembly = assembly_for_hopper(_rotate, types, constants | unchanging, aligned, WARPS)
        assert "ld.global.v4.b32" in assembly and "st.global.v4.b32" in assembly


def config_of(family: str, **fields: Any) -> dict[str, Any]:
    """Return the config.json of a small model, as transformers writes it."""
    sizes: dict[str, Any] = (
        {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None} if "smol" in family else {}
    )
    sizes |= {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 100}
    config = CONFIGS[family](**(sizes | SPECIAL.get(family, {}) | {"num_hidden_layers": 3} | fields))
    written: dict[str, Any] = json.loads(json.dumps(config.to_dict()))
    return {key: value for key, value in written.items() if key != "sliding_window" or "mistral" in family}


# With one table for all layers that turn, over the whole head, which transformers' Llama has too. The logprobs of the
# others are held against transformers' own classes (tests/parallel/test_family_parity.py).
ALIKE = (
    *("llama", "llama3", "mistral", "mistral_linear", "mixtral", "qwen2", "qwen2_yarn", "qwen2_moe", "qwen3"),
    *("qwen3_moe", "smollm3"),
)


@pytest.mark.parametrize("family", ALIKE)
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0, 1_000_000.0])
def test_frequencies_are_transformers_and_megatrons_to_the_last_bit(family: str, theta: float) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = SPECIAL.get(family, {}).get("rope_parameters", {"rope_type": "default"}) | {"rope_theta": theta}
    config = config_of(family, rope_parameters=rope)
    architecture = parse_architecture(config, "here")
    tables = rotary_tables(architecture, "cpu")
    assert len(tables) == 3
    theirs = LlamaRotaryEmbedding(CONFIGS[family].from_dict(config))
    megatron.install()
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    megatrons = RotaryEmbedding(
        architecture.head_dim, 1.0, rotary_base=theta, rope_scaling=rope["rope_type"] == "llama3",
        rope_scaling_factor=rope.get("factor", 1.0), use_cpu_initialization=True,
    )  # fmt: skip
    turning = config.get("no_rope_layers", [1, 1, 1])
    for table, turns in zip(tables, turning, strict=True):
        assert (table is not None) == bool(turns)
        if table is not None:
            assert torch.equal(table.inverse_frequencies, theirs.inv_freq)
            assert table.attention_factor == theirs.attention_scaling
            if rope["rope_type"] in ("default", "llama3"):
                assert torch.equal(table.inverse_frequencies, megatrons.inv_freq) and table.attention_factor == 1.0


# From published config.json files, but for the last three, which have the parameters that are seldom written.
QWEN = {"model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28, "max_position_embeddings": 32768}
QWEN_YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
PHI_LONG = [
    1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898,
    2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424, 6.693110555,
    7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283,
    20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7,
    32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
]  # fmt: skip
SCALED: dict[str, dict[str, Any]] = {
    "Qwen2.5-7B-Instruct, YaRN": QWEN | {"rope_theta": 1000000.0, "rope_scaling": QWEN_YARN},
    "Llama-3.2-1B": {
        "model_type": "llama", "hidden_size": 2048, "num_attention_heads": 32, "head_dim": 64, "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "Phi-4-mini": {
        "model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 24, "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "rope_theta": 10000.0,
        "rope_scaling": {"long_factor": PHI_LONG, "short_factor": [1.0] * 48, "type": "longrope"},
    },
    "deepseek-coder-6.7b": {
        "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "rope_theta": 100000,
        "max_position_embeddings": 16384, "rope_scaling": {"factor": 4.0, "type": "linear"},
    },
    "another llama3": {
        "model_type": "llama", "hidden_size": 2048, "num_attention_heads": 32, "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_theta": 10000.0, "rope_type": "llama3", "factor": 6, "low_freq_factor": 2.0, "high_freq_factor": 8.0,
        },
    },
    "YaRN with mscales": QWEN
    | {"rope_scaling": QWEN_YARN | {"factor": 40, "mscale": 1.0, "mscale_all_dim": 0.707, "beta_fast": 16}},
    "YaRN with its factor": QWEN
    | {"rope_parameters": {"rope_type": "yarn", "factor": 8.0, "rope_theta": 150000, "attention_factor": 1.3}
       | {"original_max_position_embeddings": 4096, "truncate": False, "beta_fast": 24.0, "beta_slow": 2.0}},
}  # fmt: skip


@pytest.mark.parametrize("name", SCALED)
def test_scaled_embeddings_are_transformers_to_the_last_bit(name: str) -> None:
    from transformers import CONFIG_MAPPING
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = SCALED[name]
    theirs = CONFIG_MAPPING[config["model_type"]].from_dict(json.loads(json.dumps(config)))
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    rope = read_rope(Path("here"), config, head_dim, config["max_position_embeddings"], partial=True)
    original = theirs.rope_parameters.get("original_max_position_embeddings", 1)
    for longest in (original, original + 1):
        table = rotary_table(rope.for_rows(longest), head_dim, "cpu")
        frequencies, factor = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]](theirs, "cpu", seq_len=longest)
        assert torch.equal(table.inverse_frequencies, frequencies)
        assert table.attention_factor == factor


def test_longrope_is_chosen_once_for_a_run() -> None:
    config = SCALED["Phi-4-mini"]
    rope = read_rope(Path("here"), config, 128, 131072, partial=True)
    assert rope.rotated(128) == 96
    with pytest.raises(ValueError, match="for_rows"):
        rotary_table(rope, 128, "cpu")
    assert rope.for_rows(4096) != rope.for_rows(4097) == rope.for_rows(9000).for_rows(5000)
    assert rope.for_rows(4096).for_rows(None) == rope


def test_each_layer_turns_by_its_own_table() -> None:
    boundaries = sequences([3, 5])
    packed = SimpleNamespace(cu_seqlens_q=boundaries, cu_seqlens_q_padded=None, max_seqlen_q=5)
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    frequencies = [torch.rand(4, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    rotary = Rotary([RotaryTable(frequencies[0]), RotaryTable(frequencies[1], attention_factor=1.25), None])
    values = torch.randn(8, 2, 8, generator=torch.Generator().manual_seed(2))
    for layer, factor in enumerate((1.0, 1.25)):
        expected = rotate(values, boundaries, torch.outer(torch.arange(5.0), frequencies[layer])) * factor
        torch.testing.assert_close(rotary.turn(values, layer, packed, group), expected)
    still = rotary.turn(values, 2, packed, group)
    assert torch.equal(still, values) and still.data_ptr() != values.data_ptr()
