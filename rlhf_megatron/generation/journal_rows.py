"""The lines of a journal: what there is of a trajectory, and how that is written and read again."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import DataError, UserError
from rlhf_megatron.rewards.answers import Message
from rlhf_megatron.rollout.engine import Completion, SampledTurn
from rlhf_megatron.untrusted import opened, parse_json

_MOST_LINE_BYTES = 2**26

# Of a trajectory: the number of its prompt in the run, or its place in the call, and that of the response.
Name = tuple[int, int]


@dataclasses.dataclass
class JournalRow:
    """One trajectory so far.

    Attributes:
        prompt: digest of the prompt's tokens.
        attempts: how often it was begun or gone on with.
        completion: up to the model's next turn; its row id is the number of the response. None: it begins again.
        opening: what was observed before the first turn.
        answers: what followed each turn.
        state: of its environment, in base64; None where it has told none.
        recorded: of an agent that has not ended, its turns, each with the digest of its prompt.
        messages: of a trajectory of several rows that has ended, its conversation.
    """

    prompt: str
    attempts: int
    completion: Completion | None = None
    opening: list[Message] = dataclasses.field(default_factory=list)
    answers: list[list[Message]] = dataclasses.field(default_factory=list)
    state: str | None = None
    recorded: list[tuple[str, SampledTurn]] = dataclasses.field(default_factory=list)
    messages: list[Message] | None = None

    @property
    def is_whole(self) -> bool:
        """True if nothing of it is left to generate."""
        return self.completion is not None and self.completion.is_whole

    @property
    def begins_again(self) -> bool:
        """True if nothing of it is there to go on with."""
        return self.completion is None and not self.recorded

    @property
    def length(self) -> int:
        """Number of tokens after the prompt."""
        of_agent = sum(len(turn.token_ids) for _, turn in self.recorded)
        return len(self.completion.token_ids) if self.completion else of_agent

    def add(self, line: Mapping[str, Any], response: int, version: int) -> None:
        """Append what a line of the file has; raises KeyError, TypeError or ValueError where it is none."""
        begun = Completion(response, [], [], "abort", [])
        if "asked" in line:
            turn = _extended(begun, line, version)
            of_turn = SampledTurn(turn.token_ids, turn.logprobs, turn.weight_versions, turn.finish_reason)
            self.recorded = [*self.recorded, (str(line["asked"]), of_turn)]
        elif "branches" in line:
            *branches, last = (_extended(begun, branch, version) for branch in line["branches"])
            self.completion = dataclasses.replace(last, branches=tuple(branches))
            self.messages, self.recorded = list(line["messages"]), []
        else:
            self.completion = _extended(self.completion or begun, line, version)
            self.opening, self.state = line.get("opening", self.opening), line["state"]
            self.answers = [*self.answers, *line["answers"]]


def _extended(before: Completion, line: Mapping[str, Any], version: int) -> Completion:
    """Return a completion with the tokens that a ``token_line`` adds; raises KeyError, TypeError or ValueError."""
    tokens, runs, logprobs = line["tokens"], line["sampled"], line["logprobs"]
    if sum(runs) != len(tokens) or sum(runs[::2]) != len(logprobs) or not all(type(each) is int for each in tokens):
        raise ValueError("tokens, marks and logprobs of other lengths")
    marks = [number % 2 == 0 for number, length in enumerate(runs) for _ in range(length)]
    drawn, rewards = iter(logprobs), line["rewards"]
    own = before.sampled or [True] * len(before.token_ids)
    return dataclasses.replace(
        before,
        token_ids=[*before.token_ids, *tokens],
        logprobs=[*before.logprobs, *(float(next(drawn)) if mark else 0.0 for mark in marks)],
        weight_versions=[*before.weight_versions, *[version] * len(tokens)],
        sampled=None if before.sampled is None and all(marks) else [*own, *marks],
        finish_reason=str(line["finish"]),
        turn_rewards=None if rewards is None else [float(each) for each in rewards],
        prompt_token_ids=line.get("prompt_tokens", before.prompt_token_ids),
    )


def token_line(completion: Completion, known: int = 0) -> dict[str, Any]:
    """Return what is to be written of a completion's tokens behind those that are known."""
    tokens = completion.token_ids[known:]
    sampled = (completion.sampled or [True] * len(completion.token_ids))[known:]
    prompt = None if known else completion.prompt_token_ids
    return {
        "tokens": tokens,
        "sampled": _run_lengths(sampled),
        "logprobs": [value for value, own in zip(completion.logprobs[known:], sampled, strict=True) if own],
        "rewards": completion.turn_rewards,
        "finish": completion.finish_reason,
    } | ({"prompt_tokens": prompt} if prompt else {})


def read_rows(path: Path, about: Mapping[str, Any]) -> dict[Name, JournalRow]:
    """Return the rows of a file, up to where it was cut off; none where it is of another recipe or other weights."""
    rows: dict[Name, JournalRow] = {}
    try:
        lines = _lines(path)
        if next(lines, None) != about:
            return {}
        for line in lines:
            name = int(line["row"][0]), int(line["row"][1])
            if "attempts" in line:
                rows[name] = JournalRow(str(line["prompt"]), int(line["attempts"]))
            else:
                rows[name].add(line, name[1], about["version"])
    except (UserError, KeyError, TypeError, ValueError, IndexError):
        return rows  # the last line of a process that was killed
    return rows


def _lines(path: Path) -> Iterator[Any]:
    with opened(path, DataError) as file:
        for line in iter(lambda: file.readline(_MOST_LINE_BYTES), b""):
            yield parse_json(line, str(path), DataError, finite=False)


def _run_lengths(marks: Sequence[bool]) -> list[int]:
    """Return lengths of the runs of equal marks, of which the first is of True, and may be empty."""
    runs = [(mark, len(list(run))) for mark, run in itertools.groupby(marks)]
    return [*([0] if runs and not runs[0][0] else []), *(length for _, length in runs)]
