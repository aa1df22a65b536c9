"""Files and JSON of others: bounded in size and depth, never a pipe or a device, and one line where it fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlhf_megatron.errors import DataError
from rlhf_megatron.untrusted import is_within_levels, parse_json, read_bytes, read_json, read_text, shown


def test_a_regular_file_is_read_and_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text('{"a": [1, 2.5, "é"]}', encoding="utf-8")
    (tmp_path / "link.json").symlink_to("file.json")
    assert read_json(tmp_path / "link.json", DataError) == {"a": [1, 2.5, "é"]}
    assert read_bytes(tmp_path / "file.json", DataError, most_bytes=21) == '{"a": [1, 2.5, "é"]}'.encode()


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path / "pipe", "a pipe"), (tmp_path, "a folder"), (Path("/dev/zero"), "a device")):
        with pytest.raises(DataError, match=rf"^{path}: is not a regular file \({kind}\)$"):
            read_bytes(path, DataError)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing", "there is no such file"),
        ("a\0b", r"a\\x00b: cannot be read \(embedded null byte\)"),
        ("n" * 5000, r"n\.\.\. \(5,\d+ characters\): cannot be read \(File name too long\)"),
    ],
)
def test_a_name_that_cannot_be_opened_is_one_short_line(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        read_bytes(f"{tmp_path}/{name}", DataError)
    assert len(str(caught.value)) < 400 and str(caught.value).isprintable()


def test_a_file_beyond_the_limit_is_refused_without_being_read(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(DataError, match=r"has 1,099,511,627,776 bytes; at most 1,000 are read"):
        read_bytes(tmp_path / "large", DataError, most_bytes=1000)


def test_text_is_utf_8(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"ab\xff")
    with pytest.raises(DataError, match=r"is not text in UTF-8 \(byte 2\)$"):
        read_text(tmp_path / "text", DataError)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not valid JSON"),
        ("[NaN]", "NaN is no number of JSON"),
        ('{"a": -Infinity}', "-Infinity is no number of JSON"),
        ("[1e999]", "1e999 is beyond"),
        ("9" * 10_000, "not valid JSON"),
        ("[" * 101 + "]" * 101, "nested too deeply; at most 100"),
        ("[" * 1_000_000, "nested too deeply"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deeply"),
        (b'"\xff"', "not valid JSON"),
    ],
)
def test_json_that_is_none_is_one_line(text: str | bytes, said: str) -> None:
    with pytest.raises(DataError, match=rf"^here: .*{said}") as caught:
        parse_json(text, "here", DataError)
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)


def test_levels_are_counted_to_the_last_one() -> None:
    assert parse_json("[" * 100 + "]" * 100, "here", DataError) is not None
    assert is_within_levels({"a": [{"b": 1}]}, 3) and not is_within_levels({"a": [{"b": 1}]}, 2)
    assert is_within_levels(7, 0) and not is_within_levels([], 0)
    circle: list[object] = []
    circle.append(circle)
    assert not is_within_levels(circle)
    doubled: list[object] = []
    for _ in range(99):
        doubled = [doubled, doubled]
    assert is_within_levels(doubled) and not is_within_levels([[doubled]])


def test_a_strangers_text_cannot_write_lines_of_its_own() -> None:
    assert shown("a\nerror: b\x1b[2J") == "a\\nerror: b\\x1b[2J"
    assert shown("x" * 300) == "x" * 200 + "... (300 characters)"


def test_numbers_that_are_not_finite_are_read_where_that_is_asked_for() -> None:
    value = parse_json("[NaN, -Infinity, 1e999, 5]", "here", DataError, finite=False)
    assert str(value) == "[nan, -inf, inf, 5]"
    with pytest.raises(DataError, match="^here: "):
        parse_json("[NaN", "here", DataError, finite=False)
