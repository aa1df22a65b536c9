"""Rows in verl's columns as tools/prepare_data.py writes them: what those of every source share.

Here: what is asked of a source, one row, the questions that are held out, and the file. Not here: where rows come from
(imported_rows.py, demonstrations.py, pairs.py, rewards/task_rows.py), and reading them for training (prompts.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from rich.console import Console

from rlhf_megatron.data.column_values import parse_extra_info, parse_messages
from rlhf_megatron.data.rows import ParquetRows
from rlhf_megatron.errors import DataError
from rlhf_megatron.untrusted import kind_of, reason_of, shown

ROWS_PER_GROUP = 1024
MOST_ROWS = 10**7  # of a file
# What pyarrow raises for values that no column of parquet can hold.
UNWRITABLE = (pyarrow.ArrowException, OverflowError)

CONSOLE = Console(stderr=True)

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RowRequest:
    """The options of every source that makes rows.

    Attributes:
        output: the file to write.
        size: number of rows; None: all.
        system: message put before each question.
        split: written to extra_info.split; None: the output's name.
        prompt_template: has {question} where the question is put.
    """

    output: Path
    size: int | None
    system: str | None
    split: str | None
    prompt_template: str


def make_row(options: RowRequest, data_source: str, question: str, truth: str, ability: str, info: Row) -> Row:
    """Return one row in verl's columns."""
    messages = [{"role": "user", "content": options.prompt_template.replace("{question}", question)}]
    if options.system:
        messages.insert(0, {"role": "system", "content": options.system})
    return {
        "data_source": data_source,
        "prompt": messages,
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": info,
    }


def check_request(options: RowRequest) -> None:
    """Check what both sources share.

    Raises:
        DataError: the size is not positive, or the template has no place for the question.
    """
    if options.size is not None and options.size <= 0:
        raise DataError(f"--size: {options.size} rows cannot be made; give 1 or more")
    if options.size is not None and options.size > MOST_ROWS:
        raise DataError(f"--size: {options.size} rows are too many; give at most {MOST_ROWS:,}")
    if "{question}" not in options.prompt_template:
        raise DataError(f"--prompt-template: {options.prompt_template!r} has no {{question}}; put it where it belongs")


def read_questions(files: Sequence[Path]) -> set[str]:
    """Return the questions of prepared files: extra_info.question, else the text of the last message of the prompt.

    The bare question is compared where it is known, so that another template does not hide a row that was held out.
    """
    questions: set[str] = set()
    if not files:
        return questions
    source = ParquetRows(files, ["prompt"], ["extra_info"])
    for first, rows in source.scan(["prompt", "extra_info"]):
        for offset, row in enumerate(rows):
            location = source.location(first + offset)
            question = parse_extra_info(row.get("extra_info"), location).get("question")
            if not isinstance(question, str):
                question = parse_messages(row.get("prompt"), location)[-1]["content"]
            questions.add(question.strip())
    return questions


def split_name(options: RowRequest) -> str:
    """Return what extra_info.split says."""
    return str(options.split or options.output.stem)


def write_rows(rows: list[Row], output: Path) -> None:
    """Write the rows to a parquet file; raises DataError where that cannot be."""
    with replaced(output) as partial:
        try:
            table = pyarrow.Table.from_pylist(rows)
            pyarrow.parquet.write_table(table, partial, row_group_size=ROWS_PER_GROUP, compression="zstd")
        except UNWRITABLE as error:
            raise _unwritable_column(rows) or error from error


def _unwritable_column(rows: list[Row]) -> DataError | None:
    """Return what is wrong with the first column whose values make no column of parquet."""
    for name in rows[0]:
        try:
            column = pyarrow.table({name: [row.get(name) for row in rows]})
            pyarrow.parquet.write_table(column, pyarrow.BufferOutputStream())
        except UNWRITABLE as error:
            return DataError(
                f"column {shown(name)}: its values make no column of parquet ({reason_of(error)}); write them alike in "
                "all rows, as text for example, or leave the column out"
            )
    return None


@contextlib.contextmanager
def replaced(output: Path) -> Iterator[Path]:
    """Give a path to write to, which takes the output's name when all is written, in the place of a file of that name.

    Raises:
        DataError: the file cannot be written, or there is something else than a file.
    """
    if output.exists() and not output.is_file():
        raise DataError(f"--output: {shown(output)} cannot be written ({kind_of(output.stat().st_mode)} is there)")
    partial = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.replace(output)
    except OSError as error:
        raise DataError(f"--output: {shown(output)} cannot be written ({reason_of(error)})") from error
    finally:
        partial.unlink(missing_ok=True)
