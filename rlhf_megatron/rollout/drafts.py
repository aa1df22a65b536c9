"""Drafts of a response's next tokens, out of text that was there before: speculative decoding without a draft model.

The last tokens of a response are looked up in its prompt and in what has been sampled to that prompt: by the response
itself (prompt lookup, https://github.com/apoorvumang/prompt-lookup-decoding), by the others of its group, and by its
group of the epoch before (suffix decoding, arXiv 2411.04975). What followed there most often is the draft. A bad draft
costs time and never changes what is sampled: the model verifies each token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Of the places with the same last tokens, the latest so many are compared, by so many more tokens before them.
_PLACES, _LONGER_MATCHES = 8, (16, 8)
MOST_HISTORY_TOKENS = 2**26
"""Of responses of earlier epochs, 4 bytes each; the oldest are forgotten first."""

Prompt = tuple[int, ...]
_Place = tuple[int, int]  # number of a text, tokens of it before the place


class SeenText:
    """Texts about one prompt, and where each run of ``match`` tokens in them occurs."""

    def __init__(self, match: int) -> None:
        """Start with no texts."""
        self._match = match
        self._texts: list[list[int]] = []
        self._places: dict[Prompt, list[_Place]] = {}

    def add(self, tokens: Sequence[int]) -> int:
        """Take a text; return its number."""
        self._texts.append([])
        self.extend(len(self._texts) - 1, tokens)
        return len(self._texts) - 1

    def extend(self, number: int, tokens: Sequence[int]) -> None:
        """Take what follows in a text."""
        text, match = self._texts[number], self._match
        begin = max(len(text) + 1, match)
        text += tokens
        for end in range(begin, len(text) + 1):
            self._places.setdefault(tuple(text[end - match : end]), []).append((number, end))

    def length(self, number: int) -> int:
        """Return the number of a text's tokens so far."""
        return len(self._texts[number])

    def text(self, number: int) -> list[int]:
        """Return a text so far."""
        return self._texts[number]

    def draft(self, number: int, count: int) -> list[int]:
        """Return at most ``count`` tokens that may follow a text: at each the most frequent one, of several the latest.

        Of the places that the text's last ``match`` tokens led to, those count whose tokens before agree for longest.
        """
        text = self._texts[number]
        places = self._longest(text, self._places.get(tuple(text[-self._match :]), ())[-_PLACES - 1 :])
        drafted: list[int] = []
        while len(places) > 1 and len(drafted) < count:
            following = [self._texts[row][end] for row, end in reversed(places)]
            token = max(following, key=following.count)
            drafted.append(token)
            places = [
                (row, end + 1)
                for row, end in places
                if self._texts[row][end] == token and end + 1 < len(self._texts[row])
            ]
        if places:
            row, end = places[0]
            drafted += self._texts[row][end : end + count - len(drafted)]
        return drafted

    def _longest(self, text: list[int], places: Sequence[_Place]) -> list[_Place]:
        """Return the places that tokens follow, those alone whose tokens before agree with the end of ``text`` for
        longest."""
        followed = [(row, end) for row, end in places if end < len(self._texts[row])]
        for length in _LONGER_MATCHES if len(followed) > 1 else ():
            wanted = text[-length:]
            longer = [(row, end) for row, end in followed if self._texts[row][max(end - length, 0) : end] == wanted]
            if longer:
                return longer
        return followed


class _Row(NamedTuple):
    key: Prompt  # of its group
    number: int  # of its text
    begun: int  # tokens of the response that were there at first


class Drafter:
    """Drafts of the requests in one engine, by their names; every rank of a replica drafts the same."""

    def __init__(self, count: int, match: int, of_group: bool) -> None:
        """Draft ``count`` tokens where the last ``match`` have been there before: ``of_group`` in any response to the
        prompt, else in the request's own."""
        self._count, self._match, self._of_group = count, match, of_group
        self._history: dict[Prompt, list[array[int]]] = {}  # the oldest first
        self._history_tokens = 0
        self._groups: dict[Prompt, _Group] = {}
        self._rows: dict[str, _Row] = {}
        self._begun = 0

    def begin(self, name: str, prompt: Sequence[int], begun: Sequence[int] = ()) -> None:
        """Take a request that is to continue ``begun`` after ``prompt``."""
        self._begun += 1
        key = tuple(prompt) if self._of_group else (*prompt, -self._begun)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(self._match, prompt, self._history.get(key, ()))
        self._rows[name] = _Row(key, group.begin(begun), len(begun))

    def draft(self, name: str, sequence: Sequence[int] | NDArray[np.int32]) -> list[int]:
        """Return the draft after ``sequence``, a request's prompt and response so far; none for an unknown request."""
        row = self._rows.get(name)
        if row is None:
            return []
        group = self._groups[row.key]
        group.follow(row.number, sequence)
        return group.seen.draft(row.number, self._count)

    def end(self, name: str, sampled: Sequence[int] = ()) -> None:
        """Take what a request has ``sampled`` that has ended or was aborted."""
        row = self._rows.pop(name)
        group = self._groups[row.key]
        if group.end(row, sampled):
            return
        del self._groups[row.key]
        if self._of_group and group.responses:
            self._keep(row.key, group.responses)

    def forget(self) -> None:
        """Forget earlier epochs, as a new engine knows none; requests that are there keep theirs."""
        self._history, self._history_tokens = {}, 0

    def _keep(self, key: Prompt, responses: list[array[int]]) -> None:
        self._history_tokens -= sum(map(len, self._history.pop(key, ())))
        self._history[key] = responses
        self._history_tokens += sum(map(len, responses))
        while self._history_tokens > MOST_HISTORY_TOKENS:
            self._history_tokens -= sum(map(len, self._history.pop(next(iter(self._history)))))


class _Group:
    """Requests with the same prompt, while there are any."""

    def __init__(self, match: int, prompt: Sequence[int], earlier: Sequence[Sequence[int]]) -> None:
        self.seen = SeenText(match)
        self.responses: list[array[int]] = []
        self._prompt_length, self._lead = len(prompt), list(prompt[-match:])
        self._running = 0
        self.seen.add(prompt)
        for response in earlier:
            self.seen.add([*self._lead, *response])

    def begin(self, begun: Sequence[int]) -> int:
        """Take a request, whose text begins with the prompt's last tokens; return its number."""
        self._running += 1
        return self.seen.add([*self._lead, *begun])

    def follow(self, number: int, sequence: Sequence[int] | NDArray[np.int32]) -> None:
        """Take what is new in a request's prompt and response."""
        known = self._prompt_length + self.seen.length(number) - len(self._lead)
        if known < len(sequence):
            new = sequence[known:]
            self.seen.extend(number, new.tolist() if isinstance(new, np.ndarray) else new)

    def end(self, row: _Row, sampled: Sequence[int]) -> int:
        """Keep the response of a request that has ended; return how many still run."""
        known = self.seen.length(row.number) - len(self._lead) - row.begun
        self.seen.extend(row.number, sampled[known:])
        response = self.seen.text(row.number)[len(self._lead) :]
        if response:
            self.responses.append(array("i", response))
        self._running -= 1
        return self._running
