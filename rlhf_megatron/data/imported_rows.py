"""Rows in verl's columns from files of others: ``tools/prepare_data.py import``.

Here: which field becomes which column. Not here: reading the files (foreign_files.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_megatron.data.column_values import (
    Message,
    column_value,
    parse_ground_truth,
    parse_turns,
    with_system_prompt,
)
from rlhf_megatron.data.foreign_files import COMPRESSED, card_of, data_files, read_records, split_files
from rlhf_megatron.data.parquet import RowLocation
from rlhf_megatron.data.prepared_rows import (
    CONSOLE,
    MOST_ROWS,
    Row,
    RowRequest,
    check_request,
    make_row,
    read_questions,
    split_name,
)
from rlhf_megatron.errors import DataError
from rlhf_megatron.hub import DEFAULT_REVISION, Repository, commit_of, files_of, folder_of, is_hub_name
from rlhf_megatron.untrusted import shown

_MESSAGES, _SHARE_GPT = "messages", "conversations"
# The speakers of ShareGPT's turns, and their roles.
_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
}


@dataclass(frozen=True, kw_only=True)
class ImportRequest(RowRequest):
    """The options of ``import``.

    Attributes:
        exclude: parquet files whose questions must not appear.
        input: a file, a folder, or a data set's name on the hub, which has a revision.
        prompt_field: text, or messages; a path into structs such as a.b.
        answer_field: the right answer.
        data_source: chooses the reward; None: the name of the input.
        keep: columns to keep as they are; messages are made of ShareGPT's conversations where a row has these alone.
        from_split: of a data set.
        config: subset of a data set, where it has several.
        drop_images: read the text of rows that have images.
    """

    exclude: Sequence[Path]
    input: str
    revision: str | None
    prompt_field: str | None
    answer_field: str | None
    data_source: str | None
    keep: Sequence[str]
    from_split: str
    config: str | None
    drop_images: bool


def imported_rows(options: ImportRequest) -> list[Row]:
    """Return the rows of files of others.

    Raises:
        DataError: a file or row cannot be read, lacks a field, or has images; or there are too few rows.
    """
    check_request(options)
    if options.prompt_field is None and not options.keep:
        raise DataError("--prompt-field: name the field of the prompt, or columns to --keep as they are")
    excluded = read_questions(options.exclude)
    fields = [field for field in (options.prompt_field, options.answer_field, *options.keep) if field is not None]
    columns = [name for field in fields for name in (field, field.split(".")[0])]
    columns += [_SHARE_GPT] if _MESSAGES in options.keep else []
    rows: list[Row] = []
    for file in input_files(options):
        if os.path.realpath(file) == os.path.realpath(options.output):
            raise DataError(f"--output: {shown(options.output)} is one of the files to import; choose another name")
        for location, values in read_records(file, columns, options.drop_images):
            row = imported_row(options, values, location, len(rows))
            if not excluded or question_of(row, location) not in excluded:
                rows.append(row)
            if len(rows) == options.size:
                return rows
            if len(rows) > MOST_ROWS:
                raise DataError(f"--input: {shown(options.input)} has over {MOST_ROWS:,} rows; give --size")
    if not rows:
        raise DataError(f"{shown(options.input)}: has no rows but those of --exclude; look into the file")
    if options.size is not None:
        raise DataError(
            f"{shown(options.input)}: {len(rows)} rows are left, {options.size} were asked for; lower --size"
        )
    return rows


def input_files(options: ImportRequest) -> list[Path]:
    """Return the files to import; those of the hub are downloaded first. Raises DataError and HubError."""
    split, config = options.from_split, options.config
    if not is_hub_name(options.input):
        if not os.path.lexists(options.input):
            raise DataError(
                f"--input: there is no file or folder {shown(options.input)}; a data set on the hub is OWNER/NAME, "
                "with --revision beside it"
            )
        return data_files(Path(options.input), split, config)
    repository = Repository(options.input, options.revision or DEFAULT_REVISION, "--input", "dataset")
    commit = commit_of(repository)
    CONSOLE.print(f"{options.input} at {commit}", highlight=False, soft_wrap=True)
    card = card_of(folder_of(repository, commit, ["README.md"], []) / "README.md")
    chosen = split_files(sorted(files_of(repository, commit)), card, split, config, options.input)
    folder = folder_of(repository, commit, chosen, [])
    return [folder / name for name in chosen]


def imported_row(options: ImportRequest, values: Row, location: RowLocation, index: int) -> Row:
    """Return one row in verl's columns, with those that are kept; raises DataError where a field is missing."""
    row: Row = {}
    for column in options.keep:
        if column == _MESSAGES and values.get(column) is None and _SHARE_GPT in values:
            row[column] = turns_of_share_gpt(values[_SHARE_GPT], location)
            continue
        if column not in values:
            raise location.error(column, f"missing; the row has {shown(', '.join(map(str, values)))}")
        row[column] = values[column]
    info: Row = {"split": split_name(options), "index": index}
    source = options.data_source or (
        options.input if is_hub_name(options.input) else Path(options.input.removesuffix(COMPRESSED)).stem
    )
    if options.prompt_field is None:
        return {"data_source": source, "extra_info": info, **row}
    prompt, answer = column_value(values, options.prompt_field), ""
    present = f"the row has {shown(', '.join(map(str, values)))}"
    if isinstance(prompt, str) and prompt.strip():
        info["question"] = prompt
        prompt = make_row(options, "", prompt, "", "", {})["prompt"]
    elif not isinstance(prompt, list):
        raise location.error(options.prompt_field, f"{shown(repr(prompt))} instead of a text or messages; {present}")
    turns = parse_turns(prompt, options.prompt_field, location)
    if turns[-1]["role"] == "assistant":
        raise location.error(
            options.prompt_field, "ends with the assistant's turn, which is no prompt; --keep messages is for sft"
        )
    messages = with_system_prompt(turns, options.system)
    if options.answer_field is not None:
        given = column_value(values, options.answer_field)
        if given is None or given == "":
            raise location.error(options.answer_field, f"no answer; write one, or remove the row; {present}")
        answer = parse_ground_truth({"ground_truth": given}, location)
    described = {"data_source": source, "prompt": messages, "reward_model": {"style": "rule", "ground_truth": answer}}
    return {**described, "extra_info": info, **row}


def turns_of_share_gpt(value: Any, location: RowLocation) -> list[Message]:
    """Return the messages of a list of ``{"from": "human", "value": "..."}``; raises DataError for other speakers."""
    if not isinstance(value, list):
        raise location.error(_SHARE_GPT, f"{shown(repr(value))} instead of a list of {{from, value}}; remove the row")
    turns = []
    for index, turn in enumerate(value):
        if not isinstance(turn, dict):
            raise location.error(_SHARE_GPT, f"turn {index} is {shown(repr(turn))} instead of {{from, value}}")
        speaker = turn.get("from")
        role = _ROLES.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            raise location.error(
                _SHARE_GPT,
                f"turn {index} is from {shown(repr(speaker))}, and known are {', '.join(_ROLES)}; rename it, or remove "
                "the row",
            )
        turns.append({"role": role, "content": turn.get("value")})
    return parse_turns(turns, _SHARE_GPT, location)


def question_of(row: Row, location: RowLocation) -> str:
    """Return what ``read_questions`` compares; "" of a row without a prompt."""
    question = row["extra_info"].get("question") or (row["prompt"][-1]["content"] if "prompt" in row else "")
    return str(question).strip()
