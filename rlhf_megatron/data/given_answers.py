"""Supervised rows, in the forms of TRL's and verl's files: what is asked, and the answers that are given to it.

Here: columns. Not here: which tokens of an answer are learned (learned_turns.py), and tokens at all (prompts.py).

To learn one answer: ``messages``, or ``prompt`` with ``completion`` or with data.response_column. To learn from pairs:
``chosen`` and ``rejected``, with ``prompt`` or each with the prompt in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from rlhf_megatron.data.chat_template import characters_of
from rlhf_megatron.data.column_values import (
    Message,
    column_value,
    parse_messages,
    parse_response,
    parse_turns,
    with_system_prompt,
)
from rlhf_megatron.data.parquet import RowLocation
from rlhf_megatron.recipe import DataSection

DEFAULT_RESPONSE_COLUMN = "reward_model.ground_truth"
MESSAGES_COLUMN, COMPLETION_COLUMN, PAIR_COLUMNS, TOOLS_COLUMN = (
    "messages",
    "completion",
    ("chosen", "rejected"),
    "tools",
)

# Further turns of the conversation, or the text of the next one.
Answer = str | list[Message]


class Exchange(NamedTuple):
    """A question of a row, and its answers.

    Attributes:
        messages: the conversation before the answers.
        answers: none in rl; one to be learned; or the better and the worse one.
        columns: of the answers, for messages.
        plain: the texts stand as they are, without a chat template; messages then has one, the user's.
        column: of what is asked, for messages.
    """

    messages: list[Message]
    answers: tuple[Answer, ...] = ()
    columns: tuple[str, ...] = ()
    plain: bool = False
    column: str = "prompt"

    def with_system_prompt(self, text: str | None) -> Exchange:
        """Return the same with the system's text before it; plain text has no place for it."""
        return self if self.plain else self._replace(messages=with_system_prompt(self.messages, text))

    @property
    def in_turns(self) -> bool:
        """True if the answers are messages."""
        return any(isinstance(answer, list) for answer in self.answers)

    @property
    def characters(self) -> list[int]:
        """The characters of each answer."""
        return [len(answer) if isinstance(answer, str) else characters_of(answer) for answer in self.answers]

    def turns(self, answer: Answer) -> list[Message]:
        """Return the whole conversation with one of the answers."""
        further = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        return [*self.messages, *further]


def demonstration_columns(section: DataSection, names: Sequence[str]) -> list[str]:
    """Return the top-level columns without which files with columns of these ``names`` show nothing to learn."""
    if section.response_column is None and MESSAGES_COLUMN in names:
        return [MESSAGES_COLUMN]
    return ["prompt", _response_column(section, names).split(".")[0]]


def pair_columns(names: Sequence[str]) -> list[str]:
    """Return the top-level columns that hold pairs."""
    return [*(["prompt"] if "prompt" in names else []), *PAIR_COLUMNS]


def demonstration(row: dict[str, Any], section: DataSection, location: RowLocation) -> Exchange:
    """Return what a row shows: one answer, of turns up to the last that is learned, or a text.

    Raises:
        DataError: the row is in none of the forms, or has nothing to learn.
    """
    _check_no_tools(row, location)
    if section.response_column is None and MESSAGES_COLUMN in row:
        turns = parse_turns(row[MESSAGES_COLUMN], MESSAGES_COLUMN, location)
        return _of_turns(turns, 0, section, MESSAGES_COLUMN, MESSAGES_COLUMN, location)
    column = _response_column(section, row)
    asked, plain = _asked(row, section, location)
    value = column_value(row, column)
    if not isinstance(value, list):
        return Exchange(asked, (parse_response(row, column, location),), (column,), plain)
    if plain:
        raise location.error(column, "a list of messages, where data.string_prompts=plain has texts; set it to chat")
    turns = [*asked, *parse_turns(value, column, location)]
    return _of_turns(turns, len(asked), section, column, "prompt", location)


