"""Prompts of parquet files: rows checked, put through the chat template, tokenized and measured as they are read.

Here: `Prompt`, and `PromptDataset`, which makes rows into prompts. Not here: parquet files and columns (rows.py),
tokenizers (tokenizer.py), the order of training (order.py), reading ahead (stream.py), what a run opens (opening.py).
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rlhf_megatron.data.chat_template import MOST_CHARACTERS, characters_of, in_parts
from rlhf_megatron.data.rows import (
    ParquetRows,
    RowLocation,
    parse_data_source,
    parse_extra_info,
    parse_ground_truth,
    parse_margin,
    parse_messages,
    parse_response,
    with_system_prompt,
)
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.errors import DataError
from rlhf_megatron.recipe import DataSection

__all__ = ["DataError", "LeftOut", "Prompt", "PromptDataset", "Responses", "prompt_key"]

DEFAULT_RESPONSE_COLUMN = "reward_model.ground_truth"
PAIR_COLUMNS = ("chosen", "rejected")
MARGIN_COLUMN = "margin"
READ_ROWS = 256
# A text with more characters for each token that it may have is too long, and is not tokenized. The longest tokens of
# published vocabularies are runs of 128 blanks.
CHARACTERS_PER_TOKEN = 512
# Texts that are tokenized together.
PART_CHARACTERS = 4 * 2**20
Responses = Literal["none", "one", "pair"]
Message = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One prompt, ready for generation (or with its response or two, for supervised training and reward models).

    Attributes:
        row: its row, numbered from 0 through all files of its PromptDataset.
        data_source: names the reward function.
        token_ids: the conversation in the chat template, up to and with the header of the assistant's turn.
        ground_truth: the right answer as text; "" in supervised data without one.
        extra_info: whatever the row carries for its reward function.
        messages: the conversation itself.
        response_token_ids: the target text and eos, in supervised training; else None.
        pair: for a reward model, the whole conversation with the chosen response and that with the rejected one; else
            None.
        margin: by how much the chosen response of a pair is to be ahead.
        part: in a stream, which of the mixture's parts it is of.
    """

    row: int
    data_source: str
    token_ids: tuple[int, ...]
    ground_truth: str
    extra_info: dict[str, Any]
    messages: tuple[Message, ...] = ()
    response_token_ids: tuple[int, ...] | None = None
    pair: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    margin: float = 0.0
    part: int = 0


class LeftOut(enum.Enum):
    """The reason why a row is no prompt."""

    LENGTH = "outside the limits of length"
    OTHER_SIDE = "held out, or not held out, by data.validation_fraction"


class _Row(NamedTuple):
    """A row whose prompt is checked, and its position among those that are read together."""

    position: int
    number: int
    location: RowLocation
    values: dict[str, Any]
    messages: list[Message]


