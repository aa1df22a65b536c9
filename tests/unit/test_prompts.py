"""rlhf_megatron.data.prompts and rows: parquet files with verl's columns, what is refused of them, limits of length."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rlhf_megatron.data import rows
from rlhf_megatron.data.decoded_blocks import MOST_EXPANSION
from rlhf_megatron.data.prompts import DataError, LeftOut, Prompt, PromptDataset
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.data.tokenizer_loading import load_tokenizer
from rlhf_megatron.recipe import DataSection, make_recipe
from tiny_tokenizer import write_bpe_tokenizer

Row = dict[str, Any]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_bpe_tokenizer(tmp_path_factory.mktemp("bpe")))


def section(max_prompt_length: int = 200, **values: Any) -> DataSection:
    return DataSection(train_files=["x"], max_prompt_length=max_prompt_length, **values)


def everything(dataset: PromptDataset) -> list[Prompt | LeftOut]:
    return list(dataset.read_all())


def only(dataset: PromptDataset, row: int = 0) -> Prompt:
    [prompt] = dataset.read([row])
    assert isinstance(prompt, Prompt)
    return prompt


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


def test_verl_files_are_read_through_all_files_and_row_groups(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "BLOCK_BYTES", 1)  # a block for each row group
    files = [
        write(tmp_path / "a.parquet", [verl_row(number) for number in range(10)]),
        write(tmp_path / "b.parquet", [verl_row(number) for number in range(10, 23)]),
    ]
    dataset = PromptDataset(files, tokenizer, section())
    assert len(dataset) == 23
    assert [block.rows for block in dataset.rows.blocks] == [4, 4, 2, 4, 4, 4, 1]
    for index in (22, 0, 9, 10, 4, 13):
        prompt = only(dataset, index)
        assert prompt.row == index
        assert prompt.data_source == "openai/gsm8k"
        assert prompt.ground_truth == str(index + 1)
        assert prompt.extra_info["index"] == index
        assert prompt.response_token_ids is None
        messages = [{"role": "user", "content": f"What is {index} + 1?"}]
        assert list(prompt.token_ids) == tokenizer.encode_chat(messages)
    found = everything(dataset)
    assert found == dataset.read(range(23))
    assert dataset.read([7, 22, 3, 7]) == [found[7], found[22], found[3], found[7]]
    assert list(dataset.read_heads(6)) == [*found[:6], *found[10:16]]
    assert (dataset.rows.location(11).file, dataset.rows.location(11).row) == (str(files[1]), 1)
    assert dataset.data_sources() == ["openai/gsm8k"]


def test_small_row_groups_are_decoded_together_and_forgotten_for_others(tmp_path: Path) -> None:
    values = [{"number": number, "text": "x" * 1000 + str(number)} for number in range(6000)]
    file = write(tmp_path / "many.parquet", values, row_group_size=100)
    opened = rows.ParquetRows([file], ["number", "text"], memory_mb=1)
    assert len(opened.blocks) == 60, "a row group is more than a sixteenth of the memory"
    assert sum(block.rows for block in opened.blocks) == 6000
    wanted = [5999, 0, 3000, 1, 5998]
    for _ in range(2):
        assert [row["number"] for row in opened.take(wanted)] == wanted
    opened.take(range(6000))
    assert opened._decoded.stored_bytes <= 2**20 < sum(block.size for block in opened.blocks)
    narrow = rows.ParquetRows([file], ["number"], memory_mb=1)
    assert len(narrow.blocks) == 1, "columns that nobody reads have no weight"
    assert narrow.digest == opened.digest


@pytest.mark.parametrize(("repeated", "again"), [(5, False), (100, True)])
def test_a_window_is_decoded_once_unless_it_is_far_larger_than_its_footers_say(
    tmp_path: Path, repeated: int, again: bool
) -> None:
    """A text that many rows repeat stands in the file once."""
    values = [{"number": number, "text": f"{number // repeated:0>2500}"} for number in range(12000)]
    file = write(tmp_path / "repeated.parquet", values, row_group_size=500)
    opened = rows.ParquetRows([file], ["number", "text"], memory_mb=2)
    window = [
        index for index, size in enumerate(itertools.accumulate(block.size for block in opened.blocks)) if size <= 2**21
    ]
    spread = [opened.blocks[index].first for index in window]
    tables = [opened._block(index) for index in window]
    assert sum(table.nbytes for table in tables) > 2**21, "more than the memory, as it is decoded"
    for _ in range(3):
        assert [row["number"] for row in opened.take(spread)] == spread
    assert all(opened._block(index) is table for index, table in zip(window, tables, strict=True)) != again
    assert (opened.decoded_again > 0) == again
    assert opened._decoded.decoded_bytes <= 2**21 * MOST_EXPANSION


def test_files_with_null_fields_numbers_and_extra_columns_are_read(tokenizer: Tokenizer, tmp_path: Path) -> None:
    row = verl_row(1)
    row["prompt"] = [{"role": "user", "content": "q", "name": None}]
    row["reward_model"] = {"style": "rule", "ground_truth": 72}
    row["extra_info"] = None
    row["payload"] = [b"bytes that nobody decodes"]
    prompt = only(PromptDataset([write(tmp_path / "a.parquet", [row])], tokenizer, section()))
    assert (prompt.ground_truth, prompt.extra_info) == ("72", {})
    row["reward_model"] = {"style": "rule", "ground_truth": ["1/2", "0.5"]}
    prompt = only(PromptDataset([write(tmp_path / "b.parquet", [row])], tokenizer, section()))
    assert json.loads(prompt.ground_truth) == ["1/2", "0.5"]


def test_tool_calls_keep_the_arguments_that_they_were_written_with(tokenizer: Tokenizer, tmp_path: Path) -> None:
    calls = [
        {"function": {"name": "add", "arguments": {"numbers": [1, 2]}}},
        {"function": {"name": "root", "arguments": {"of": {"number": 9}}}},
    ]
    row = verl_row(1)
    row["prompt"] = [
        {"role": "user", "content": "What is the root of 9, and 1 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "user", "content": "They say 3 and 3. So?"},
    ]
    file = write(tmp_path / "a.parquet", [row])
    stored = pyarrow.parquet.read_table(file).to_pylist()[0]["prompt"][1]["tool_calls"][0]["function"]["arguments"]
    assert stored == {"numbers": [1, 2], "of": None}, "what parquet makes of it"
    assert list(only(PromptDataset([file], tokenizer, section())).messages) == row["prompt"]


def test_rows_outside_the_limits_of_length_are_left_out(tokenizer: Tokenizer, tmp_path: Path) -> None:
    texts = ["2 + 2?", "What is 2 + 2?", "long " * 60]
    file = write(tmp_path / "a.parquet", [verl_row(0, text) for text in texts])
    lengths = [len(tokenizer.encode_chat([{"role": "user", "content": text}])) for text in texts]
    assert lengths == sorted(set(lengths))

    def kept(**limits: int) -> list[int]:
        found = everything(PromptDataset([file], tokenizer, section(**limits)))
        return [row for row, item in enumerate(found) if item is not LeftOut.LENGTH]

    assert kept(max_prompt_length=lengths[1]) == [0, 1], "the limit itself fits"
    assert kept(max_prompt_length=lengths[1] - 1) == [0]
    assert kept(max_prompt_length=999, min_prompt_length=lengths[1]) == [1, 2]
    assert kept(max_prompt_length=999, min_prompt_length=lengths[1] + 1) == [2]
    with pytest.raises(DataError, match=rf"row 0, column prompt: {lengths[0]} tokens, under data\.min_prompt_length"):
        everything(PromptDataset([file], tokenizer, section(min_prompt_length=lengths[1], overlong_prompts="stop")))


def test_overlong_prompts_stop_with_file_row_length_and_limit(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", [verl_row(0), verl_row(1), verl_row(2, "long " * 60)])
    with pytest.raises(DataError) as caught:
        everything(PromptDataset([file], tokenizer, section(max_prompt_length=40, overlong_prompts="stop")))
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
        (
            "prompt",
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
            "row 1, column prompt: the last message is the assistant's; its turn must come next",
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
        everything(PromptDataset([file], tokenizer, section()))
    assert str(caught.value).startswith(f"{file}, {problem}")
    assert "\n" not in str(caught.value)


def test_columns_of_the_wrong_type_are_told(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = write(tmp_path / "text.parquet", [verl_row(0) | {"prompt": "What is 1 + 1?"}])
    with pytest.raises(DataError, match="row 0, column prompt: str instead of a list"):
        everything(PromptDataset([text], tokenizer, section()))
    nested = write(tmp_path / "nested.parquet", [verl_row(0) | {"data_source": {"name": "sums"}}])
    with pytest.raises(DataError, match=r"row 0, column data_source: \{'name': 'sums'\} instead of a name"):
        everything(PromptDataset([nested], tokenizer, section()))
    images = write(
        tmp_path / "images.parquet", [verl_row(0) | {"prompt": [{"role": "user", "content": [{"type": "image"}]}]}]
    )
    with pytest.raises(DataError, match="message 0 has content of type list instead of text"):
        everything(PromptDataset([images], tokenizer, section()))


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

    def opened(path: Path = file, **values: Any) -> PromptDataset:
        return PromptDataset([path], tokenizer, section(**values), responses="one")

    for column, text in ((None, "4"), ("extra_info.answer", "It is 4.\n#### 4")):
        dataset = opened(response_column=column)
        assert only(dataset, 3).response_token_ids == (*tokenizer.encode(text), tokenizer.eos_token_id)
    plain = write(tmp_path / "plain.parquet", [{"prompt": verl_row(0)["prompt"], "target": "one"}])
    prompt = only(opened(plain, response_column="target"))
    assert prompt.response_token_ids == (*tokenizer.encode("one"), tokenizer.eos_token_id)
    assert (prompt.data_source, prompt.ground_truth) == ("", "")
    with pytest.raises(DataError, match=r"row 0, column extra_info\.solution: None instead of a response text"):
        everything(opened(response_column="extra_info.solution"))
    longest = len(tokenizer.encode("It is 4.\n#### 4")) + 1
    for limit, kept in ((longest, 5), (longest - 1, 0)):
        found = everything(opened(response_column="extra_info.answer", max_response_length=limit))
        assert sum(isinstance(item, Prompt) for item in found) == kept
    with pytest.raises(DataError, match=r"column reward_model\.ground_truth: 2 tokens, over data\.max_response_length"):
        everything(opened(overlong_prompts="stop", max_response_length=1))


@pytest.mark.parametrize("loop", ["sft", "reward_modeling"])
def test_the_longest_row_that_is_kept_is_as_long_as_the_recipe_says(
    tokenizer: Tokenizer, tmp_path: Path, loop: str
) -> None:
    answers = {"chosen": "It is 1.", "rejected": "No, it is 2, or is it 3?"}
    row = verl_row(0) | answers | {"reward_model": {"ground_truth": answers["rejected"]}}
    file = write(tmp_path / "a.parquet", [row])
    of_pairs = loop == "reward_modeling"

    def opened(section: DataSection) -> PromptDataset:
        return PromptDataset([file], tokenizer, section, responses="pair" if of_pairs else "one")

    prompt = only(opened(section()))
    longest = max(map(len, prompt.pair or [prompt.response_token_ids or ()]))
    values: dict[str, Any] = {
        "name": "longest",
        "loop": loop,
        "steps": 1,
        "model": {"path": "model", "dtype": "float32"},
        "data": section(len(prompt.token_ids), max_response_length=longest).model_dump(),
        "batch": {"prompts_per_step": 1},
        "actor": {"tokens_per_gpu": 1, "optimizer": {"learning_rate": 1e-4}},
    }
    recipe = make_recipe(values, "test")
    kept = only(opened(recipe.data))
    assert recipe.longest_sequence == (longest if of_pairs else len(kept.token_ids) + longest)


def test_a_system_prompt_is_put_before_conversations_that_have_none(tokenizer: Tokenizer, tmp_path: Path) -> None:
    talk = [
        {"role": "user", "content": "What is two plus three?"},
        {"role": "assistant", "content": "five"},
        {"role": "user", "content": "And 48 + 1?"},
    ]
    own = [{"role": "system", "content": "Be short."}, *talk]
    file = write(tmp_path / "a.parquet", [verl_row(0) | {"prompt": talk}, verl_row(0) | {"prompt": own}])
    dataset = PromptDataset([file], tokenizer, section(system_prompt="Use digits."))
    expected = [{"role": "system", "content": "Use digits."}, *talk]
    assert only(dataset, 0).messages == tuple(expected)
    assert list(only(dataset, 0).token_ids) == tokenizer.encode_chat(expected)
    assert only(dataset, 1).messages == tuple(own)
    assert list(only(dataset, 1).token_ids) == tokenizer.encode_chat(own)


def test_numbers_of_a_column_are_read_and_bad_ones_told(tmp_path: Path) -> None:
    def opened(values: list[Any]) -> rows.ParquetRows:
        table = [{"extra_info": {"difficulty": value, "note": "x"}, "level": value} for value in values]
        return rows.ParquetRows([write(tmp_path / "a.parquet", table, row_group_size=2)], ["extra_info"])

    for values in ([3, 1, 2], [0.5, -1.0, 2.5]):
        for column in ("extra_info.difficulty", "level"):
            assert opened(values).numbers(column).tolist() == values
    assert opened([2**60 + 1, -(2**60)]).numbers("level").tolist() == [2.0**60, -(2.0**60)]
    where = r"a\.parquet, row 2, column extra_info\.difficulty: no finite number, and 2 rows in all have none"
    for bad in (None, float("nan"), float("inf")):
        with pytest.raises(DataError, match=where):
            opened([1.0, 2.0, bad, 0.0, bad]).numbers("extra_info.difficulty")
    for column in ("extra_info.hardness", "hardness", "level.x", "extra_info.note.x"):
        with pytest.raises(DataError, match=rf"a\.parquet, column {column}: missing; the file has extra_info, level"):
            opened([1]).numbers(column)
    with pytest.raises(DataError, match=r"column extra_info\.note: string instead of numbers"):
        opened([1]).numbers("extra_info.note")
