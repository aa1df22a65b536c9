"""Context parallelism of packed rows: every token and every output is some rank's, and the work is even."""

from __future__ import annotations

import pytest
import torch

from hugging_face import random_rows
from rlhf_megatron.data.context_parallel import part_of, tokens_of_part
from rlhf_megatron.data.packing import MicroBatch, make_micro_batch
from rlhf_megatron.data.rollout_batch import batch_from_rows


def micro_batch(parts: int, rows: list[int], per_row: bool = False, tensor: int = 1) -> MicroBatch:
    batch = batch_from_rows(*random_rows(5, 250))
    fields = {"place": torch.arange(batch.rows if per_row else len(batch.tokens))}
    return make_micro_batch(batch, rows, fields, per_row=per_row, row_alignment=2 * parts, alignment=2 * parts * tensor)


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_every_token_is_on_one_rank_and_causal_work_is_even(parts: int) -> None:
    whole = micro_batch(parts, [3, 0, 4])
    held = [tokens_of_part(whole.cu_seqlens, parts, part) for part in range(parts)]
    assert torch.cat(held).sort().values.tolist() == list(range(len(whole.tokens)))
    pairs = {int((whole.positions[places] + 1).sum()) for places in held}  # (query, key) pairs of causal attention
    assert len(pairs) == 1
    assert tokens_of_part(torch.tensor([0, 8, 12]), 2, 1).tolist() == [2, 3, 4, 5, 9, 10]


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("rows", [[3, 0, 4], [2], []])
def test_every_output_is_read_once_and_is_the_same_token(rows: list[int], per_row: bool) -> None:
    parts = 2
    whole = micro_batch(parts, rows, per_row, tensor=2)
    cut = [part_of(whole, parts, part) for part in range(parts)]
    assert torch.cat([micro.kept for micro in cut]).sort().values.tolist() == list(range(len(whole.outputs)))
    for micro in cut:
        assert len(micro.tokens) * parts == len(whole.tokens) and len(micro.tokens) % 2 == 0
        assert torch.equal(micro.tokens[micro.outputs], whole.tokens[whole.outputs][micro.kept])
        assert torch.equal(micro.positions[micro.outputs], whole.positions[whole.outputs][micro.kept])
        assert torch.equal(micro.targets, whole.targets[micro.kept])
        assert torch.equal(micro.batch_indices, whole.batch_indices) and torch.equal(
            micro.fields["place"], whole.batch_indices
        )


def test_padded_rows_read_what_rows_without_padding_read() -> None:
    batch = batch_from_rows(*random_rows(5, 250))
    plain, padded = make_micro_batch(batch, [1, 3, 4], {}), micro_batch(4, [1, 3, 4])
    assert (padded.cu_seqlens.diff() % 8 == 0).all() and len(padded.tokens) > len(plain.tokens)
    for name in ("tokens", "positions"):
        of_plain, of_padded = getattr(plain, name), getattr(padded, name)
        assert torch.equal(of_plain[plain.outputs], of_padded[padded.outputs])
    assert torch.equal(plain.targets, padded.targets) and torch.equal(plain.batch_indices, padded.batch_indices)