class PromptDataset:
    """The rows of some parquet files, as `Prompt` where they can be used.

    Opening reads only the files' footers. Every row is checked when it is read, so a bad one is told then.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        tokenizer: Tokenizer,
        section: DataSection,
        *,
        responses: Responses = "none",
        held_out: bool = False,
    ) -> None:
        """Open the files.

        Args:
            files: parquet files with verl's columns (see rows.py).
            tokenizer: from `load_tokenizer`.
            section: the recipe's data section.
            responses: what to tokenize beside the prompt: "one" is the response column, for supervised training;
                "pair" the columns chosen and rejected, for a reward model. data_source and reward_model may then be
                missing from the files.
            held_out: with data.validation_fraction, read the rows that are held out instead of the others.

        Raises:
            DataError: a file cannot be read or lacks a column.
        """
        self._tokenizer = tokenizer
        self._section = section
        self._supervised = responses != "none"
        self._paired = responses == "pair"
        self._held_out = held_out
        columns = {"none": (), "one": (section.response_column or DEFAULT_RESPONSE_COLUMN,), "pair": PAIR_COLUMNS}
        self._response_columns: tuple[str, ...] = columns[responses]
        self.rows = ParquetRows(files, *self._columns(), memory_mb=section.shuffle_window_mb)

    def __len__(self) -> int:
        """Return the number of rows, also of those that cannot be used."""
        return len(self.rows)

    def read(self, rows: Sequence[int]) -> list[Prompt | LeftOut]:
        """Return what some rows are, in this order.

        Raises:
            DataError: a row is bad, or it is outside the limits of length with overlong_prompts "stop".
        """
        return self._prompts(rows, self.rows.take(rows))

    def read_all(self) -> Iterator[Prompt | LeftOut]:
        """Reads all rows in the files' order; raises like `read`."""
        for first, rows in self.rows.scan(chunk=READ_ROWS):
            yield from self._prompts(range(first, first + len(rows)), rows)

    def read_heads(self, count: int) -> Iterator[Prompt | LeftOut]:
        """Reads the first `count` rows of each file; raises like `read`."""
        for first, rows in self.rows.heads(count):
            yield from self._prompts(range(first, first + len(rows)), rows)

    def data_sources(self) -> list[str]:
        """Return the distinct data sources of all rows in order of appearance; reads that column of every file."""
        values = self.rows.distinct("data_source")
        named = (parse_data_source(value, self.rows.location(row)) for row, value in values if value is not None)
        return list(dict.fromkeys(named))

    def none_left(self, rows: int) -> DataError:
        """The error where none of ``rows`` rows can be used."""
        files, section = ", ".join(self.rows.files), self._section
        if section.validation_fraction:
            side = "" if self._held_out else "not "
            return DataError(
                f"{files}: none of {rows} rows is {side}held out and within the limits of length; change "
                f"data.validation_fraction (now {section.validation_fraction}) or data.max_prompt_length"
            )
        what = "outside the limits of length" if section.min_prompt_length or self._supervised else "too long"
        limit = f"data.max_prompt_length (now {section.max_prompt_length} tokens)"
        return DataError(f"{files}: all {rows} rows are {what}; raise {limit}")

    def _columns(self) -> tuple[list[str], list[str]]:
        """Return the required and the optional top-level columns."""
        described = ["data_source", "reward_model"]
        if not self._supervised:
            return ["prompt", *described], ["extra_info"]
        # A dotted path such as extra_info.answer names a field.
        top = [column.split(".")[0] for column in self._response_columns]
        required = list(dict.fromkeys(["prompt", *top]))
        return required, [name for name in (*described, "extra_info", MARGIN_COLUMN) if name not in required]

    def _prompts(self, numbers: Iterable[int], rows: Sequence[dict[str, Any]]) -> list[Prompt | LeftOut]:
        """Check and tokenize rows."""
        results: list[Prompt | LeftOut] = [LeftOut.OTHER_SIDE] * len(rows)
        own: list[_Row] = []
        for position, (number, values) in enumerate(zip(numbers, rows, strict=True)):
            location = self.rows.location(number)
            messages = parse_messages(values.get("prompt"), location)
            if self._on_this_side(messages):
                messages = with_system_prompt(messages, self._section.system_prompt)
                own.append(_Row(position, number, location, values, messages))
        # A tokenizer needs about 70 bytes for each character of the texts that it is given at once.
        for part in in_parts(own, lambda row: characters_of(row.messages), PART_CHARACTERS):
            for row, what in zip(part, self._of_part(part), strict=True):
                results[row.position] = what
        return results

    def _of_part(self, rows: list[_Row]) -> list[Prompt | LeftOut]:
        """Tokenize rows that are checked; those whose text is too long whatever its tokens are left out before."""
        limit = self._section.max_prompt_length
        fitting: dict[int, Prompt] = {}
        short = [row for row in rows if self._may_fit("prompt", characters_of(row.messages), None, row.location)]
        texts = self._rendered(short, [row.messages for row in short], "prompt")
        if len(set(texts)) == 1 and len({row.messages[-1]["content"].strip() for row in short}) > 1:
            raise short[0].location.error(
                "prompt", "the chat template ignores the messages: other questions become the same text; fix it"
            )
        kept = [
            (row, text)
            for row, text in zip(short, texts, strict=True)
            if self._may_fit("prompt", len(text), limit, row.location) and self._responses_may_fit(row)
        ]
        prompt_ids = self._tokenizer.encode_many([text for _, text in kept])
        responses = self._responses([row for row, _ in kept])
        for (row, _), ids, given in zip(kept, prompt_ids, responses, strict=True):
            prompt = self._prompt(row, ids, given)
            if self._fits(ids, given, row.location):
                fitting[row.position] = prompt
        return [fitting.get(row.position, LeftOut.LENGTH) for row in rows]

    def _rendered(
        self, rows: list[_Row], conversations: list[list[Message]], column: str, add_generation_prompt: bool = True
    ) -> list[str]:
        """Return the texts of the rows' conversations; raise DataError for one that the chat template refuses."""
        texts = []
        for row, text in zip(rows, self._tokenizer.render_each(conversations, add_generation_prompt), strict=True):
            if isinstance(text, DataError):
                raise row.location.error(column, str(text)) from text
            texts.append(text)
        return texts

    def _prompt(self, row: _Row, token_ids: list[int], responses: list[list[int]]) -> Prompt:
        values, location = row.values, row.location
        source, truth = values.get("data_source"), values.get("reward_model")
        no_truth = truth is None or (isinstance(truth, dict) and truth.get("ground_truth") is None)
        given = tuple(map(tuple, responses))
        return Prompt(
            row=row.number,
            data_source="" if self._supervised and source is None else parse_data_source(source, location),
            token_ids=tuple(token_ids),
            ground_truth="" if self._supervised and no_truth else parse_ground_truth(truth, location),
            extra_info=parse_extra_info(values.get("extra_info"), location),
            messages=tuple(row.messages),
            response_token_ids=given[0] if len(given) == 1 else None,
            pair=(given[0], given[1]) if len(given) == 2 else None,
            margin=parse_margin(values.get(MARGIN_COLUMN), location),
        )

    def _responses(self, rows: list[_Row]) -> list[list[list[int]]]:
        """Return the ids of each row's given responses: none, one, or a pair of whole conversations."""
        if self._paired:
            self._check_differ(rows)
        by_column = []
        for column in self._response_columns:
            texts = [parse_response(row.values, column, row.location) for row in rows]
            if self._paired:
                answered = [
                    [*row.messages, {"role": "assistant", "content": text}]
                    for row, text in zip(rows, texts, strict=True)
                ]
                by_column.append(
                    self._tokenizer.encode_many(self._rendered(rows, answered, column, add_generation_prompt=False))
                )
            else:
                end = self._tokenizer.eos_token_id
                by_column.append([[*ids, end] for ids in self._tokenizer.encode_many(texts)])
        return [[ids[index] for ids in by_column] for index in range(len(rows))]

    def _check_differ(self, rows: list[_Row]) -> None:
        """Raises DataError for a pair of which neither response is the better one."""
        for row in rows:
            if len({parse_response(row.values, column, row.location) for column in PAIR_COLUMNS}) == 1:
                raise row.location.error(
                    PAIR_COLUMNS[1], "the same text as chosen; give another one, or remove the row"
                )

    def _responses_may_fit(self, row: _Row) -> bool:
        limit = self._section.max_response_length
        return all(
            self._may_fit(column, len(parse_response(row.values, column, row.location)), limit, row.location)
            for column in self._response_columns
        )

    def _may_fit(self, column: str, characters: int, tokens: int | None, location: RowLocation) -> bool:
        """Return whether a text of so many characters can be within a limit of tokens; or stop, as `_fits` does."""
        most = longest_text(tokens)
        if characters <= most:
            return True
        if self._section.overlong_prompts == "stop":
            raise location.error(
                column,
                f"{characters:,} characters, where {most:,} are read at most; shorten it, or set "
                "data.overlong_prompts: drop",
            )
        return False

    def _fits(self, prompt: list[int], responses: list[list[int]], location: RowLocation) -> bool:
        """Return whether a row is within the limits of length; or stop, if it is not and the recipe wants that."""
        section = self._section
        checks = [
            ("prompt", len(prompt), "over data.max_prompt_length", section.max_prompt_length, 1),
            ("prompt", len(prompt), "under data.min_prompt_length", section.min_prompt_length, -1),
        ]
        if section.max_response_length is not None:
            name, limit = "over data.max_response_length", section.max_response_length
            lengths = zip(self._response_columns, map(len, responses), strict=True)
            checks += [(column, length, name, limit, 1) for column, length in lengths]
        for column, length, name, limit, sign in checks:
            if (length - limit) * sign > 0:
                if section.overlong_prompts == "stop":
                    change = "raise" if sign > 0 else "lower"
                    raise location.error(
                        column, f"{length} tokens, {name} = {limit}; {change} it, or set data.overlong_prompts: drop"
                    )
                return False
        return True

    def _on_this_side(self, messages: Sequence[Message]) -> bool:
        """Return whether data.validation_fraction gives the row to this dataset."""
        fraction = self._section.validation_fraction
        return not fraction or (prompt_key(messages) < fraction * 2.0**64) == self._held_out


def longest_text(tokens: int | None) -> int:
    """Return how many characters a text of so many tokens can have, or any text at all."""
    return MOST_CHARACTERS if tokens is None else min(MOST_CHARACTERS, CHARACTERS_PER_TOKEN * (tokens + 1))


def prompt_key(messages: Sequence[Message]) -> int:
    """Return a number below 2**64 that is the same for equal prompts, by their roles and contents."""
    text = "\x1e".join(f"{message['role']}\x1f{message['content']}" for message in messages)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
