"""Which rank writes which file of an export: pure functions of a model and ranks."""

from __future__ import annotations

from pathlib import Path

import torch

from rlhf_megatron.checkpoint.hugging_face import PORTION_BYTES, portions_of, stored_in_order, writers_of
from rlhf_megatron.models.architecture import read_architecture
from rlhf_megatron.models.file_form import FileForm
from rlhf_megatron.models.hf_export import SHARD_BYTES, in_runs, shard_names

RECIPES = Path(__file__).parents[2] / "recipes/models"


def test_files_go_to_ranks_far_from_each_other() -> None:
    assert writers_of([7, 7], range(16)) == [4, 12]
    assert writers_of([9], [3]) == [3]
    assert writers_of([5], range(8)) == [4]


def test_writers_have_about_as_much_to_do() -> None:
    sizes = [8, 1, 5, 4, 2, 4]
    writers = writers_of(sizes, [2, 3])
    assert {
        rank: sum(size for size, writer in zip(sizes, writers, strict=True) if writer == rank) for rank in (2, 3)
    } == {
        2: 12,
        3: 12,
    }


def test_a_run_is_ended_by_what_does_not_fit() -> None:
    assert list(in_runs([3, 3, 9, 1, 1], lambda size: size, 6)) == [[3, 3], [9], [1, 1]]
    assert list(in_runs([], lambda size: size, 6)) == []


def test_a_thousand_ranks_write_a_large_model_in_a_few_rounds() -> None:
    tensors = stored_in_order(read_architecture(RECIPES / "deepseek-v3"), torch.bfloat16, FileForm())
    shards = list(in_runs(tensors, lambda tensor: tensor.nbytes, SHARD_BYTES))
    portions = portions_of(dict(zip(shard_names(len(shards)), shards, strict=True)), range(1024))
    assert len(portions) == len(shards) > 300
    assert max(map(len, portions.values())) <= 2 * SHARD_BYTES // PORTION_BYTES
    received = [tensor.name for shares in portions.values() for each in shares for tensor in each.tensors]
    assert sorted(received) == sorted(tensor.name for tensor in tensors)
    assert all(
        [each.is_last for each in shares] == [False] * (len(shares) - 1) + [True] for shares in portions.values()
    )
