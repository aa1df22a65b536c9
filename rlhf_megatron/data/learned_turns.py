"""The text of a conversation that is learned: what the assistant writes in some of its turns, and the end of each.

A chat template says nothing about that, so a turn is found by rendering the conversation once more with another text in
its place. Unlike rendering the turns before it alone, this works with templates that write earlier turns otherwise than
the last one (those that take out the reasoning).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rlhf_megatron.data.column_values import Message
from rlhf_megatron.data.tokenizer import TURN_PROBE, Tokenizer, text_of_rendered
from rlhf_megatron.errors import DataError


class Segments(NamedTuple):
    """A text in pieces, alternately not learned and learned, beginning with what is not.

    Attributes:
        texts: at least one of each; the last one is learned.
        is_ended: the last one ends with the template's token for it.
    """

    texts: list[str]
    is_ended: bool


def learned_segments(
    tokenizer: Tokenizer, conversations: Sequence[Sequence[Message]], firsts: Sequence[int]
) -> list[Segments | DataError]:
    """Return each conversation's text up to its last turn, which is the assistant's, or why it has none.

    Learned are the assistant's turns from ``firsts`` on: what it writes behind the header that opens a turn for it,
    and the token that ends the turn.

    Raises:
        DataError: there is no chat template.
    """
    header, end = generation_header(tokenizer), tokenizer.turn_end_token()
    end_text = "" if end is None else tokenizer.decode([end], skip_special_tokens=False)
    wholes = tokenizer.render_each(conversations, add_generation_prompt=False)
    results: list[Segments | DataError] = []
    for turns, first, whole in zip(conversations, firsts, wholes, strict=True):
        learned = [index for index in range(first, len(turns)) if turns[index]["role"] == "assistant"]
        probe = _probe(turns)
        probed = tokenizer.render_each([_with_probe(turns, index, probe) for index in learned], False)
        try:
            spans = [
                _span(text_of_rendered(whole), text_of_rendered(text), probe, header, end_text, index)
                for text, index in zip(probed, learned, strict=True)
            ]
            results.append(_cut(text_of_rendered(whole), spans, end_text))
        except DataError as error:
            results.append(error)
    return results


def generation_header(tokenizer: Tokenizer) -> str:
    """Return what the chat template writes to open the assistant's turn; "" where it does not say."""
    asked = [[{"role": "user", "content": TURN_PROBE}]]
    closed, opened = (tokenizer.render_each(asked, opens)[0] for opens in (False, True))
    if isinstance(closed, str) and isinstance(opened, str) and opened.startswith(closed):
        return opened.removeprefix(closed)
    return ""


def _probe(turns: Sequence[Message]) -> str:
    """Return a text that none of the turns has."""
    probe = TURN_PROBE
    while any(probe in turn["content"] for turn in turns):
        probe += "0"
    return probe


def _with_probe(turns: Sequence[Message], index: int, probe: str) -> list[Message]:
    return [*turns[:index], {**turns[index], "content": probe}, *turns[index + 1 :]]


def _span(whole: str, probed: str, probe: str, header: str, end: str, index: int) -> tuple[int, int]:
    """Return where the learned text of a turn begins and ends in the ``whole`` text, its end with it.

    ``probed`` is the text with ``probe`` as the turn's content. Raises DataError where the two disagree around it.
    """
    before, found, behind = probed.partition(probe)
    if not found:
        raise DataError(f"the chat template leaves out message {index}, which is to be learned")
    if header and header in before:
        opened = before.rindex(header) + len(header)
        is_of_this_turn = not end or end not in before[opened:]
        before = before[:opened] if is_of_this_turn else before
    # Tool calls stand between content and end.
    rest = behind[behind.index(end) :] if end and end in behind else behind
    begin, stop = len(before), len(whole) - len(rest)
    if not whole.startswith(before) or not whole.endswith(rest) or stop < begin:
        raise DataError(f"the chat template writes what is around message {index} otherwise for another text of it")
    return begin, stop + (len(end) if rest.startswith(end) else 0)


def _cut(whole: str, spans: Sequence[tuple[int, int]], end: str) -> Segments:
    """Cut a text at the ends of its spans."""
    texts, behind = [], 0
    for begin, stop in spans:
        if begin < behind or stop <= begin:
            raise DataError("the chat template does not write the assistant's turns one after another")
        texts += [whole[behind:begin], whole[begin:stop]]
        behind = stop
    return Segments(texts, bool(end) and texts[-1].endswith(end))
