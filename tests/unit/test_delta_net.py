"""The parts of a gated delta net over packed rows against transformers', one row at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from rlhf_megatron.errors import ModelError
from rlhf_megatron.kernels.rotary import positions
from rlhf_megatron.models.architecture import parse_architecture
from rlhf_megatron.models.delta_net import convolved, normalised
from rlhf_megatron.models.delta_rule import chunks_of, delta_rule
from rlhf_megatron.models.flops import forward_flops, kv_cache_bytes, kv_cache_bytes_per_token
from rlhf_megatron.models.packed_sequences import PackedSequences
from rlhf_megatron.topology.layout import Layout

LENGTHS = [5, 130, 1, 70]  # some of several chunks of 64 tokens
BOUNDARIES = torch.tensor([0, *LENGTHS]).cumsum(0)
CHUNKS = chunks_of(BOUNDARIES, sum(LENGTHS))
HEADS, KEY, VALUE = 3, 8, 12


def packed(*shape: int, seed: int) -> Tensor:
    return torch.randn(sum(LENGTHS), *shape, generator=torch.Generator().manual_seed(seed))


def test_states_begin_anew_in_each_row() -> None:
    query, key, value = packed(HEADS, KEY, seed=0), packed(HEADS, KEY, seed=1), packed(HEADS, VALUE, seed=2)
    decay, beta = -packed(HEADS, seed=3).abs(), packed(HEADS, seed=4).sigmoid()
    found = delta_rule(normalised(query), normalised(key), value, decay, beta, CHUNKS)
    of_rows = zip(*(each.split(LENGTHS) for each in (query, key, value, decay, beta, found)), strict=True)
    for q, k, v, g, b, ours in of_rows:
        wanted, _ = theirs.torch_recurrent_gated_delta_rule(
            *(each[None] for each in (q, k, v, g, b)),
            initial_state=None,
            output_final_state=False,
            use_qk_l2norm_in_kernel=True,
        )
        assert (ours - wanted[0]).abs().max() < 1e-5


def test_gradients_are_those_of_one_token_after_the_other() -> None:
    shapes = [(HEADS, KEY), (HEADS, KEY), (HEADS, VALUE), (HEADS,), (HEADS,)]
    given = [packed(*shape, seed=seed).double().requires_grad_() for seed, shape in enumerate(shapes)]
    again = [each.detach().requires_grad_() for each in given]
    pull = packed(HEADS, VALUE, seed=9).double()

    def arguments(of: list[Tensor]) -> list[Tensor]:
        query, key, value, decay, beta = of
        return [normalised(query), normalised(key), value, -decay.abs(), beta.sigmoid()]

    (delta_rule(*arguments(given), CHUNKS) * pull).sum().backward()
    (in_turn(*arguments(again)) * pull).sum().backward()
    for ours, theirs_ in zip(given, again, strict=True):
        assert ours.grad is not None and theirs_.grad is not None
        assert (ours.grad - theirs_.grad).abs().max() < 1e-6 * theirs_.grad.abs().max()


def in_turn(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Return the definition of the rule, in float64 (transformers' own goes back to float32)."""
    out, begins = [], set(BOUNDARIES.tolist())
    for token in range(len(query)):
        if token in begins:
            state = torch.zeros(HEADS, KEY, VALUE, dtype=torch.float64)
        state = state * decay[token].exp()[:, None, None]
        correction = value[token] - torch.einsum("hde,hd->he", state, key[token])
        state = state + beta[token][:, None, None] * torch.einsum("hd,he->hde", key[token], correction)
        out.append(torch.einsum("hde,hd->he", state, query[token]) * KEY**-0.5)
    return torch.stack(out)


def test_gradients_of_short_vectors_are_numbers_in_float16() -> None:
    short = torch.full((3, 8), 1e-4, dtype=torch.float64)
    given, exact = short.half().requires_grad_(), short.half().double().requires_grad_()
    pull = torch.linspace(-1e-3, 1e-3, 8)
    for values in (given, exact):
        (normalised(values).double() * pull).sum().backward()
    assert given.grad is not None and exact.grad is not None
    torch.testing.assert_close(given.grad.double(), exact.grad, rtol=5e-3, atol=1e-3)


def test_no_token_is_convolved_with_another_row() -> None:
    values, weight = packed(6, seed=5), torch.randn(6, 4, generator=torch.Generator().manual_seed(6))
    found = convolved(values, weight, BOUNDARIES)
    for row, ours in zip(values.split(LENGTHS), found.split(LENGTHS), strict=True):
        wanted = functional.silu(functional.conv1d(functional.pad(row.T[None], (3, 0)), weight[:, None], groups=6))
        assert (ours - wanted[0].T).abs().max() < 1e-5


def test_layers_have_the_chunks_of_their_rows_in_common() -> None:
    rows = PackedSequences(cu_seqlens_q=BOUNDARIES.int(), positions=positions(BOUNDARIES, sum(LENGTHS)))
    assert rows.chunks is rows.chunks and rows.chunks.running == CHUNKS.running == [4, 2, 1]


CONFIG = {
    "model_type": "qwen3_5_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 100,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
}  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"context": 4}, "layout.context=4 times layout.tensor=1 does not divide the model's 2 key heads"),
        (
            {"tensor": 2, "context": 2},
            r"layout.context=2 times layout.tensor=2 does not divide the model's 2 key heads \(linear_num_key_heads\), "
            "which both share out; lower one of them, or use pipeline",
        ),
        ({"tensor": 4}, "layout.tensor=4 does not divide the model's 2 key-value heads"),
    ],
)
def test_what_a_delta_net_cannot_be_cut_into_is_refused(layout: dict[str, int], expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        parse_architecture(CONFIG, "here").check_layout(Layout(**layout))


def test_key_heads_are_not_cut() -> None:
    architecture = parse_architecture(CONFIG | {"linear_num_key_heads": 1}, "here")
    with pytest.raises(ModelError, match="layout.tensor=2 does not divide the model's 1 key heads"):
        architecture.check_layout(Layout(tensor=2))


def test_the_cache_of_a_row_grows_by_layers_of_attention_alone() -> None:
    architecture = parse_architecture(CONFIG, "here")
    of_attention, states = 2 * 2 * 32, 3 * (4 * 16 * 24 + 3 * (2 * 32 + 96))
    assert kv_cache_bytes_per_token(architecture, 1, 2) == 2 * of_attention
    assert kv_cache_bytes(architecture, 1, 2, 10) == 2 * (10 * of_attention + states)
    assert forward_flops(architecture, [20], 0) - 2 * forward_flops(architecture, [10], 0) == pytest.approx(
        4 * 4 * 32 * (210 - 2 * 55)
    ), "only attention's operations grow faster than a row"
