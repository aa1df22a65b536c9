"""Trajectories of several turns on disk as they go, so that a killed run goes on with them: journal/step-N/.

A replica's leading rank adds a line at each turn. A run that resumes before the step finds them by their prompts: whole
trajectories are not generated again, those whose environment has told its state go on with their next turn, an agent's
program begins again and is answered as before, others begin again. A step's folder is deleted when a checkpoint has the
step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rlhf_megatron.data.prompts import Prompt
from rlhf_megatron.durable import remove
from rlhf_megatron.errors import DataError
from rlhf_megatron.generation.journal_rows import JournalRow, Name, read_rows, token_line
from rlhf_megatron.generation.prompt_groups import Group, begun_numbers
from rlhf_megatron.generation.replica import Replica
from rlhf_megatron.recipe import AgentSection, MultiTurnSection, RLRecipe
from rlhf_megatron.rewards.answers import Message
from rlhf_megatron.rewards.user_function import split_specification
from rlhf_megatron.rollout.engine import Completion, SampledTurn
from rlhf_megatron.topology.exchange import from_rank, gather_objects
from rlhf_megatron.topology.team import Team
from rlhf_megatron.untrusted import read_bytes, reason_of

_FORMAT = 1
_STEP = re.compile(r"step-(\d+)")
_FILE = re.compile(r"(\d+)-(\d+)-(\d+)\.jsonl")  # call of the step, attempt, replica
_NEVER = 2**53  # a step


class JournaledCall:
    """The journal of one call of ``generate``, on one rank. Only a replica's leader writes.

    Attributes:
        groups: as asked for, with what there is of them.
        rows: trajectories that this replica has begun before, by the row's id.
        replayed, resumed, restarted: how many of these are whole, go on, and begin again.
    """

    def __init__(self, groups: Sequence[Group], responses: int, rows: Mapping[int, JournalRow]) -> None:
        """Write nothing before ``begin_file``."""
        self.groups, self.rows, self._responses = groups, rows, responses
        self._file: IO[str] | None = None
        self._written: dict[int, tuple[int, int]] = {}  # tokens and answers, by row
        self.replayed = sum(row.is_whole for row in rows.values())
        self.restarted = sum(row.begins_again for row in rows.values())
        self.resumed = len(rows) - self.replayed - self.restarted

    def begin_file(self, path: Path, about: Mapping[str, Any]) -> None:
        """Open the file, and write what there is so far."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", encoding="utf-8", buffering=1)  # of a killed process, whole lines stay
        except OSError as error:
            print(f"warning: {path}: cannot be written: {reason_of(error)}", file=sys.stderr, flush=True)
        self._write(about)
        for row_id, row in self.rows.items():
            self._begin(row_id, row.attempts)
            for asked, turn in row.recorded:
                self.keep_turn(row_id, asked, turn)
            if row.completion and row.messages is not None:
                self.keep_branches(row.completion.of_row(row_id), row.messages)
            elif row.completion:
                self.keep(row.completion.of_row(row_id), row.opening, row.answers, row.state)

    def begin(self, row_id: int) -> int:
        """Note that a trajectory begins or goes on; return for which time, 1 for the first."""
        if row_id in self.rows:
            return self.rows[row_id].attempts
        self._begin(row_id, 1)
        return 1

    def begin_again(self, row_id: int) -> None:
        """Note that what there is of a trajectory is of no use to a later run, before its end."""
        self._begin(row_id, self.rows[row_id].attempts if row_id in self.rows else 1)

    def _begin(self, row_id: int, attempts: int) -> None:
        self._written[row_id] = 0, 0
        prompt = _digest_of(self.groups[row_id // self._responses].prompt)
        self._write({"row": self._name(row_id), "attempts": attempts, "prompt": prompt})

    def _name(self, row_id: int) -> Name:
        group, response = divmod(row_id, self._responses)
        return _number(self.groups, group), response

    def keep(
        self,
        completion: Completion,
        opening: Sequence[Message],
        answers: Sequence[Sequence[Message]],
        state: str | None,
    ) -> None:
        """Add what is new of a trajectory, of which all is given."""
        row_id, count = completion.row_id, len(completion.token_ids)
        if self._file is None:
            return
        if row_id not in self._written:
            self._begin(row_id, 1)
        tokens, known = self._written[row_id]
        self._written[row_id] = count, len(answers)
        line = {"row": self._name(row_id), **token_line(completion, tokens)}
        line |= {"answers": [list(each) for each in answers[known:]], "state": state}
        self._write(line if tokens else line | {"opening": list(opening)})

    def keep_turn(self, row_id: int, asked: str, turn: SampledTurn) -> None:
        """Add an agent's turn, by the digest of what was asked; weight versions are the file's."""
        completion = Completion(row_id, turn.token_ids, turn.logprobs, turn.finish_reason, turn.weight_versions)
        self._write({"row": self._name(row_id), "asked": asked, **token_line(completion)})

    def keep_branches(self, completion: Completion, messages: Sequence[Message]) -> None:
        """Add a trajectory of several rows, which is whole."""
        branches = [token_line(branch) for branch in (*completion.branches, completion)]
        self._write({"row": self._name(completion.row_id), "branches": branches, "messages": list(messages)})

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError as error:  # a full disk costs what a killed run would go on with, not the run
            print(f"warning: {self._file.name}: cannot be written: {reason_of(error)}", file=sys.stderr, flush=True)
            self._file = None

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class Journal:
    """The journal of a run, on one rank of the team that generates. Every call is collective over it."""

    def __init__(self, folder: Path, recipe: RLRecipe, replica: Replica, team: Team) -> None:
        """Set up; ``folder`` is the run's journal/."""
        self._folder, self._replica, self._team = folder, replica, team
        self._needs_state, self._most_tokens = recipe.needs_state, recipe.rollout.max_response_length
        self._recipe = _digest_of_recipe(recipe)
        self._step = self._call = 0
        self._is_first = replica.leads and replica.index == 0

    def open(self, step: int, version: int, groups: Sequence[Group], responses: int) -> JournaledCall:
        """Return the journal of the step's next call of ``generate``, by weights of ``version``."""
        self._step, self._call = step, self._call + 1 if step == self._step else 0
        about = {"format": _FORMAT, "recipe": self._recipe, "version": version}
        files = from_rank(self._files() if self._is_first else [], self._team.ranks[0], self._team.group)
        call = JournaledCall(*self._restored(files, about, groups, responses))
        if self._replica.leads:
            attempt = 1 + max((int(_FILE.fullmatch(name)[2]) for name in files), default=-1)  # type: ignore[index]
            call.begin_file(self._path(f"{self._call}-{attempt}-{self._replica.index}.jsonl"), about)
        if files:
            gather_objects(None, self._team.group)  # what went into new files is there
            for name in files if self._is_first else ():
                remove(self._path(name))
        return call

    def forget(self, saved: int | None) -> None:
        """Delete the steps up to that of a checkpoint."""
        if saved is not None and self._is_first:
            self._delete(range(saved + 1))

    def _path(self, name: str) -> Path:
        return self._folder / f"step-{self._step}" / name

    def _files(self) -> list[str]:
        """Return the names of the files of this call; without any, later steps are not those that follow."""
        matches = [_FILE.fullmatch(path.name) for path in self._path("").glob("*")]
        names = sorted(match[0] for match in matches if match and int(match[1]) == self._call)
        if not names:
            self._delete(range(self._step + 1, _NEVER))
        return names

    def _delete(self, steps: range) -> None:
        for path in list(self._folder.iterdir()) if self._folder.is_dir() else []:
            match = _STEP.fullmatch(path.name)
            if match and int(match[1]) in steps:
                remove(path)

    def _restored(
        self, files: Sequence[str], about: Mapping[str, Any], groups: Sequence[Group], responses: int
    ) -> tuple[Sequence[Group], int, dict[int, JournalRow]]:
        """Return the groups as all know them, with the responses that are this replica's, and its rows. Where two
        replicas have a group, since one was killed as it took over, the one with more of it goes on."""
        if not files:
            return groups, responses, {}
        own = self._own_rows(files, about, groups, responses)
        tokens = {index: sum(row.length for row in rows.values()) for index, rows in own.items()}
        told = {index: (tokens[index], begun_numbers(_begun(rows).values(), responses)) for index, rows in own.items()}
        holders: dict[int, tuple[int, int, dict[str, Any]]] = {}
        mine = (self._replica.index, told) if self._replica.leads else (None, {})
        for home, of_replica in gather_objects(mine, self._team.group):
            for index, (count, numbers) in of_replica.items():
                if index not in holders or count > holders[index][0]:
                    holders[index] = count, home, numbers
        shared, kept = list(groups), dict[int, JournalRow]()
        for index, (_, home, numbers) in holders.items():
            is_mine = home == self._replica.index
            kept |= {index * responses + number: row for number, row in own[index].items()} if is_mine else {}
            begun = _begun(own[index]) if is_mine else {}
            shared[index] = dataclasses.replace(groups[index], home=home, begun=begun, **numbers)
        return shared, responses, kept

    def _own_rows(
        self, files: Sequence[str], about: Mapping[str, Any], groups: Sequence[Group], responses: int
    ) -> dict[int, dict[int, JournalRow]]:
        """Return this replica's share of the files: rows by group and response."""
        if self._replica.index is None:
            return {}
        indices = {_number(groups, index): index for index in range(len(groups))}
        by_group: dict[int, dict[int, JournalRow]] = {}
        for name in files[self._replica.index :: self._replica.count]:
            for (number, response), row in read_rows(self._path(name), about).items():
                index = indices.get(number)
                if index is None or response >= responses or _digest_of(groups[index].prompt) != row.prompt:
                    continue
                rows = by_group.setdefault(index, {})
                if response not in rows or rows[response].length <= row.length:
                    rows[response] = self._usable(row)
        return by_group

    def _usable(self, row: JournalRow) -> JournalRow:
        """Return the row as it goes on in this attempt: without its tokens where nothing can follow them."""
        if row.is_whole:
            return row
        row.attempts += 1
        if row.completion is None:
            return row
        if row.length >= self._most_tokens or (self._needs_state and row.state is None):
            return JournalRow(row.prompt, row.attempts)
        return row


def _begun(rows: Mapping[int, JournalRow]) -> dict[int, Completion]:
    return {response: row.completion for response, row in rows.items() if row.completion}


def is_failed(completion: Completion) -> bool:
    """Return whether a trajectory is left out of training, since its environment failed."""
    return any(map(math.isnan, completion.turn_rewards or ()))


def _number(groups: Sequence[Group], index: int) -> int:
    number = groups[index].number
    return index if number is None else number


def _digest_of(prompt: Prompt) -> str:
    return digest_of_tokens(prompt.token_ids)


def digest_of_tokens(token_ids: Sequence[int], *more: Any) -> str:
    """Return a digest of tokens, and of what else makes a difference."""
    return hashlib.blake2b(json.dumps([list(token_ids), *more]).encode(), digest_size=8).hexdigest()


def _digest_of_recipe(recipe: RLRecipe) -> str:
    """Return a digest of what decides what trajectories are, the files of functions, tools, environment or agent
    included."""
    turns, agent, rollout = recipe.rollout.multi_turn, recipe.rollout.agent, recipe.rollout
    section = turns or agent
    assert section is not None
    sections = {name: getattr(recipe, name) for name in ("model", "data", "batch", "algorithm", "reward")}
    sections |= {"turns": section, "optimizer": recipe.actor.optimizer}
    values = {name: section.model_dump(mode="json") for name, section in sections.items()}
    values |= {"seed": recipe.seed, "sampling": [rollout.temperature, rollout.top_p, rollout.top_k]}
    values |= {"tokens": rollout.max_response_length, "begun": [rollout.oversample, rollout.steps_ahead]}
    content = b"".join(read_bytes(split_specification(each)[0], DataError) for each in _files(turns, agent))
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode() + content, digest_size=8).hexdigest()


def _files(turns: MultiTurnSection | None, agent: AgentSection | None) -> list[str]:
    """Return the specifications of the user's functions or class."""
    if turns is None:
        return [agent.function] if agent else []
    own = turns.tool_functions if turns.tools else [turns.function or turns.environment or ""]
    return [*own, turns.context] if turns.context else own
