"""New scalar heads, the Bradley-Terry objective, pairs of responses, and micro-batches that keep pairs together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from end_to_end.commands import python
from hugging_face import make_model
from rlhf_megatron.data.packing import assign_rows, make_micro_batch, plan_micro_batches
from rlhf_megatron.data.prompts import DataError, PromptDataset
from rlhf_megatron.data.rollout_batch import batch_from_rows
from rlhf_megatron.data.stream import PromptStream
from rlhf_megatron.data.tokenizer_loading import load_tokenizer
from rlhf_megatron.loops.reward_modeling import batch_of_pairs, bradley_terry
from rlhf_megatron.models.architecture import ModelError, read_architecture
from rlhf_megatron.models.hf_files import CheckpointFiles
from rlhf_megatron.models.weight_map import SCORE
from rlhf_megatron.recipe import DataSection
from tiny_tokenizer import write_bpe_tokenizer


def test_a_new_head_is_drawn_from_the_seed_and_small(tmp_path: Path) -> None:
    architecture = read_architecture(make_model(tmp_path, tied=False)).with_head("scalar")
    whole = ((0, 1), (0, 64))

    def head(seed: int) -> torch.Tensor:
        with CheckpointFiles(tmp_path, architecture, seed) as files:
            return files.read(SCORE, whole)

    assert torch.equal(head(1), head(1)) and not torch.equal(head(1), head(2))
    assert 0.5 / 65 < float(head(1).std()) < 2 / 65
    with CheckpointFiles(tmp_path, architecture, 1) as files:
        assert torch.equal(files.read(SCORE, ((0, 1), (8, 16))), head(1)[:, 8:16])
    with pytest.raises(ModelError, match=r"1 of 47 tensors are missing, the first is score\.weight"):
        CheckpointFiles(tmp_path, architecture)


def test_a_head_that_is_there_is_read_and_not_drawn(tmp_path: Path) -> None:
    architecture = read_architecture(make_model(tmp_path, classifier=True)).with_head("scalar")
    with CheckpointFiles(tmp_path, architecture) as files, CheckpointFiles(tmp_path, architecture, 1) as with_seed:
        assert torch.equal(files.read(SCORE, ((0, 1), (0, 64))), with_seed.read(SCORE, ((0, 1), (0, 64))))


def test_bradley_terry_by_hand_and_by_its_gradient() -> None:
    """Chosen 1.5 against rejected 0.5 and margin 0.25, then a tie: -log sigmoid(0.75) and log 2, each of weight 1/2."""
    scores = torch.tensor([1.5, 0.5, 2.0, 2.0], dtype=torch.float64, requires_grad=True)
    fields = {
        "margins": torch.tensor([0.25, 9.0, 0.0, 9.0], dtype=torch.float64),  # the rejected rows' count for nothing
        "weights": torch.tensor([0.5, 9.0, 0.5, 9.0], dtype=torch.float64),
    }
    loss, metrics = bradley_terry(scores, fields)
    sigmoid = torch.sigmoid(torch.tensor([0.75, 0.0], dtype=torch.float64))
    assert float(loss.detach()) == pytest.approx(float(-0.5 * sigmoid.log().sum()))
    loss.backward()
    push = 0.5 * (1 - sigmoid)
    assert torch.allclose(scores.grad, torch.stack([-push, push], 1).reshape(-1))
    assert [float(part) for part in metrics["accuracy"]] == [1.5, 2.0]
    assert [float(part.detach()) for part in metrics["margin"]] == [1.0, 2.0]
    empty, _ = bradley_terry(scores[:0], {name: value[:0] for name, value in fields.items()})
    assert float(empty) == 0.0 and empty.requires_grad


@given(st.lists(st.integers(1, 30), min_size=2, max_size=40), st.integers(1, 60), st.integers(1, 4))
def test_rows_that_belong_together_stay_together(lengths: list[int], budget: int, data: int) -> None:
    lengths = lengths[: len(lengths) // 2 * 2]
    owner = assign_rows(torch.tensor(lengths), data, rows_together=2)
    own = [(owner == rank).nonzero().flatten() for rank in range(data)]
    micro_batches = [
        rows[micro].tolist()
        for rows in own
        for micro in plan_micro_batches(torch.tensor(lengths)[rows].tolist(), budget, rows_together=2)
    ]
    assert sorted(row for micro in micro_batches for row in micro) == list(range(len(lengths)))
    for micro in micro_batches:
        assert all(row % 2 == 0 and after == row + 1 for row, after in zip(micro[0::2], micro[1::2], strict=True))
        assert sum(lengths[row] for row in micro) <= budget or len(micro) == 2


def test_rows_are_read_at_their_last_token_that_is_no_padding() -> None:
    batch = batch_from_rows([[5, 6], [7], [0, 0]], [[0, 8], [9, 0, 0], []])
    fields = {"weights": torch.tensor([0.1, 0.2, 0.3])}
    micro = make_micro_batch(batch, [1, 2, 0], fields, per_row=True, pad_token_id=0, alignment=4)
    assert micro.cu_seqlens.tolist() == [0, 4, 6, 10, 12]
    assert micro.outputs.tolist() == [1, 5, 9] and micro.targets.tolist() == [9, 0, 8]
    assert micro.batch_indices.tolist() == [1, 2, 0]
    assert micro.fields["weights"].tolist() == pytest.approx([0.2, 0.3, 0.1])
    assert make_micro_batch(batch, [1], fields, per_row=True).outputs.tolist() == [3]
    nothing = make_micro_batch(batch, [], fields, per_row=True)
    assert len(nothing.outputs) == len(nothing.fields["weights"]) == 0 and len(nothing.tokens) == 1


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_pairs_are_whole_conversations_in_the_chat_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_bpe_tokenizer(tmp_path / "tokenizer"))
    prompt = [{"role": "user", "content": "What is two plus three?"}]
    rows = [
        {"prompt": prompt, "chosen": "five", "rejected": "six", "margin": 0.5},
        {"prompt": prompt, "chosen": "it is 5", "rejected": "it is 50", "margin": None},
    ]
    section = DataSection(train_files=["x"], max_prompt_length=100, shuffle=False)
    dataset = PromptDataset([write(tmp_path / "pairs.parquet", rows)], tokenizer, section, responses="pair")
    drawn = PromptStream([dataset], section, seed=1).next(2)
    batch, margins = batch_of_pairs(drawn)
    assert margins.tolist() == [0.5, 0.5, 0.0, 0.0]
    texts = [tokenizer.decode(part.tolist(), False) for part in batch.tokens.split(batch.lengths.tolist())]
    question = "<|im_start|>user\nWhat is two plus three?<|im_end|>\n<|im_start|>assistant\n"
    assert texts == [f"{question}{answer}<|im_end|>\n" for answer in ("five", "six", "it is 5", "it is 50")]
    assert drawn[0].messages == tuple(prompt) and drawn[0].response_token_ids is None

    for column, value, problem in (("margin", float("nan"), "finite number"), ("rejected", "", "response text")):
        bad = [{**rows[0], column: value}]
        with pytest.raises(DataError, match=f"row 0, column {column}: .*{problem}"):
            PromptDataset([write(tmp_path / "bad.parquet", bad)], tokenizer, section, responses="pair").read([0])


def test_prepared_pairs_reject_what_is_right_elsewhere(tmp_path: Path) -> None:
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{number} + 1 ="}],
            "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
            "extra_info": {"worked": f"{number} + 1 = {number + 1}"},
        }
        for number in (1, 1, 2, 3)
    ]
    write(tmp_path / "task.parquet", rows)
    command = ("tools/prepare_data.py", "pairs", "--input=task.parquet", "--output=pairs.parquet")
    assert python(*command, folder=tmp_path).status == 0
    made = pyarrow.parquet.read_table(tmp_path / "pairs.parquet").to_pylist()
    assert [row["chosen"] for row in made] == ["2", "2", "3", "4"]
    assert all(row["rejected"] != row["chosen"] and row["rejected"] in ("2", "3", "4") for row in made)
    assert [row["prompt"] for row in made] == [row["prompt"] for row in rows]
    assert python(*command, "--column=extra_info.worked", folder=tmp_path).status == 0
    assert pyarrow.parquet.read_table(tmp_path / "pairs.parquet").to_pylist()[2]["chosen"] == "2 + 1 = 3"
    write(tmp_path / "task.parquet", rows[:2])
    assert "every row has the same right answer" in python(*command, folder=tmp_path).only_error()
