"""Rows of files that others wrote in any of the usual formats: jsonl, a list in JSON, csv, tsv, parquet, arrow, texts
compressed by gzip, and folders of these.

Here: which files of a data set belong to a split, and reading them. Not here: what training reads (rows.py), and
what becomes of the rows (imported_rows.py).
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import yaml

from rlhf_megatron.data.media import media_of_row, media_of_schema
from rlhf_megatron.data.parquet import UNREADABLE, RowLocation, SourceFile, python_rows
from rlhf_megatron.errors import DataError
from rlhf_megatron.recipe.plain_yaml import parse_yaml
from rlhf_megatron.untrusted import check_regular, parse_json, read_json, read_text, reason_of, shown

# Of a line of JSON, or a field of a csv file.
MOST_LINE_BYTES = 64 * 2**20
# Of a file that is one list in JSON: it is read as a whole.
MOST_LIST_BYTES = 256 * 2**20
MOST_CARD_BYTES = 2**22
FORMATS = (".parquet", ".jsonl", ".json", ".csv", ".tsv", ".arrow")
COMPRESSED = ".gz"  # behind a format of text
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
# What a damaged gzip file raises beside OSError.
_DAMAGED = (EOFError, zlib.error)
# What files of a split are named by, where no card names them: as on the Hugging Face hub.
_SPLIT_WORDS = {
    "train": "train|training",
    "test": "test|testing|eval|evaluation",
    "validation": "validation|valid|dev|val",
}
_ROWS_AT_ONCE = 256

Record = tuple[RowLocation, dict[str, Any]]


def read_records(path: Path, columns: Sequence[str], drops_images: bool = False) -> Iterator[Record]:
    """Yield (location, values) of every row of a file, rows counted from 0.

    Args:
        path: ends with one of FORMATS.
        columns: top-level columns that are wanted; others may be given too.
        drops_images: read the text of rows with images, videos or sound.

    Raises:
        DataError: the file cannot be read, or a row is damaged or has images.
    """
    _check_file(path)
    tables = {".csv": _csv, ".tsv": _csv}
    kinds = {".parquet": _parquet, ".arrow": _arrow, ".jsonl": _json, ".json": _json, **tables}
    kind = format_of(path)
    if kind not in kinds:
        raise DataError(f"--input: {shown(path)} is none of {', '.join(FORMATS)}; convert it")
    for location, values in kinds[kind](path, list(dict.fromkeys(columns)), not drops_images):
        for column in () if drops_images else media_of_row(values):
            raise location.error(column, "only text is imported; --drop-images imports that alone")
        yield location, values


def format_of(path: str | Path) -> str:
    """Return the ending of a file's name, which is one of FORMATS where the file can be read; .gz is passed over."""
    name = Path(path)
    inner = Path(name.stem).suffix.lower() if name.suffix.lower() == COMPRESSED else ""
    return inner if inner in (".jsonl", ".json", *_DELIMITERS) else name.suffix.lower()


def data_files(path: Path, split: str, config: str | None = None) -> list[Path]:
    """Return the files of a split: the file itself, or those of a folder of the hub's form or of ``datasets``.

    Args:
        path: a file; a folder with files of FORMATS and maybe a card (README.md) that says which; or one that
            ``Dataset.save_to_disk`` wrote.
        split: such as train.
        config: one of the subsets that the card names.

    Raises:
        DataError: there is no such split or subset.
    """
    if not path.is_dir():
        return [path]
    if (path / "dataset_dict.json").is_file():
        path = path / split
    if (path / "state.json").is_file():
        return _saved_files(path)
    relative = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if format_of(file) in FORMATS)
    return [path / name for name in split_files(relative, card_of(path / "README.md"), split, config, str(path))]


def split_files(names: Sequence[str], card: dict[str, Any], split: str, config: str | None, origin: str) -> list[str]:
    """Return those of a data set's files, by path within it, that a split has.

    Args:
        names: all files.
        card: what stands at the head of the data set's README.md.
        split: such as train.
        config: a subset; None: the only one, or "default".
        origin: the data set, for messages.

    Raises:
        DataError: there is no such split or subset.
    """
    names = [name for name in names if format_of(name) in FORMATS and Path(name).name not in ("dataset_infos.json",)]
    configs = {
        each.get("config_name"): each.get("data_files") for each in card.get("configs") or [] if isinstance(each, dict)
    }
    if any(configs.values()):
        patterns = _patterns(_config_of(configs, config, origin), split)
        chosen = [name for name in names if any(_matches(name, pattern) for pattern in patterns)]
    else:
        inside = [name for name in names if config is None or config in Path(name).parts[:-1]]
        words = {key: re.compile(rf"(?<![a-z])({text})(?![a-z])", re.IGNORECASE) for key, text in _SPLIT_WORDS.items()}
        named = {name for name in inside if any(word.search(name) for word in words.values())}
        word = words.get(split, re.compile(rf"(?<![a-z]){re.escape(split)}(?![a-z])", re.IGNORECASE))
        chosen = [name for name in inside if word.search(name)] if named or split != "train" else inside
    if not chosen:
        of_config = f" in {shown(config)}" if config else ""
        raise DataError(
            f"--from-split: {shown(origin)} has no files of {shown(split)}{of_config}; it has "
            f"{shown(', '.join(names[:6]) or 'none of ' + ', '.join(FORMATS))}"
        )
    return chosen


