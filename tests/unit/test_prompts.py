"""rlhf_megatron.data.prompts and rows: parquet files with verl's columns, the over-long filter, order and resume."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rlhf_megatron.data.prompts import DataError, PromptDataset, PromptStream
from rlhf_megatron.data.tokenizer import Tokenizer, load_tokenizer
from tiny_tokenizer import write_bpe_tokenizer

ORDER_OF_SEED_1 = [9, 2, 4, 7, 5, 0, 8, 6, 3, 1]
Row = dict[str, Any]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_bpe_tokenizer(tmp_path_factory.mktemp("bpe")))


def section(max_prompt_length: int = 200, overlong_prompts: str = "drop", response_column: str | None = None) -> Any:
    return SimpleNamespace(
        max_prompt_length=max_prompt_length, overlong_prompts=overlong_prompts, response_column=response_column
    )


def verl_row(number: int, question: str = "What is {} + 1?") -> Row:
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": question.format(number)}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"index": number, "split": "train", "answer": f"It is {number + 1}.\n#### {number + 1}"},
    }


def write(path: Path, rows: list[Row], row_group_size: int = 4) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return path


def test_verl_files_are_read_through_all_files_and_row_groups(tokenizer: Tokenizer, tmp_path: Path) -> None:
    files = [
        write(tmp_path / "a.parquet", [verl_row(number) for number in range(10)]),
        write(tmp_path / "b.parquet", [verl_row(number) for number in range(10, 23)]),
    ]
    dataset = PromptDataset(files, tokenizer, section())
    assert len(dataset) == 23
    assert dataset.dropped == 0
    for index in (22, 0, 9, 10, 4, 13):
        prompt = dataset[index]
        assert prompt.row == index
        assert prompt.data_source == "openai/gsm8k"
        assert prompt.ground_truth == str(index + 1)
        assert prompt.extra_info["index"] == index
        assert prompt.response_token_ids is None
        messages = [{"role": "user", "content": f"What is {index} + 1?"}]
        assert list(prompt.token_ids) == tokenizer.encode_chat(messages)
    assert dataset.rows([7, 3, 7]) == [dataset[7], dataset[3], dataset[7]]
    assert (dataset.place(11).file, dataset.place(11).row) == (str(files[1]), 1)
    assert dataset.lengths().tolist() == [len(dataset[index].token_ids) for index in range(23)]
    assert dataset.data_sources() == ["openai/gsm8k"]
    with pytest.raises(IndexError):
        dataset[23]


def test_files_with_null_fields_numbers_and_extra_columns_are_read(tokenizer: Tokenizer, tmp_path: Path) -> None:
    row = verl_row(1)
    row["prompt"] = [{"role": "user", "content": "q", "name": None}]
    row["reward_model"] = {"style": "rule", "ground_truth": 72}
    row["extra_info"] = None
    row["images"] = [b"bytes that nobody decodes"]
    prompt = PromptDataset([write(tmp_path / "a.parquet", [row])], tokenizer, section())[0]
    assert (prompt.ground_truth, prompt.extra_info) == ("72", {})
    row["reward_model"] = {"style": "rule", "ground_truth": ["1/2", "0.5"]}
    prompt = PromptDataset([write(tmp_path / "b.parquet", [row])], tokenizer, section())[0]
    assert json.loads(prompt.ground_truth) == ["1/2", "0.5"]


def test_overlong_prompts_are_dropped_and_counted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [verl_row(number) for number in range(6)]
    rows[2] = verl_row(2, "long " * 60)
    file = write(tmp_path / "a.parquet", rows)
    dataset = PromptDataset([file], tokenizer, section(max_prompt_length=40))
    assert (len(dataset), dataset.dropped) == (5, 1)
    assert [dataset[index].ground_truth for index in range(5)] == ["1", "2", "4", "5", "6"]
    assert dataset.place(2).row == 3
    longest = max(dataset.lengths())
    assert (
        PromptDataset([file], tokenizer, section(max_prompt_length=int(longest))).dropped == 1
    )  # the limit itself fits
    with pytest.raises(DataError, match="all 6 rows are too long"):
        PromptDataset([file], tokenizer, section(max_prompt_length=2))


def test_overlong_prompts_stop_with_file_row_length_and_limit(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", [verl_row(0), verl_row(1), verl_row(2, "long " * 60)])
    with pytest.raises(DataError) as caught:
        PromptDataset([file], tokenizer, section(max_prompt_length=40, overlong_prompts="stop"))
    length = len(tokenizer.encode_chat(verl_row(2, "long " * 60)["prompt"]))
    assert str(caught.value).startswith(
        f"{file}, row 2, column prompt: {length} tokens, over data.max_prompt_length = 40"
    )


@pytest.mark.parametrize(
    ("column", "value", "problem"),
    [
        ("prompt", [], "row 1, column prompt: empty; give at least one message"),
        ("prompt", None, "row 1, column prompt: empty; give at least one message"),
        ("prompt", [{"role": "user", "content": "  "}], "row 1, column prompt: every message is empty"),
        ("prompt", [{"role": "user", "content": None}], "row 1, column prompt: message 0 has content of type NoneType"),
        (
            "prompt",
            [{"role": "tool", "content": "x"}],
            "row 1, column prompt: the chat template refuses these messages",
        ),
        ("data_source", None, "row 1, column data_source: None instead of a name"),
        (
            "reward_model",
            {"style": "rule", "ground_truth": None},
            "row 1, column reward_model: ground_truth is missing",
        ),
        ("reward_model", None, "row 1, column reward_model: NoneType instead of a struct"),
    ],
)
def test_bad_rows_are_told_with_file_row_and_column(
    tokenizer: Tokenizer, tmp_path: Path, column: str, value: Any, problem: str
) -> None:
    bad = verl_row(1) | {column: value}
    file = write(tmp_path / "bad.parquet", [verl_row(0), bad])
    with pytest.raises(DataError) as caught:
        PromptDataset([file], tokenizer, section())
    assert str(caught.value).startswith(f"{file}, {problem}")
    assert "\n" not in str(caught.value)


def test_columns_of_the_wrong_type_are_told(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = write(tmp_path / "text.parquet", [verl_row(0) | {"prompt": "What is 1 + 1?"}])
    with pytest.raises(DataError, match="row 0, column prompt: str instead of a list"):
        PromptDataset([text], tokenizer, section())
    images = write(
        tmp_path / "images.parquet", [verl_row(0) | {"prompt": [{"role": "user", "content": [{"type": "image"}]}]}]
    )
    with pytest.raises(DataError, match="message 0 has content of type list instead of text"):
        PromptDataset([images], tokenizer, section())


def test_bad_files_are_told(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data files are given"):
        PromptDataset([], tokenizer, section())
    with pytest.raises(DataError, match=r"nowhere\.parquet: there is no such file"):
        PromptDataset([tmp_path / "nowhere.parquet"], tokenizer, section())
    (tmp_path / "rows.jsonl").write_text("{}\n" * 10)
    with pytest.raises(DataError, match=r"rows\.jsonl: not a readable parquet file"):
        PromptDataset([tmp_path / "rows.jsonl"], tokenizer, section())
    row = verl_row(0)
    del row["reward_model"]
    with pytest.raises(DataError, match="column reward_model: missing; the file has data_source, prompt"):
        PromptDataset([write(tmp_path / "less.parquet", [row])], tokenizer, section())
    empty = pyarrow.Table.from_pylist([verl_row(0)]).slice(0, 0)
    pyarrow.parquet.write_table(empty, tmp_path / "empty.parquet")
    with pytest.raises(DataError, match="no rows"):
        PromptDataset([tmp_path / "empty.parquet"], tokenizer, section())


def test_supervised_rows_carry_response_and_eos(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", [verl_row(number) for number in range(5)])
    for column, text in ((None, "4"), ("extra_info.answer", "It is 4.\n#### 4")):
        dataset = PromptDataset([file], tokenizer, section(response_column=column), with_response=True)
        assert dataset[3].response_token_ids == (*tokenizer.encode(text), tokenizer.eos_token_id)
    plain = write(tmp_path / "plain.parquet", [{"prompt": verl_row(0)["prompt"], "target": "one"}])
    prompt = PromptDataset([plain], tokenizer, section(response_column="target"), with_response=True)[0]
    assert prompt.response_token_ids == (*tokenizer.encode("one"), tokenizer.eos_token_id)
    assert (prompt.data_source, prompt.ground_truth) == ("", "")
    with pytest.raises(DataError, match=r"row 0, column extra_info\.solution: None instead of a response text"):
        PromptDataset([file], tokenizer, section(response_column="extra_info.solution"), with_response=True)
    short = PromptDataset(
        [file], tokenizer, section(response_column="extra_info.answer"), with_response=True, max_response_length=500
    )
    assert short.dropped == 0
    with pytest.raises(DataError, match="over the response limit = 1"):
        PromptDataset([file], tokenizer, section(overlong_prompts="stop"), with_response=True, max_response_length=1)


@pytest.fixture
def dataset(tokenizer: Tokenizer, tmp_path: Path) -> PromptDataset:
    return PromptDataset([write(tmp_path / "a.parquet", [verl_row(n) for n in range(10)])], tokenizer, section())


def test_stream_gives_every_prompt_once_per_epoch_in_a_new_order(dataset: PromptDataset) -> None:
    stream = PromptStream(dataset, seed=3)
    rows = [prompt.row for _ in range(10) for prompt in stream.next(3)]  # three epochs: batches cross their borders
    epochs = [rows[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert stream.epoch == 3
    assert [prompt.row for prompt in PromptStream(dataset, seed=3).next(30)] == rows
    assert [prompt.row for prompt in PromptStream(dataset, seed=4).next(30)] != rows
    assert [prompt.row for prompt in PromptStream(dataset, seed=3, shuffle=False).next(12)] == [*range(10), 0, 1]


def test_order_never_changes_between_versions(dataset: PromptDataset) -> None:
    assert [prompt.row for prompt in PromptStream(dataset, seed=1).next(10)] == ORDER_OF_SEED_1


def test_stream_resumes_where_it_stopped(dataset: PromptDataset) -> None:
    stream = PromptStream(dataset, seed=5)
    stream.next(4)
    stream.next(4)
    state = json.loads(json.dumps(stream.state()))  # as a checkpoint would keep it
    expected = [prompt.row for _ in range(5) for prompt in stream.next(4)]
    resumed = PromptStream(dataset, seed=5)
    resumed.next(2)
    resumed.load(state)
    assert [prompt.row for _ in range(5) for prompt in resumed.next(4)] == expected


def test_resume_with_other_data_seed_or_order_is_refused(dataset: PromptDataset) -> None:
    state = PromptStream(dataset, seed=5).state()
    with pytest.raises(DataError, match="saved with seed 5 but this run has 6"):
        PromptStream(dataset, seed=6).load(state)
    with pytest.raises(DataError, match=r"saved with data\.shuffle True"):
        PromptStream(dataset, seed=5, shuffle=False).load(state)
    with pytest.raises(DataError, match="saved with usable rows 11 but this run has 10"):
        PromptStream(dataset, seed=5).load(state | {"rows": 11})
    with pytest.raises(ValueError, match="cannot draw 0 prompts"):
        PromptStream(dataset, seed=5).next(0)
