"""Prompts of parquet files: rows checked, put through the chat template, tokenized and measured as they are read.

Here: ``Prompt``, and ``PromptDataset``, which makes rows into prompts. Not here: parquet files (rows.py), columns
(prompt_columns.py, column_values.py), tokenizers (tokenizer.py), the order of training (order.py), reading ahead
(stream.py), what a run opens (opening.py).
"""

from __future__ import annotations

import enum
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_megatron.data.chat_template import MOST_CHARACTERS, characters_of, in_parts
from rlhf_megatron.data.column_values import (
    Message,
    parse_data_source,
    parse_extra_info,
    parse_ground_truth,
    parse_margin,
    parse_messages,
)
from rlhf_megatron.data.given_answers import PAIR_COLUMNS, Exchange, demonstration, preference
from rlhf_megatron.data.learned_turns import learned_segments
from rlhf_megatron.data.parquet import RowLocation
from rlhf_megatron.data.prompt_columns import MARGIN_COLUMN, Responses, open_columns
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.errors import DataError
from rlhf_megatron.recipe import DataSection

__all__ = ["DataError", "LeftOut", "Prompt", "PromptDataset", "prompt_key"]

READ_ROWS = 256
# A text with more characters for each token that it may have is too long, and is not tokenized. The longest tokens of
# published vocabularies are runs of 128 blanks.
CHARACTERS_PER_TOKEN = 512
# Texts that are tokenized together.
PART_CHARACTERS = 4 * 2**20


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
        response_token_ids: in supervised training, what follows up to the end of the last learned text; else None.
        learned: which of these tokens are learned; None: all.
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
    learned: tuple[bool, ...] | None = None
    pair: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    margin: float = 0.0
    part: int = 0

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.token_ids)


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
    exchange: Exchange


class _Texts(NamedTuple):
    """Texts of a row that are tokenized: the prompt, and each answer in pieces, every second of which is learned if
    there is but one answer; eos stands behind those that end without one."""

    row: _Row
    prompt: str
    answers: list[list[str]]
    needs_end: bool = True