def card_of(path: Path) -> dict[str, Any]:
    """Return the YAML at the head of a data set's README.md; nothing where there is none."""
    if not path.is_file():
        return {}
    match = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", read_text(path, DataError, MOST_CARD_BYTES), re.DOTALL)
    if match is None:
        return {}
    try:
        card = parse_yaml(match.group(1))
    except (yaml.YAMLError, ValueError) as error:
        raise DataError(
            f"{shown(path)}: its head is not YAML ({reason_of(error)}); name the data files instead"
        ) from error
    return card if isinstance(card, dict) else {}


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) of a file with one JSON object per line; empty lines are passed over.

    Raises:
        DataError: the file cannot be read, or a line is too long or no JSON object.
    """
    _check_file(path)
    try:
        with _opened(path) as lines:
            for number, line in enumerate(iter(lambda: lines.readline(MOST_LINE_BYTES + 1), b""), start=1):
                where = f"{path}, line {number}"
                if len(line) > MOST_LINE_BYTES:
                    raise DataError(f"{shown(where)}: has over {MOST_LINE_BYTES:,} bytes; the file must be jsonl")
                # A mark of the order of bytes is what some editors begin a file with.
                text = line.removeprefix(codecs.BOM_UTF8).strip()
                if text:
                    yield number, _record(text, where)
    except (OSError, *_DAMAGED) as error:
        raise DataError(f"--input: {shown(path)} cannot be read ({reason_of(error)})") from error


def _opened(path: Path) -> gzip.GzipFile | io.BufferedReader:
    """Open a file of text; of a compressed one, the text."""
    return gzip.open(path, "rb") if path.suffix.lower() == COMPRESSED else path.open("rb")


def _check_file(path: Path) -> None:
    try:
        check_regular(path, DataError)
    except DataError as error:
        why = str(error).removeprefix(f"{shown(path)}: ")
        raise DataError(f"--input: {shown(path)} cannot be read ({why})") from error


def _record(text: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object of a line; raises DataError."""
    try:
        record = parse_json(text, where, DataError)
    except DataError as error:
        why = str(error).removeprefix(f"{shown(where)}: ").removeprefix("not valid JSON ").strip("()")
        raise DataError(f"{shown(where)}: not JSON ({why}); the file must be jsonl") from error
    return _checked(record, where)


def _checked(record: Any, where: str) -> dict[str, Any]:
    """Return a value of JSON that is an object and can be written; raises DataError."""
    if not isinstance(record, dict):
        raise DataError(f"{shown(where)}: {type(record).__name__} instead of a JSON object")
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{shown(where)}: holds half of a surrogate pair; write it again") from error
    return record


def _json(path: Path, columns: Sequence[str], with_media: bool) -> Iterator[Record]:
    """Yield the rows of a file with one JSON object per line, or with one list of them."""
    listed = _list(path)
    if listed is None:
        records = (record for _, record in read_jsonl(path))
    else:
        records = (_checked(record, f"{path}, row {row}") for row, record in enumerate(listed))
    yield from ((RowLocation(str(path), row), record) for row, record in enumerate(records))


def _list(path: Path) -> list[Any] | None:
    """Return what is in a file that is one list in JSON; None where its first line begins otherwise.

    Raises:
        DataError: the file cannot be read, is too large or not JSON.
    """
    try:
        with _opened(path) as file:
            text = file.read(2**16).removeprefix(codecs.BOM_UTF8).lstrip()
            if not text.startswith(b"["):
                return None
            text += file.read(MOST_LIST_BYTES)
    except (OSError, *_DAMAGED) as error:
        raise DataError(f"--input: {shown(path)} cannot be read ({reason_of(error)})") from error
    if len(text) > MOST_LIST_BYTES:
        raise DataError(
            f"--input: {shown(path)} is a list of over {MOST_LIST_BYTES:,} bytes; write an object per line: jq -c '.[]'"
        )
    listed: list[Any] = parse_json(text, str(path), DataError)
    return listed


