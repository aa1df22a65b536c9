"""Data files that are damaged, odd or hostile: one line that names the file and what is wrong, or right rows."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from data_rows import opened, row, table, written
from rlhf_megatron.data import parquet
from rlhf_megatron.data.opening import open_data
from rlhf_megatron.data.prompts import LeftOut, Prompt, PromptDataset
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.data.tokenizer_loading import load_tokenizer
from rlhf_megatron.errors import DataError
from rlhf_megatron.recipe import DataSection
from tiny_tokenizer import write_bpe_tokenizer

TEXT = pyarrow.string()
MESSAGE = pyarrow.struct([("role", TEXT), ("content", TEXT)])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_bpe_tokenizer(tmp_path_factory.mktemp("bpe")))


def with_column(path: Path, name: str, values: pyarrow.Array) -> Path:
    """Return a file of good rows with another column of this name."""
    good = table(*[row() for _ in range(len(values))])
    return written(path, good.set_column(good.column_names.index(name), name, values))


def raw_text(*values: bytes) -> pyarrow.Array:
    """Return the text that need not be UTF-8: pyarrow takes it as it is."""
    offsets = [0]
    for value in values:
        offsets.append(offsets[-1] + len(value))
    buffers = [None, pyarrow.py_buffer(struct.pack(f"<{len(offsets)}i", *offsets)), pyarrow.py_buffer(b"".join(values))]
    return pyarrow.Array.from_buffers(TEXT, len(values), buffers)


def prompts_of(roles: pyarrow.Array, contents: pyarrow.Array) -> pyarrow.Array:
    """Return a column of prompts of one message each."""
    messages = pyarrow.StructArray.from_arrays([roles, contents], ["role", "content"])
    return pyarrow.ListArray.from_arrays(pyarrow.array(range(len(roles) + 1), pyarrow.int32()), messages)


def good_bytes(folder: Path) -> bytes:
    return written(folder / "good.parquet", table()).read_bytes()


def footer_changed(folder: Path, old: bytes, new: bytes) -> Path:
    content = good_bytes(folder)
    assert old in content and len(old) == len(new)
    path = folder / "bad.parquet"
    path.write_bytes(content.replace(old, new))
    return path


def file_of(change: Callable[[bytes], bytes]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / "bad.parquet"
        path.write_bytes(change(good_bytes(folder)))
        return path

    return make


def fifo(folder: Path) -> Path:
    os.mkfifo(folder / "pipe.parquet")
    return folder / "pipe.parquet"


def socket_file(folder: Path) -> Path:
    here = os.getcwd()
    os.chdir(folder)  # a socket's name is short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("s")
    finally:
        os.chdir(here)
    return folder / "s"


def link_to_itself(folder: Path) -> Path:
    (folder / "link.parquet").symlink_to(folder / "link.parquet")
    return folder / "link.parquet"


def written_text(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


NO_FILE: dict[str, tuple[Callable[[Path], Path | str], str]] = {
    "missing": (lambda folder: folder / "none.parquet", "none.parquet: there is no such file"),
    "folder": (lambda folder: folder, r"is not a regular file \(a folder\)"),
    "pipe": (fifo, r"is not a regular file \(a pipe\)"),
    "socket": (socket_file, r"is not a regular file \(a socket\)"),
    "device": (lambda folder: "/dev/zero", r"/dev/zero: is not a regular file \(a device\)"),
    "link to itself": (link_to_itself, r"link.parquet: cannot be read \(Too many levels"),
    "long name": (
        lambda folder: folder / ("x" * 5000),
        r"x\.\.\. \(5,0\d\d characters\): cannot be read \(File name too",
    ),
    "NUL in the name": (lambda folder: f"{folder}/a\0b", r"a\\x00b: cannot be read \(embedded null byte\)"),
    "line break in the name": (lambda folder: f"{folder}/a\nb", r"a\\nb: there is no such file"),
    "pattern": (lambda folder: folder / "*.parquet", r"\*\.parquet: there is no such file"),
    "below a file": (lambda folder: written(folder / "f", table()) / "x", r"f/x: cannot be read \(Not a directory\)"),
    "empty": (file_of(lambda content: b""), "not a readable parquet file .*; make it again"),
    "text": (file_of(lambda content: b"hello, this is text\n" * 10), "not a readable parquet file"),
    "json lines": (file_of(lambda content: b'{"prompt": []}\n' * 10), "not a readable parquet file"),
    "json lines by name": (
        lambda folder: written_text(folder / "a.jsonl", '{"prompt": []}'),
        "a.jsonl: not a readable parquet file .*; convert it with tools/prepare_data.py import",
    ),
    "names only": (file_of(lambda content: b"PAR1PAR1"), "not a readable parquet file"),
    "end cut off": (file_of(lambda content: content[:-20]), "not a readable parquet file"),
    "begin cut off": (
        file_of(lambda content: content[len(content) // 2 :]),
        "not a readable parquet file|cannot be dec",
    ),
    "footer of zeros": (
        file_of(lambda content: content[:-200] + bytes(192) + content[-8:]),
        "not a readable parquet file",
    ),
    "footer too long": (
        file_of(lambda content: content[:-8] + b"\xff\xff\xff\x7f" + content[-4:]),
        "not a readable parquet file",
    ),
    "pages overwritten": (
        file_of(lambda content: content[:4] + b"\xff" * 400 + content[404:]),
        "not a readable parquet file",
    ),
    "encrypted": (file_of(lambda content: content[:-4] + b"PARE"), "not a readable parquet file"),
}


@pytest.mark.parametrize(("make", "problem"), NO_FILE.values(), ids=NO_FILE)
def test_what_is_no_parquet_file_is_told_in_one_line(
    tokenizer: Tokenizer, tmp_path: Path, make: Callable[[Path], Path | str], problem: str
) -> None:
    with pytest.raises(DataError, match=problem) as caught:
        opened(tokenizer, make(tmp_path))
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000


def twice(folder: Path) -> Path:
    good = table()
    return written(folder / "bad.parquet", good.append_column("prompt", good["prompt"]))


def deep(levels: int) -> pyarrow.Array:
    values = pyarrow.array([1, 2])
    for _ in range(levels):
        values = pyarrow.StructArray.from_arrays([values], ["a"])
    return values


def prompt_column(values: Any, kind: pyarrow.DataType | None = None) -> Callable[[Path], Path]:
    return lambda folder: with_column(folder / "bad.parquet", "prompt", pyarrow.array(values, kind))


def column(name: str, values: Any, kind: pyarrow.DataType | None = None) -> Callable[[Path], Path]:
    return lambda folder: with_column(folder / "bad.parquet", name, pyarrow.array(values, kind))


def many_messages(count: int) -> Callable[[Path], Path]:
    return prompt_column([[{"role": "user", "content": ""}] * count])


BAD_COLUMNS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "none of the columns": (
        lambda folder: written(folder / "bad.parquet", pyarrow.table({"a": [1]})),
        "columns prompt, data_source, reward_model: missing; the file has a; the columns are verl's",
    ),
    "names without end": (
        lambda folder: written(folder / "bad.parquet", pyarrow.table({"\n" + "x" * 9000: [1]})),
        r"columns prompt, data_source, reward_model: missing; the file has \\nx+\.\.\. \(9,001 characters\)",
    ),
    "a column twice": (twice, "column prompt: is there twice; leave one out"),
    "no rows": (lambda folder: written(folder / "bad.parquet", table().slice(0, 0)), "no rows"),
    "prompt of text": (prompt_column(["What?"]), "row 0, column prompt: str instead of a list"),
    "prompt of numbers": (prompt_column([1]), "row 0, column prompt: int instead of a list"),
    "prompt of bytes": (prompt_column([b"x"]), "row 0, column prompt: bytes instead of a list"),
    "one message without a list": (prompt_column([{"role": "user", "content": "x"}]), "column prompt: dict instead"),
    "prompt of nothing": (prompt_column([None], pyarrow.list_(MESSAGE)), "row 0, column prompt: empty"),
    "no messages": (prompt_column([[]], pyarrow.list_(MESSAGE)), "row 0, column prompt: empty"),
    "null messages": (prompt_column([[None]], pyarrow.list_(MESSAGE)), "message 0 is NoneType instead of"),
    "prompt of lists": (prompt_column([[["x"]]]), "message 0 is list instead of"),
    "messages of text": (prompt_column([["x"]]), "message 0 is str instead of"),
    "no role": (prompt_column([[{"content": "x"}]]), "message 0 has role of type NoneType"),
    "no content": (prompt_column([[{"role": "user"}]]), "message 0 has content of type NoneType"),
    "content of null": (
        prompt_column([[{"role": "user", "content": None}]], pyarrow.list_(MESSAGE)),
        "message 0 has content of type NoneType",
    ),
    "content of bytes": (prompt_column([[{"role": "user", "content": b"x"}]]), "content of type bytes"),
    "content of parts": (prompt_column([[{"role": "user", "content": [{"text": "x"}]}]]), "content of type list"),
    "role of numbers": (prompt_column([[{"role": 1, "content": "x"}]]), "role of type int"),
    "role of nothing": (prompt_column([[{"role": "", "content": "x"}]]), "message 0 has the role ''"),
    "role of control characters": (prompt_column([[{"role": "u\x1b", "content": "x"}]]), r"has the role 'u\\\\?x1b'"),
    "unknown role": (
        prompt_column([[{"role": "robot", "content": "x"}]]),
        "row 0, column prompt: .* unknown role robot",
    ),
    "empty content": (prompt_column([[{"role": "user", "content": " \n"}]]), "every message is empty"),
    "the assistant's turn": (prompt_column([[{"role": "assistant", "content": "x"}]]), "the last message is the assis"),
    "too many messages": (many_messages(200_000), "row 0, column prompt: has 200,000 messages; at most 10,000"),
    "content not UTF-8": (
        lambda folder: with_column(
            folder / "bad.parquet", "prompt", prompts_of(raw_text(b"user", b"user"), raw_text(b"good", b"\xff\xfe"))
        ),
        r"bad\.parquet, row 1, column prompt: cannot be read \(.*utf-8.*invalid start byte",
    ),
    "half of a surrogate pair": (
        lambda folder: with_column(folder / "bad.parquet", "data_source", raw_text(b"a", b"\xed\xa0\x80")),
        r"row 1, column data_source: cannot be read \(.*utf-8",
    ),
    "source of nothing": (column("data_source", [None], TEXT), "row 0, column data_source: None instead of a name"),
    "blank source": (column("data_source", [" "]), "column data_source: ' ' instead of a name"),
    "truth that is no number": (
        column("reward_model", [{"ground_truth": float("nan")}]),
        "column reward_model: ground_truth is nan; write",
    ),
    "a map with a key twice": (
        column("extra_info", [[("a", "1"), ("a", "2")]], pyarrow.map_(TEXT, TEXT)),
        "column extra_info: a map with the key 'a' twice",
    ),
    "a map of numbers": (
        column("extra_info", [[(1, 2)]], pyarrow.map_(pyarrow.int32(), pyarrow.int32())),
        "column extra_info: a map whose keys are no text",
    ),
    "source of numbers": (column("data_source", [7]), "column data_source: 7 instead of a name"),
    "source of lists": (column("data_source", [["x" * 9000]]), r"column data_source: .*\(9,004 characters\) instead"),
    "long source": (column("data_source", ["x" * 9000]), "column data_source: .*shorten the name"),
    "source with NUL": (column("data_source", ["a\0b"]), r"column data_source: .*a\\+x00b.*shorten the name"),
    "no truth": (column("reward_model", [{"style": "rule"}]), "column reward_model: ground_truth is missing"),
    "truth of null": (column("reward_model", [{"ground_truth": None}]), "ground_truth is missing"),
    "truth as text": (column("reward_model", ["2"]), "column reward_model: str instead of a struct"),
    "info of text": (column("extra_info", ["x"]), "column extra_info: str instead of a struct"),
    "info of lists": (column("extra_info", [[1]]), "column extra_info: list instead of a struct"),
    "info that nests": (lambda folder: with_column(folder / "bad.parquet", "extra_info", deep(300)), "nested"),
    "dates without end": (
        lambda folder: with_column(
            folder / "bad.parquet", "extra_info", pyarrow.array([2**62], pyarrow.int64()).cast(pyarrow.timestamp("us"))
        ),
        "row 0, column extra_info: cannot be read",
    ),
}


@pytest.mark.parametrize(("make", "problem"), BAD_COLUMNS.values(), ids=BAD_COLUMNS)
def test_a_bad_column_is_told_with_file_row_and_column(
    tokenizer: Tokenizer, tmp_path: Path, make: Callable[[Path], Path], problem: str
) -> None:
    path = make(tmp_path)
    with pytest.raises(DataError, match=problem) as caught:
        opened(tokenizer, path)
    message = str(caught.value)
    assert message.startswith(str(path)) and message.isprintable() and len(message) < 1000


GOOD = {
    "plain": table(),
    "large lists and texts": table().cast(
        pyarrow.schema(
            [
                ("data_source", pyarrow.large_string()),
                ("prompt", pyarrow.large_list(MESSAGE)),
                ("reward_model", table().schema.field("reward_model").type),
                ("extra_info", table().schema.field("extra_info").type),
            ]
        )
    ),
    "control characters": table(row("a\0b\x07\x1b[31m")),
    "truth of lists": table(row(reward_model={"ground_truth": ["1", "2"]})),
    "truth of bytes": table(row(reward_model={"ground_truth": b"\xff"})),
    "no info": table(row()).drop(["extra_info"]),
    "columns beside": table(row(pixels=b"\xff" * 1000)),
}


@pytest.mark.parametrize("content", GOOD.values(), ids=GOOD)
@pytest.mark.parametrize(
    "options",
    [{}, {"row_group_size": 1}, {"use_dictionary": False, "compression": "zstd"}, {"write_page_checksum": True}],
)
def test_odd_files_that_are_right_are_read(
    tokenizer: Tokenizer, tmp_path: Path, content: pyarrow.Table, options: dict[str, Any]
) -> None:
    found = opened(tokenizer, written(tmp_path / "good.parquet", content, **options))
    assert [item.messages[0]["content"] for item in found if isinstance(item, Prompt)] == [
        prompt[0]["content"] for prompt in content["prompt"].to_pylist()
    ]


def test_a_file_that_is_named_twice_is_told(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = written(tmp_path / "rows.parquet", table())
    with pytest.raises(DataError, match=r"rows\.parquet: is named twice; name it once"):
        opened(tokenizer, path, path)


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_file_of_two_names_is_told(tokenizer: Tokenizer, tmp_path: Path, link: Callable[[Path, Path], None]) -> None:
    path = written(tmp_path / "rows.parquet", table())
    link(path, tmp_path / "again.parquet")
    with pytest.raises(DataError, match=r"again\.parquet: is named twice, also as .*rows\.parquet; name it once"):
        opened(tokenizer, path, tmp_path / "again.parquet")
    with pytest.raises(DataError, match="is named twice, also as"):
        opened(tokenizer, path, f"{tmp_path}/./rows.parquet")


@pytest.mark.parametrize(
    ("chosen", "rejected", "margin", "problem"),
    [
        ("a", "a", 0.0, "column rejected: the same text as chosen"),
        ("a", "b", 1e300, r"column margin: 1e\+300 is beyond 1e\+06"),
        ("a", "b", float("nan"), "column margin: nan instead of a finite number"),
    ],
)
def test_a_pair_that_teaches_nothing_is_told(
    tokenizer: Tokenizer, tmp_path: Path, chosen: str, rejected: str, margin: float, problem: str
) -> None:
    rows = [row(chosen="a", rejected="b", margin=0.0), row(chosen=chosen, rejected=rejected, margin=margin)]
    path = written(tmp_path / "pairs.parquet", table(*rows))
    section = DataSection(train_files=["x"], max_prompt_length=200)
    with pytest.raises(DataError, match=rf"pairs\.parquet, row 1, {problem}"):
        list(PromptDataset([path], tokenizer, section, responses="pair").read_all())


def test_few_large_rows_are_not_read_far_ahead(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [row(f"q{number}", extra_info={"tests": str(number) * 4_000_000}) for number in range(3)]
    path = written(tmp_path / "large.parquet", table(*rows))
    stream = open_data(DataSection(train_files=[str(path)], max_prompt_length=200), tokenizer, seed=1).train
    drawn = [prompt.row for prompt in stream.next(8)]
    assert all(sorted(drawn[first : first + 3]) == [0, 1, 2] for first in (0, 3))
    assert stream._within(2048) < 200 and len(stream._ready) + sum(stream._asked) < 400


def test_a_damaged_page_is_told_where_the_file_has_checksums(tokenizer: Tokenizer, tmp_path: Path) -> None:
    options = {"write_page_checksum": True, "use_dictionary": False, "compression": "none"}
    path = written(tmp_path / "rows.parquet", table(), **options)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"What is 1 + 2?", b"What is 1 + 3?"))
    with pytest.raises(DataError, match=r"row group 0 cannot be decoded \(.*[Cc]hecksum.*\); the file is damaged"):
        opened(tokenizer, path)


def test_a_file_that_is_cut_off_while_it_is_read_is_an_error_and_no_signal(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = written(tmp_path / "rows.parquet", table(*[row(f"{'x' * 5000} {number}") for number in range(100)]))
    dataset = PromptDataset([path], tokenizer, DataSection(train_files=["x"], max_prompt_length=200))
    os.truncate(path, 100)
    with pytest.raises(DataError, match=r"row group 0 cannot be decoded \(.*\); the file is damaged or was changed"):
        dataset.read([0])


def repeated(count: int, size: int) -> pyarrow.Array:
    """Return prompts with the same long text, which a file holds once."""
    contents = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * count, pyarrow.int32()), ["x" * size])
    return prompts_of(pyarrow.array(["user"] * count), contents)


def columns_beside(count: int) -> dict[str, pyarrow.Array]:
    return {name: pyarrow.array([row()[name]] * count) for name in ("data_source", "reward_model")}


@pytest.mark.parametrize("options", [{}, {"store_schema": False}])
def test_a_small_file_of_a_large_text_is_decoded_up_to_a_limit(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(parquet, "MOST_GROUP_BYTES", 2**27)
    path = tmp_path / "bad.parquet"
    written(path, pyarrow.table({**columns_beside(20_000), "prompt": repeated(20_000, 500_000)}), **options)  # 10 GB
    assert path.stat().st_size < 200_000
    before = pyarrow.total_allocated_bytes()
    with pytest.raises(DataError, match=r"row group 0 has over 134,217,728 bytes when it is decoded; .*row_group_size"):
        opened(tokenizer, path)
    assert pyarrow.total_allocated_bytes() - before < 2**20


def test_a_long_name_that_all_rows_repeat_is_told(tokenizer: Tokenizer, tmp_path: Path) -> None:
    names = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 2000, pyarrow.int32()), ["x" * 100_000])
    path = with_column(tmp_path / "bad.parquet", "data_source", names)
    with pytest.raises(DataError, match=r"row 0, column data_source: .*shorten the name"):
        opened(tokenizer, path)


def test_a_row_group_that_claims_too_much_is_refused_when_it_is_opened(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "bad.parquet", table(*[row(f"{'x' * 5000} {number}") for number in range(100)]))
    monkeypatch.setattr(parquet, "MOST_GROUP_BYTES", 100_000)
    with pytest.raises(
        DataError, match=r"row group 0 has 5\d\d,\d\d\d bytes in the columns that are read; at most 100"
    ):
        opened(tokenizer, path)
    monkeypatch.undo()
    monkeypatch.setattr(parquet, "MOST_GROUP_ROWS", 99)
    with pytest.raises(DataError, match=r"row group 0 has 100 rows; at most 2,147,483,648 bytes and 99 rows"):
        opened(tokenizer, path)


def test_a_row_beyond_all_limits_is_named(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "MOST_ROW_BYTES", 100_000)
    path = written(tmp_path / "bad.parquet", table(row(), row("x" * 200_000)))
    with pytest.raises(
        DataError, match=r"row 1, column prompt: the row has 200,\d\d\d bytes; at most 100,000 are read"
    ):
        opened(tokenizer, path)


def test_a_text_of_100_mb_is_left_out_without_a_look(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = written(tmp_path / "long.parquet", table(row("word " * 20_000_000), row()))
    [long, good] = opened(tokenizer, path)
    assert long is LeftOut.LENGTH and isinstance(good, Prompt)
    with pytest.raises(
        DataError, match=r"row 0, column prompt: 100,000,000 characters, where 16,777,216 are read at most"
    ):
        opened(tokenizer, path, overlong_prompts="stop")


def test_all_rows_too_long_and_a_share_of_nothing_are_told(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = written(tmp_path / "long.parquet", table(row("word " * 50_000), row("other " * 50_000)))
    with pytest.raises(DataError, match=r"all 2 rows are too long; raise data\.max_prompt_length"):
        open_data(DataSection(train_files=[str(path)], max_prompt_length=8), tokenizer, seed=1)
    one = written(tmp_path / "one.parquet", table(row()))
    with pytest.raises(DataError, match="none of 1 rows is (not )?held out"):
        open_data(
            DataSection(train_files=[str(one)], max_prompt_length=200, validation_fraction=0.5), tokenizer, seed=1
        )


def test_one_row_is_enough_for_epochs(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = written(tmp_path / "one.parquet", table(row()))
    stream = open_data(DataSection(train_files=[str(path)], max_prompt_length=200), tokenizer, seed=1).train
    assert [prompt.row for prompt in stream.next(5)] == [0] * 5