class PromptDataset:
    """The rows of some parquet files, as ``Prompt`` where they can be used.

    Opening reads only the files' footers. Every row is checked when it is read, so a bad one is reported then.
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
            files: parquet files with verl's columns (see column_values.py).
            tokenizer: from ``load_tokenizer``.
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
        self._responses = responses
        self._supervised = responses != "none"
        self._held_out = held_out
        self.rows = open_columns(files, section, responses)

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
        """Read all rows in the files' order; raises like ``read``."""
        for first, rows in self.rows.scan(chunk=READ_ROWS):
            yield from self._prompts(range(first, first + len(rows)), rows)

    def read_heads(self, count: int) -> Iterator[Prompt | LeftOut]:
        """Read the first ``count`` rows of each file; raises like ``read``."""
        for first, rows in self.rows.heads(count):
            yield from self._prompts(range(first, first + len(rows)), rows)

    def data_sources(self) -> list[str]:
        """Return the distinct data sources of all rows in order of appearance; reads that column of every file."""
        values = self.rows.distinct("data_source")
        named = (parse_data_source(value, self.rows.location(row)) for row, value in values if value is not None)
        return list(dict.fromkeys(named))

    def none_left(self, rows: int) -> DataError:
        """Return the error where none of ``rows`` rows can be used."""
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

    def _exchange(self, values: dict[str, Any], location: RowLocation) -> Exchange:
        """Return what a row asks and answers; raises DataError."""
        if self._responses == "none":
            return Exchange(parse_messages(values.get("prompt"), location))
        parse = demonstration if self._responses == "one" else preference
        return parse(values, self._section, location)

    def _prompts(self, numbers: Iterable[int], rows: Sequence[dict[str, Any]]) -> list[Prompt | LeftOut]:
        """Check and tokenize rows."""
        results: list[Prompt | LeftOut] = [LeftOut.OTHER_SIDE] * len(rows)
        own: list[_Row] = []
        for position, (number, values) in enumerate(zip(numbers, rows, strict=True)):
            location = self.rows.location(number)
            exchange = self._exchange(values, location)
            if self._on_this_side(exchange.messages):
                exchange = exchange.with_system_prompt(self._section.system_prompt)
                own.append(_Row(position, number, location, values, exchange))
        # A tokenizer needs about 70 bytes for each character of the texts that it is given at once.
        for part in in_parts(own, lambda row: characters_of(row.exchange.messages), PART_CHARACTERS):
            for row, what in zip(part, self._of_part(part), strict=True):
                results[row.position] = what
        return results

    def _of_part(self, rows: list[_Row]) -> list[Prompt | LeftOut]:
        """Tokenize rows that are checked; those whose text is too long whatever its tokens are left out before."""
        limit = self._section.max_prompt_length
        fitting: dict[int, Prompt] = {}
        short = [
            row
            for row in rows
            if self._may_fit(row.exchange.column, characters_of(row.exchange.messages), None, row.location)
            and self._answers_may_fit(row)
        ]
        kept = [
            texts
            for texts in self._texts(short)
            if self._may_fit(texts.row.exchange.column, len(texts.prompt), limit, texts.row.location)
        ]
        pieces = [piece for texts in kept for piece in (texts.prompt, *(each for of in texts.answers for each in of))]
        token_ids = iter(self._tokenizer.encode_many(pieces))
        for texts in kept:
            ids = next(token_ids)
            answers = [[next(token_ids) for _ in of_answer] for of_answer in texts.answers]
            prompt = self._prompt(texts, ids, answers)
            if self._fits(prompt, texts.row):
                fitting[texts.row.position] = prompt
        return [fitting.get(row.position, LeftOut.LENGTH) for row in rows]

    def _texts(self, rows: list[_Row]) -> list[_Texts]:
        """Return what is to be tokenized of rows, in their order; raises DataError where the template refuses one."""
        plain = [_plain_texts(row, self._responses) for row in rows if row.exchange.plain]
        of_turns = self._responses == "one"
        in_turns = [row for row in rows if of_turns and row.exchange.in_turns]
        asked = [row for row in rows if not row.exchange.plain and not (of_turns and row.exchange.in_turns)]
        texts = [*plain, *self._texts_of_turns(in_turns), *self._texts_of_prompts(asked)]
        return sorted(texts, key=lambda each: each.row.position)

    def _texts_of_prompts(self, rows: list[_Row]) -> list[_Texts]:
        """Return the prompt in the chat template, and behind it the answer's text; of a pair, two conversations."""
        prompts = self._rendered(rows, [row.exchange.messages for row in rows], "prompt")
        if len(set(prompts)) == 1 and len({row.exchange.messages[-1]["content"].strip() for row in rows}) > 1:
            raise rows[0].location.error(
                "prompt", "the chat template ignores the messages: other questions become the same text; fix it"
            )
        if self._responses != "pair":
            answers = [[[answer] for answer in row.exchange.answers if isinstance(answer, str)] for row in rows]
            return [_Texts(*of_row) for of_row in zip(rows, prompts, answers, strict=True)]
        whole = [
            self._rendered(rows, [row.exchange.turns(row.exchange.answers[index]) for row in rows], column, False)
            for index, column in enumerate(PAIR_COLUMNS)
        ]
        return [
            _Texts(row, prompt, [[chosen], [rejected]], needs_end=False)
            for row, prompt, chosen, rejected in zip(rows, prompts, *whole, strict=True)
        ]

    def _texts_of_turns(self, rows: list[_Row]) -> list[_Texts]:
        """Return conversations cut where what is learned begins and ends."""
        conversations = [row.exchange.turns(row.exchange.answers[0]) for row in rows]
        firsts = [len(row.exchange.messages) for row in rows]
        segments_of_rows = learned_segments(self._tokenizer, conversations, firsts) if rows else []
        texts = []
        for row, segments in zip(rows, segments_of_rows, strict=True):
            if isinstance(segments, DataError):
                raise row.location.error(row.exchange.columns[0], str(segments)) from segments
            prompt, *answer = segments.texts
            texts.append(_Texts(row, prompt, [answer], needs_end=not segments.is_ended))
        return texts

    def _rendered(
        self, rows: list[_Row], conversations: list[list[Message]], column: str, add_generation_prompt: bool = True
    ) -> list[str]:
        """Return the texts of the rows' conversations; raises DataError for one that the chat template refuses."""
        texts = []
        for row, text in zip(rows, self._tokenizer.render_each(conversations, add_generation_prompt), strict=True):
            if isinstance(text, DataError):
                raise row.location.error(column, str(text)) from text
            texts.append(text)
        return texts

    def _prompt(self, texts: _Texts, token_ids: list[int], answers: list[list[list[int]]]) -> Prompt:
        """Return a prompt with its tokens, and those of each answer's pieces."""
        row, values, location = texts.row, texts.row.values, texts.row.location
        source, truth = values.get("data_source"), values.get("reward_model")
        no_truth = truth is None or (isinstance(truth, dict) and truth.get("ground_truth") is None)
        end = [self._tokenizer.eos_token_id] if texts.needs_end else []
        given = [(*itertools.chain(*pieces), *end) for pieces in answers]
        learned = [index % 2 == 0 for index, piece in enumerate(answers[0]) for _ in piece] if answers else []
        return Prompt(
            row=row.number,
            data_source="" if self._supervised and source is None else parse_data_source(source, location),
            token_ids=tuple(token_ids),
            ground_truth="" if self._supervised and no_truth else parse_ground_truth(truth, location),
            extra_info=parse_extra_info(values.get("extra_info"), location),
            messages=tuple(row.exchange.messages),
            response_token_ids=given[0] if len(given) == 1 else None,
            learned=None if all(learned) else (*learned, *(True for _ in end)),
            pair=(given[0], given[1]) if len(given) == 2 else None,
            margin=parse_margin(values.get(MARGIN_COLUMN), location),
        )

    def _answers_may_fit(self, row: _Row) -> bool:
        limit = self._section.max_response_length
        return all(
            self._may_fit(column, characters, limit, row.location)
            for column, characters in zip(row.exchange.columns, row.exchange.characters, strict=True)
        )

    def _may_fit(self, column: str, characters: int, tokens: int | None, location: RowLocation) -> bool:
        """Return whether a text of so many characters can be within a limit of tokens; or stop, as ``_fits`` does."""
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

    def _fits(self, prompt: Prompt, row: _Row) -> bool:
        """Return whether a row is within the limits of length; or stop, if it is not and the recipe wants that."""
        section, asked, location = self._section, row.exchange.column, row.location
        checks = [
            (asked, len(prompt.token_ids), "over data.max_prompt_length", section.max_prompt_length, 1),
            (asked, len(prompt.token_ids), "under data.min_prompt_length", section.min_prompt_length, -1),
        ]
        if section.max_response_length is not None:
            name, limit = "over data.max_response_length", section.max_response_length
            responses = prompt.pair or [prompt.response_token_ids or ()]
            checks += [
                (column, len(ids), name, limit, 1) for column, ids in zip(row.exchange.columns, responses, strict=False)
            ]
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


def _plain_texts(row: _Row, responses: Responses) -> _Texts:
    """Return texts without a chat template; of a pair, the prompt stands before each."""
    prompt = row.exchange.messages[0]["content"]
    answers = [answer for answer in row.exchange.answers if isinstance(answer, str)]
    return _Texts(row, prompt, [[prompt + answer] if responses == "pair" else [answer] for answer in answers])


def longest_text(tokens: int | None) -> int:
    """Return how many characters a text of so many tokens can have, or any text at all."""
    return MOST_CHARACTERS if tokens is None else min(MOST_CHARACTERS, CHARACTERS_PER_TOKEN * (tokens + 1))


def prompt_key(messages: Sequence[Message]) -> int:
    """Return a number below 2**64 that is the same for equal prompts, by their roles and contents."""
    text = "\x1e".join(f"{message['role']}\x1f{message['content']}" for message in messages)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