def _csv(path: Path, columns: Sequence[str], with_media: bool) -> Iterator[Record]:
    """Yield the rows of a csv or tsv file, whose first line names the columns; all values are texts."""
    csv.field_size_limit(MOST_LINE_BYTES)
    kind = format_of(path)
    try:
        with io.TextIOWrapper(_opened(path), encoding="utf-8-sig", newline="") as text:
            rows = csv.reader(text, strict=True, delimiter=_DELIMITERS[kind])
            names = next(rows, [])
            if len(set(names)) < len(names) or not all(names):
                raise DataError(f"{shown(path)}: its first line must name the columns, each once; it is {shown(names)}")
            for row, values in enumerate(filter(None, rows)):
                location = RowLocation(str(path), row)
                if len(values) != len(names):
                    column = names[min(len(values), len(names)) - 1]
                    raise location.error(
                        column, f"the row has {len(values)} fields instead of {len(names)}; quote the text"
                    )
                yield location, dict(zip(names, values, strict=True))
    except (csv.Error, OSError, UnicodeError, *_DAMAGED) as error:
        raise DataError(f"--input: {shown(path)} is not {kind[1:]} ({reason_of(error)}); write it again") from error


def _parquet(path: Path, columns: Sequence[str], with_media: bool) -> Iterator[Record]:
    file = SourceFile(path, [], columns)
    wanted = list(dict.fromkeys([*file.columns, *(file.media if with_media else ())]))
    yield from _of_batches(path, file.batches(range(len(file.row_groups)), wanted, _ROWS_AT_ONCE))


def _arrow(path: Path, columns: Sequence[str], with_media: bool) -> Iterator[Record]:
    """Yield the rows of an arrow file, as ``datasets`` keeps them: a stream, or the format with a footer."""
    try:
        with pyarrow.memory_map(str(path)) as source:
            try:
                batches: Any = pyarrow.ipc.open_stream(source)
            except pyarrow.ArrowInvalid:
                reader = pyarrow.ipc.open_file(source)
                batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
            kept = (_selected(batch, columns, with_media) for batch in batches)
            yield from _of_batches(path, kept)
    except UNREADABLE as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"--input: {shown(path)} cannot be read ({reason_of(error)}); make it again") from error


def _selected(batch: pyarrow.RecordBatch, columns: Sequence[str], with_media: bool) -> pyarrow.RecordBatch:
    wanted = [*columns, *(media_of_schema(batch.schema) if with_media else ())]
    return batch.select([name for name in dict.fromkeys(wanted) if name in batch.schema.names])


def _of_batches(path: Path, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[Record]:
    first = 0
    for batch in batches:
        for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
            piece = pyarrow.Table.from_batches([batch.slice(start, _ROWS_AT_ONCE)])
            rows = python_rows(piece, lambda row, begin=first + start: RowLocation(str(path), begin + row))  # type: ignore[misc]
            yield from ((RowLocation(str(path), first + start + row), values) for row, values in enumerate(rows))
        first += batch.num_rows


def _saved_files(folder: Path) -> list[Path]:
    """Return the files of ``Dataset.save_to_disk``, which its state.json lists."""
    state = read_json(folder / "state.json", DataError)
    listed = state.get("_data_files") if isinstance(state, dict) else None
    names = [each.get("filename") for each in listed or [] if isinstance(each, dict)]
    plain = [name for name in names if isinstance(name, str) and Path(name).name == name]
    if not names or len(plain) < len(names):
        raise DataError(f"{shown(folder)}: its state.json lists no files; save the data set again")
    return [folder / name for name in plain]


def _config_of(configs: dict[Any, Any], config: str | None, origin: str) -> Any:
    """Return the files of a subset, as the card names them."""
    name = config or ("default" if "default" in configs else next(iter(configs)) if len(configs) == 1 else None)
    if name not in configs:
        wanted = f"no subset {shown(config)}" if config else "several subsets"
        raise DataError(f"--config: {shown(origin)} has {wanted}; name one of {shown(', '.join(map(str, configs)))}")
    return configs[name]


def _patterns(listed: Any, split: str) -> list[str]:
    """Return the patterns of paths of a split: a text or list is all of train."""
    if isinstance(listed, list) and any(isinstance(each, dict) for each in listed):
        paths = [each.get("path") for each in listed if isinstance(each, dict) and each.get("split") == split]
    else:
        paths = [listed] if split == "train" else []
    flat = [each for path in paths for each in (path if isinstance(path, list) else [path])]
    return [each for each in flat if isinstance(each, str)]


def _matches(name: str, pattern: str) -> bool:
    """Return whether a path fits a pattern, of which ** spans folders."""
    parts = re.split(r"(\*\*/?|\*|\?)", pattern)
    meaning = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.fullmatch("".join(meaning.get(part, re.escape(part)) for part in parts), name) is not None
