"""tools/prepare_data.py import: files of others become verl's columns, or one line says which row is wrong."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import prepare_data
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from rlhf_megatron.data import foreign_files
from rlhf_megatron.data.foreign_files import data_files, split_files
from rlhf_megatron.data.prepared_rows import write_rows
from rlhf_megatron.errors import DataError

Row = dict[str, Any]
ROWS = [{"question": f"What is {n} + 1?", "answer": str(n + 1), "level": {"name": "easy"}} for n in range(3)]
FIELDS = ["--prompt-field", "question", "--answer-field", "answer"]


def write_jsonl(path: Path, rows: list[Row] = ROWS) -> None:
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))


def write_csv(path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, ["question", "answer", "level"])
        writer.writeheader()
        writer.writerows(ROWS)


def write_tsv(path: Path) -> None:
    lines = ["\t".join(map(str, row.values())) for row in ROWS]
    path.write_text("\n".join(["question\tanswer\tlevel", *lines]))


def write_list(path: Path) -> None:
    path.write_text("\ufeff\n" + json.dumps(ROWS, indent=2), encoding="utf-8")


def write_compressed(path: Path) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))


def write_parquet(path: Path, rows: list[Row] = ROWS) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def write_arrow_stream(path: Path) -> None:
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, 2)


def write_arrow_file(path: Path) -> None:
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, 2)


def imported(source: Path, *options: str) -> list[Row]:
    """Return the rows that the command writes, run in this process."""
    output = source.parent / "imported.parquet"
    arguments = ["import", "--input", str(source), "--output", str(output), *options]
    made = prepare_data.build_parser().parse_args(arguments)
    write_rows(made.make_rows(made), output)
    rows: list[Row] = pyarrow.parquet.read_table(output).to_pylist()
    return rows


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("sums.jsonl", write_jsonl),
        ("sums.json", write_list),
        ("sums.jsonl.gz", write_compressed),
        ("sums.csv", write_csv),
        ("sums.tsv", write_tsv),
        ("sums.parquet", write_parquet),
        ("sums.arrow", write_arrow_stream),
        ("sums.arrow", write_arrow_file),
    ],
)
def test_every_format_becomes_the_same_rows(tmp_path: Path, name: str, write: Any) -> None:
    write(tmp_path / name)
    rows = imported(tmp_path / name, *FIELDS, "--system", "Be short.", "--split", "train")
    assert rows == [
        {
            "data_source": "sums",
            "prompt": [{"role": "system", "content": "Be short."}, {"role": "user", "content": row["question"]}],
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"split": "train", "index": index, "question": row["question"]},
        }
        for index, row in enumerate(ROWS)
    ]


def test_messages_paths_and_kept_columns(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]
    write_jsonl(tmp_path / "chat.jsonl", [{"messages": chat, "asked": {"as": chat[:1], "right": [1, "2"]}, "other": 1}])
    options = ["--prompt-field", "asked.as", "--answer-field", "asked.right", "--data-source", "x/y"]
    [row] = imported(tmp_path / "chat.jsonl", *options)
    assert (row["prompt"], row["data_source"]) == (chat[:1], "x/y")
    assert json.loads(row["reward_model"]["ground_truth"]) == [1, "2"]
    [row] = imported(tmp_path / "chat.jsonl", "--keep", "messages")
    assert row["messages"] == chat and set(row) == {"messages", "data_source", "extra_info"}
    write_jsonl(tmp_path / "sums.jsonl")
    assert len(imported(tmp_path / "sums.jsonl", *FIELDS, "--size", "2")) == 2
    held_out = tmp_path / "held_out.parquet"
    (tmp_path / "imported.parquet").rename(held_out)
    assert len(imported(tmp_path / "sums.jsonl", *FIELDS, "--exclude", str(held_out))) == 1


SPOKEN = [
    {"from": "system", "value": "Be short."},
    {"from": "human", "value": "a?"},
    {"from": "gpt", "value": "b", "weight": 1},
    {"from": "user", "value": "c?"},
    {"from": "assistant", "value": ""},
]


@pytest.mark.parametrize(("name", "write"), [("chat.jsonl", write_jsonl), ("chat.parquet", write_parquet)])
def test_conversations_of_share_gpt_become_messages(tmp_path: Path, name: str, write: Any) -> None:
    written = [
        {"role": role, "content": turn["value"]}
        for role, turn in zip(("system", "user", "assistant", "user", "assistant"), SPOKEN, strict=True)
    ]
    write(tmp_path / name, [{"id": "x_0", "conversations": SPOKEN}, {"id": "x_1", "conversations": SPOKEN[1:3]}])
    rows = imported(tmp_path / name, "--keep", "messages")
    assert [row["messages"] for row in rows] == [written, written[1:3]]
    assert set(rows[0]) == {"messages", "data_source", "extra_info"}
    both = [{"conversations": SPOKEN, "messages": written[1:3]}]
    write_jsonl(tmp_path / "both.jsonl", both)
    assert imported(tmp_path / "both.jsonl", "--keep", "messages")[0]["messages"] == written[1:3]


@pytest.mark.parametrize(
    ("conversations", "problem"),
    [
        (
            [SPOKEN[1], {"from": "bot", "value": "b"}],
            "turn 1 is from 'bot', and known are system, human, user, gpt, chatgpt, assistant; rename it, or remove",
        ),
        ([SPOKEN[1], {"role": "gpt", "value": "b"}], "turn 1 is from None, and known are system, human"),
        ([{"from": ["gpt"], "value": "b"}], "turn 0 is from ['gpt'], and known are system, human"),
        ([{"from": "gpt", "value": 3}], "message 0 has content of type int instead of text"),
        (["Hello"], "turn 0 is 'Hello' instead of {from, value}"),
        ("Hello", "'Hello' instead of a list of {from, value}; remove the row"),
        ([], "empty; give at least one message"),
    ],
)
def test_conversations_of_others_are_refused(tmp_path: Path, conversations: Any, problem: str) -> None:
    write_jsonl(tmp_path / "chat.jsonl", [{"conversations": SPOKEN}, {"conversations": conversations}])
    with pytest.raises(DataError) as told:
        imported(tmp_path / "chat.jsonl", "--keep", "messages")
    assert f"chat.jsonl, row 1, column conversations: {problem}" in str(told.value) and "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("name", "content", "options", "problem"),
    [
        (
            "a.jsonl",
            '{"question": "x"}\n',
            FIELDS,
            "row 0, column answer: no answer; write one, or remove the row; the row has question",
        ),
        ("a.jsonl", '{"q": "x"}\n', FIELDS, "a.jsonl, row 0, column question: None instead of a text"),
        ("a.jsonl", '{"question": 3, "answer": "x"}\n', FIELDS, "row 0, column question: 3 instead of a text"),
        ("a.jsonl", '{"question": "x", "answer": "1"}\n{"q', FIELDS, "a.jsonl, line 2: not JSON"),
        (
            "a.csv",
            "question,answer\nx,1\ny\n",
            FIELDS,
            "a.csv, row 1, column question: the row has 1 fields instead of 2",
        ),
        ("a.csv", "question,question\nx,1\n", FIELDS, "a.csv: its first line must name the columns"),
        ("a.csv", 'question,answer\n"x,1\n', FIELDS, "a.csv is not csv"),
        ("a.parquet", "PAR1", FIELDS, "a.parquet: not a readable parquet file"),
        ("a.arrow", "ARROW1", FIELDS, "a.arrow cannot be read"),
        ("a.xml", "<a/>", FIELDS, "a.xml is none of .parquet, .jsonl"),
        ("a.jsonl", '{"question": "x"}\n', [], "--prompt-field: name the field"),
        (
            "a.jsonl",
            '{"question": "x"}\n',
            ["--keep", "messages"],
            "row 0, column messages: missing; the row has question",
        ),
        ("a.jsonl", '{"question": "x", "images": ["p"]}\n', FIELDS, "row 0, column images: only text is imported"),
        ("a.CSV", "question,answer,image_1\nx,1,\ny,2,p\n", FIELDS, "row 1, column image_1: only text is imported"),
        ("a.jsonl", '{"question": "x", "plot": [{"bytes": "p", "path": null}]}\n', FIELDS, "row 0, column plot: only"),
        ("a.jsonl", '{"question": [{"role": "user"}]}\n', FIELDS, "column question: message 0 has content of type"),
        (
            "a.jsonl",
            '{"question": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "1"}], "answer": "1"}\n',
            FIELDS,
            "row 0, column question: ends with the assistant's turn, which is no prompt; --keep messages is for sft",
        ),
        ("a.jsonl", "", FIELDS, "a.jsonl: has no rows but those of --exclude"),
        (
            "a.jsonl",
            '{"question": "x", "answer": "1"}\n',
            [*FIELDS, "--size", "2"],
            "1 rows are left, 2 were asked for; lower --size",
        ),
        (
            "a.jsonl",
            '{"messages": [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "x"}]}\n',
            ["--keep", "messages"],
            "column messages: its values make no column of parquet (cannot mix list and non-list",
        ),
        ("a.jsonl", '{"a": 1, "b": 2}\n{"a": 1, "b": "x"}\n', ["--keep", "a", "b"], "column b: its values make no"),
        ("a.jsonl", '{"a": 9999999999999999999999}\n', ["--keep", "a"], "column a: its values make no column"),
        ("a.jsonl", '{"a": {}}\n', ["--keep", "a"], "column a: its values make no column"),
        ("a.json", '[{"question": "x", "answer": "1"}, 2]', FIELDS, "a.json, row 1: int instead of a JSON object"),
        ("a.json", '[{"question": "x"}', FIELDS, "a.json: not valid JSON"),
        ("a.jsonl.gz", '{"question": "x"}', FIELDS, "a.jsonl.gz cannot be read (Not a gzipped file"),
        ("a.parquet.gz", "PAR1", FIELDS, "a.parquet.gz is none of .parquet"),
    ],
)
def test_one_line_says_what_is_wrong(tmp_path: Path, name: str, content: str, options: list[str], problem: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as told:
        imported(tmp_path / name, *options)
    assert problem in str(told.value) and "\n" not in str(told.value)


def test_what_is_imported_is_not_written_over(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl")
    before = (tmp_path / "train.jsonl").read_bytes()
    for given in ("train.jsonl", "."):
        asked = ["import", "--input", str(tmp_path / given), *FIELDS, "--output", f"{tmp_path}/x/../train.jsonl"]
        (tmp_path / "x").mkdir(exist_ok=True)
        made = prepare_data.build_parser().parse_args(asked)
        with pytest.raises(DataError, match=r"--output: .*train\.jsonl is one of the files to import; choose another"):
            made.make_rows(made)
    assert (tmp_path / "train.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["gsm8k", "nowhere.jsonl", "openai/gsm8k@main", "hf://datasets/openai/gsm8k"])
def test_what_is_neither_here_nor_a_name_of_the_hub(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--input: there is no file or folder .*; a data set on the hub is OWNER/NAME"):
        made = prepare_data.build_parser().parse_args(["import", "--input", name, *FIELDS, "--output", "x.parquet"])
        made.make_rows(made)


def test_a_compressed_file_that_ends_early_is_one_line(tmp_path: Path) -> None:
    for name, text in (("a.jsonl.gz", json.dumps(ROWS[0])), ("a.csv.gz", "question,answer\nx,1\n")):
        (tmp_path / name).write_bytes(gzip.compress(text.encode())[:-12])
        with pytest.raises(DataError, match="end-of-stream"):
            imported(tmp_path / name, *FIELDS)


def test_a_long_list_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_list(tmp_path / "a.json")
    monkeypatch.setattr(foreign_files, "MOST_LIST_BYTES", 100)
    with pytest.raises(DataError, match=r"a list of over 100 bytes; write an object per line: jq -c"):
        imported(tmp_path / "a.json", *FIELDS)


def test_images_of_parquet_are_dropped_only_if_that_is_asked_for(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", [row | {"images": [b"png"]} for row in ROWS])
    with pytest.raises(DataError, match=r"a\.parquet, row 0, column images: only text is imported"):
        imported(tmp_path / "a.parquet", *FIELDS)
    assert len(imported(tmp_path / "a.parquet", *FIELDS, "--drop-images")) == 3


@pytest.mark.parametrize(("column", "value"), [("image_1", b"png"), ("plot", {"bytes": b"png", "path": None})])
def test_media_are_known_by_number_and_by_form(tmp_path: Path, column: str, value: Any) -> None:
    rows = [row | {column: None if number == 0 else value} for number, row in enumerate(ROWS)]
    write_parquet(tmp_path / "a.parquet", rows)
    table = pyarrow.parquet.read_table(tmp_path / "a.parquet")
    with pyarrow.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as stream:
        stream.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        with pytest.raises(DataError, match=rf"{name}, row 1, column {column}: only text is imported"):
            imported(tmp_path / name, *FIELDS)
        assert len(imported(tmp_path / name, *FIELDS, "--drop-images")) == 3


FILES = ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000-of-00001.parquet"]
CARD = {
    "configs": [
        {"config_name": "main", "data_files": [{"split": "train", "path": "main/train-*"}]},
        {"config_name": "socratic", "data_files": [{"split": "train", "path": ["socratic/**/*.parquet"]}]},
    ]
}
SUBSETS = ["main/train-0.parquet", "main/test-0.parquet", "socratic/train-0.parquet", "README.md"]


def test_files_of_a_split_are_found_as_the_hub_finds_them() -> None:
    assert split_files(FILES, {}, "train", None, "x") == FILES[:2]
    assert split_files(FILES, {}, "test", None, "x") == FILES[2:]
    assert split_files(["a.jsonl", "b.csv"], {}, "train", None, "x") == ["a.jsonl", "b.csv"]
    assert split_files(["a/train.jsonl.gz", "b/train.jsonl.gz"], {}, "train", "b", "x") == ["b/train.jsonl.gz"]
    assert split_files(SUBSETS, CARD, "train", "main", "x") == SUBSETS[:1]
    assert split_files(SUBSETS, CARD, "train", "socratic", "x") == SUBSETS[2:3]
    assert split_files(SUBSETS, {}, "train", "socratic", "x") == SUBSETS[2:3]
    assert split_files(
        ["a.jsonl"], {"configs": [{"config_name": "default", "data_files": "*.jsonl"}]}, "train", None, "x"
    )
    for files, card, split, config, problem in (
        (FILES, {}, "validation", None, "--from-split: x has no files of validation; it has data/train"),
        (SUBSETS, CARD, "train", None, "--config: x has several subsets; name one of main, socratic"),
        (SUBSETS, CARD, "train", "other", "--config: x has no subset other; name one of main, socratic"),
    ):
        with pytest.raises(DataError, match=problem):
            split_files(files, card, split, config, "x")


def test_a_folder_with_a_card(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    (folder / "main").mkdir(parents=True)
    write_parquet(folder / "main" / "train-0.parquet")
    (folder / "README.md").write_text(f"---\n{json.dumps(CARD)}\n---\n# Text\n")
    assert data_files(folder, "train", "main") == [folder / "main" / "train-0.parquet"]
    assert len(imported(folder, *FIELDS, "--config", "main")) == 3
    (folder / "README.md").write_text("---\n{\n---\n")
    with pytest.raises(DataError, match="README.md: its head is not YAML"):
        data_files(folder, "train")


def test_a_folder_that_datasets_saved(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    split = datasets.Dataset.from_list(ROWS)
    split.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": split, "test": split.select([1])}).save_to_disk(tmp_path / "both")
    assert [row["extra_info"]["question"] for row in imported(tmp_path / "one", *FIELDS)] == [
        r["question"] for r in ROWS
    ]
    assert len(imported(tmp_path / "both", *FIELDS, "--from-split", "test")) == 1
    with pytest.raises(DataError, match="--from-split"):
        imported(tmp_path / "both", *FIELDS, "--from-split", "validation")
