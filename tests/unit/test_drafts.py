"""Drafts are what followed the same tokens before: in a response and its prompt, its group, and the epoch before."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from rlhf_megatron.rollout import drafts
from rlhf_megatron.rollout.drafts import Drafter, SeenText

PROMPT = [1, 2, 3, 4, 5, 6]


def draft(drafter: Drafter, name: str, response: list[int]) -> list[int]:
    return drafter.draft(name, np.array([*PROMPT, *response], dtype=np.int32))


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        ([1, 2, 3, 9, 1, 2], 3, [3, 9, 1]),
        ([1, 2, 3, 1, 2, 4, 1, 2], 2, [4, 1]),  # the latest
        ([1, 2, 3, 1, 2, 4, 1, 2, 3, 7, 1, 2], 2, [3, 7]),  # the most frequent, and of these the latest
        ([1, 2, 3], 3, []),
        ([1], 3, []),
        ([5, 5, 5, 5], 3, [5, 5]),  # no further than there is text
    ],
)
def test_a_draft_is_what_followed_the_same_tokens_before(text: list[int], count: int, expected: list[int]) -> None:
    seen = SeenText(2)
    assert seen.draft(seen.add(text), count) == expected


def test_a_longer_match_counts_more_than_the_latest() -> None:
    seen = SeenText(2)
    long = list(range(20, 30))
    seen.add([*long, 50, 51])
    seen.add([0, *long[-2:], 60, 61])
    assert seen.draft(seen.add(long), 2) == [50, 51]
    assert seen.draft(seen.add([7, 7, 7, 7, 7, 7, 7, *long[-2:]]), 2) == [60, 61]


def test_text_that_comes_in_parts_is_found_as_if_it_had_come_at_once() -> None:
    text = [(3 * place * place) % 7 for place in range(60)]
    at_once, in_parts = SeenText(3), SeenText(3)
    at_once.add(text)
    number = in_parts.add(text[:2])
    for begin, end in pairwise([2, 3, 9, 10, 60]):
        in_parts.extend(number, text[begin:end])
    assert in_parts.text(number) == text
    assert [seen.draft(seen.add(text[20:27]), 5) for seen in (at_once, in_parts)] == [text[27:32]] * 2


def test_a_group_is_drafted_from_and_by_prompt_lookup_the_row_alone() -> None:
    for of_group, expected in ((True, [7, 8, 9]), (False, [])):
        drafter = Drafter(3, 2, of_group)
        drafter.begin("a", PROMPT)
        drafter.begin("b", PROMPT)
        assert draft(drafter, "a", [7, 8, 9, 3, 4]) == [5, 6], "both look up the prompt"
        assert draft(drafter, "b", []) == expected
    assert drafter.draft("another's", np.array(PROMPT, dtype=np.int32)) == []


def test_the_epoch_before_is_drafted_from_until_it_is_forgotten() -> None:
    drafter = Drafter(3, 2, of_group=True)
    for epoch, response in enumerate(([7, 8, 9], [7, 7, 7], [1, 9, 9])):
        name = str(epoch)
        drafter.begin(name, PROMPT)
        drafter.begin(f"{name} aborted", PROMPT)
        assert draft(drafter, name, []) == ([[], [7, 8, 9], [7, 7, 7]][epoch])
        drafter.end(f"{name} aborted")
        drafter.end(name, response)
    drafter.forget()
    drafter.begin("last", PROMPT)
    assert draft(drafter, "last", []) == []


def test_a_response_that_was_begun_is_continued() -> None:
    drafter = Drafter(3, 2, of_group=True)
    drafter.begin("first", PROMPT)
    drafter.end("first", [7, 8])
    drafter.begin("resumed", PROMPT, [7, 8])
    assert draft(drafter, "resumed", [7, 8, 9]) == []
    drafter.end("resumed", [9, 10])
    drafter.begin("next", PROMPT)
    assert draft(drafter, "next", [7]) == [8, 9, 10]


def test_the_oldest_history_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "MOST_HISTORY_TOKENS", 5)
    drafter = Drafter(2, 1, of_group=True)
    for prompt in (10, 20, 30):
        drafter.begin("row", [prompt])
        drafter.end("row", [prompt + 1, prompt + 2])
    found = []
    for prompt in (10, 20, 30):
        drafter.begin("row", [prompt])
        found.append(drafter.draft("row", np.array([prompt], dtype=np.int32)))
        drafter.end("row")
    assert found == [[], [21, 22], [31, 32]]