def preference(row: dict[str, Any], section: DataSection, location: RowLocation) -> Exchange:
    """Return a row's pair.

    Raises:
        DataError: the row is in none of the forms, or one answer is not better than the other.
    """
    _check_no_tools(row, location)
    values = [row.get(column) for column in PAIR_COLUMNS]
    if all(isinstance(value, list) for value in values):
        turns = [parse_turns(row[column], column, location) for column in PAIR_COLUMNS]
        exchange = _pair_of_turns(turns, row, section, location)
    elif any(isinstance(value, list) for value in values):
        raise location.error(PAIR_COLUMNS[1], "text beside messages in the other column of the pair; write both alike")
    else:
        texts = tuple(parse_response(row, column, location) for column in PAIR_COLUMNS)
        exchange = _pair_of_texts(texts, row, section, location)
    if exchange.answers[0] == exchange.answers[1]:
        raise location.error(PAIR_COLUMNS[1], "the same text as chosen; give another one, or remove the row")
    return exchange


def _of_turns(
    turns: list[Message], first: int, section: DataSection, column: str, asked: str, location: RowLocation
) -> Exchange:
    """Return turns of which those of the assistant from ``first`` on, or its last one, are learned."""
    learned = [index for index in range(first, len(turns)) if turns[index]["role"] == "assistant"]
    if not learned:
        raise location.error(column, "has no turn of the assistant's, so nothing to learn; add one, or remove the row")
    begin = learned[0] if section.learned_turns == "all" else learned[-1]
    if not begin:
        raise location.error(column, "begins with the assistant's turn; put what it answers before it")
    return Exchange(turns[:begin], (turns[begin : learned[-1] + 1],), (column,), column=asked)


def _pair_of_turns(
    turns: list[list[Message]], row: dict[str, Any], section: DataSection, location: RowLocation
) -> Exchange:
    """Return a pair of conversations: both with the prompt, or both without it."""
    if turns[0][0]["role"] == "assistant":
        asked, plain = _asked(row, section, location)
        if plain:
            raise location.error(
                "prompt", "text, where chosen has messages and data.string_prompts=plain; set it to chat"
            )
        return Exchange(asked, (turns[0], turns[1]), PAIR_COLUMNS)
    same = _common(*turns)
    while same and turns[0][same - 1]["role"] == "assistant":
        same -= 1
    if not same:
        raise location.error(PAIR_COLUMNS[1], "answers another prompt than chosen; pair answers to the same one")
    if any(len(of_one) == same for of_one in turns):
        raise location.error(PAIR_COLUMNS[1], "differs from chosen by no answer; end both with the assistant's turn")
    return Exchange(turns[0][:same], (turns[0][same:], turns[1][same:]), PAIR_COLUMNS, column=PAIR_COLUMNS[0])


def _pair_of_texts(
    texts: tuple[str, ...], row: dict[str, Any], section: DataSection, location: RowLocation
) -> Exchange:
    """Return a pair of texts: answers to the prompt, or whole conversations as plain text where there is none."""
    if "prompt" in row:
        asked, plain = _asked(row, section, location)
        return Exchange(asked, texts, PAIR_COLUMNS, plain)
    same = _common(*texts)
    answers = tuple(text[same:] for text in texts)
    return Exchange([{"role": "user", "content": texts[0][:same]}], answers, PAIR_COLUMNS, True, PAIR_COLUMNS[0])


def _asked(row: dict[str, Any], section: DataSection, location: RowLocation) -> tuple[list[Message], bool]:
    """Return the messages of the prompt, and whether it is plain text."""
    value = row.get("prompt")
    if not isinstance(value, str):
        return parse_messages(value, location), False
    return parse_messages([{"role": "user", "content": value}], location), section.string_prompts == "plain"


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many items two sequences begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _response_column(section: DataSection, names: Sequence[str] | dict[str, Any]) -> str:
    return section.response_column or (COMPLETION_COLUMN if COMPLETION_COLUMN in names else DEFAULT_RESPONSE_COLUMN)


def _check_no_tools(row: dict[str, Any], location: RowLocation) -> None:
    if row.get(TOOLS_COLUMN):
        raise location.error(
            TOOLS_COLUMN,
            "tools of one row are not read; give those of all by data.chat_template_kwargs, and leave it out",
        )
