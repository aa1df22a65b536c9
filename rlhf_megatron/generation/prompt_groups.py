"""Groups on their way: prompts with the responses that there are so far, what is asked of an engine for them, what is
left of them when a generation ends early, the text of what there is, and how a checkpoint keeps it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.data.column_values import row_of_users
from rlhf_megatron.data.drawn_prompts import DrawnPrompt
from rlhf_megatron.data.expert_choices import ChoiceShape
from rlhf_megatron.data.prompts import Prompt
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.generation.replica import ALONE, Replica
from rlhf_megatron.rollout.engine import Completion, Request
from rlhf_megatron.rollout.grouped_requests import GroupedRequests
from rlhf_megatron.topology.exchange import gather_objects

_ENDINGS = ("abort", "stop", "length")
_NONE = -1  # in a tensor of a checkpoint
_LONGER = 2**40  # than any prompt
_OF_BEGUN = ("rows", "token_ids", "logprobs", "weight_versions")

ReadPrompts = Callable[[Sequence[tuple[int, int]]], Sequence[Prompt | None]]


_NOTHING: Mapping[int, Completion] = {}


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """A prompt and the responses to it so far, whole ones and parts, by their number in the group.

    Attributes:
        drawn: the prompt, perhaps one that is not read before a replica answers it.
        begun: on the ranks of the replica ``home`` alone.
        number: of the prompt, in the order in which the run has drawn them; None where that does not count.
        home: the replica that answers it; None for any.
        version: of the weights of its oldest token; None where there is none.
        is_whole: whether all responses are whole.
    """

    drawn: Prompt | DrawnPrompt
    begun: Mapping[int, Completion] = dataclasses.field(default_factory=lambda: _NOTHING)
    number: int | None = None
    home: int | None = None
    version: int | None = None
    is_whole: bool = False

    @property
    def prompt(self) -> Prompt:
        """The prompt as a whole."""
        return self.drawn if isinstance(self.drawn, Prompt) else self.drawn.whole()

    def row(self, seed: int) -> dict[str, Any]:
        """Return the prompt's row of the data as a user's environment or agent gets it, with a seed."""
        prompt = self.prompt
        return row_of_users(prompt.messages, prompt.data_source, prompt.ground_truth, prompt.extra_info, seed)


def requests_for(
    groups: Sequence[Group],
    responses_per_prompt: int,
    max_tokens_of: Callable[[int], int],
    seed_of: Callable[[int], int],
    replica: int = 0,
    in_order: bool = False,
    limit_of: Callable[[int], int] | None = None,
) -> GroupedRequests:
    """Return a request for every response that is not whole, of groups that ``replica`` may answer, group by group:
    its own first, those begun before others; then those of any replica, which come alike on all.

    What comes last is what all replicas wait for, so it should not take long: it has short prompts, unless groups are
    to be answered ``in_order``. Response k of group i is row ``i * responses_per_prompt + k``, with the sampling seed
    ``seed_of`` its row, at most ``max_tokens_of`` its prompt's length, and ``limit_of`` its row where that is given.
    """

    everything = range(responses_per_prompt)
    lacking = {index: _lacking(group, everything) for index, group in enumerate(groups) if group.begun}

    def priority(index: int) -> int:
        group = groups[index]
        rank = 2 * (group.home is None) + (group.version is None)
        return rank * _LONGER - (0 if in_order else group.drawn.length)

    def make(position: int) -> list[Request]:
        index = order[position]
        group, requests = groups[index], []
        for number in lacking.get(index, everything):
            row, key = index * responses_per_prompt + number, None if group.number is None else (group.number, number)
            begun, most = _begun(group, number, max_tokens_of), limit_of(row) if limit_of else None
            requests.append(Request(row, group.prompt.token_ids, seed_of(row), index, begun, most, key))
        return requests

    may_answer = (index for index, group in enumerate(groups) if group.home in (None, replica))
    order = sorted((index for index in may_answer if lacking.get(index, everything)), key=priority)
    sizes = [len(lacking.get(index, everything)) for index in order]
    prompt_tokens = sum(size * groups[index].drawn.length for size, index in zip(sizes, order, strict=True))
    firsts = itertools.accumulate(sizes, initial=0)
    begun = {
        first + offset: completion
        for first, index in zip(firsts, order, strict=False)
        for offset, number in enumerate(lacking.get(index, ()))
        if (completion := _begun(groups[index], number, max_tokens_of))
    }
    return GroupedRequests(order, sizes, prompt_tokens, begun, make)


def _lacking(group: Group, numbers: Iterable[int]) -> list[int]:
    """Return those responses of a group that are not whole."""
    return [number for number in numbers if number not in group.begun or not group.begun[number].is_whole]


def _begun(group: Group, number: int, max_tokens_of: Callable[[int], int]) -> Completion | None:
    """Return the tokens so far of a response; None where they are of a recipe that allowed more."""
    begun = group.begun.get(number)
    return begun if begun and len(begun.token_ids) < max_tokens_of(group.drawn.length) else None


def answer_text(completion: Completion, tokenizer: Tokenizer) -> str:
    """Return the text of the model's last turn, by which a response is judged."""
    return turns_of_model(completion, tokenizer)[-1]


def turns_of_model(completion: Completion, tokenizer: Tokenizer) -> list[str]:
    """Return the text of each of the model's turns."""
    if completion.sampled is None:
        return [tokenizer.decode(completion.token_ids)]
    marked = zip(completion.sampled, completion.token_ids, strict=True)
    turns = [[token for _, token in run] for own, run in itertools.groupby(marked, lambda pair: pair[0]) if own]
    return [tokenizer.decode(turn) for turn in turns]


def groups_left(
    groups: Sequence[Group],
    chosen: Collection[int],
    completions: Sequence[Completion],
    responses_per_prompt: int,
    discard: bool,
    replica: Replica,
    team: dist.ProcessGroup | None = None,
) -> list[Group]:
    """Return the groups that are not ``chosen``, by number, with their responses so far unless these are discarded.

    ``completions`` are those of this ``replica``, whole or not, where they stay; collective over ``team``.
    """
    left = sorted(set(range(len(groups))).difference(chosen))
    if discard:
        return [Group(groups[index].drawn, number=groups[index].number) for index in left]
    begun = {index: dict(groups[index].begun) for index in left}
    for completion in completions:
        index, number = divmod(completion.row_id, responses_per_prompt)
        if index in begun:
            begun[index][number] = dataclasses.replace(completion, row_id=number)
    own = {index: begun_numbers(rows.values(), responses_per_prompt) for index, rows in begun.items() if rows}
    known: dict[int, dict[str, Any]] = {}
    for home, numbers in gather_objects((replica.index, own) if replica.leads else (None, {}), team):
        known |= {index: {"home": home} | of_group for index, of_group in numbers.items()}
    return [dataclasses.replace(groups[index], begun=begun[index], **known.get(index, {})) for index in left]


def begun_numbers(rows: Collection[Completion], responses_per_prompt: int) -> dict[str, Any]:
    """Return the numbers that all ranks know of a group that is begun: ``version`` and ``is_whole``."""
    is_whole = len(rows) == responses_per_prompt and all(completion.is_whole for completion in rows)
    return {
        "version": min((each.weight_version for each in rows if each.token_ids), default=None),
        "is_whole": is_whole,
    }


def groups_state(groups: Sequence[Group]) -> dict[str, Any]:
    """Return what all ranks know of groups, for a checkpoint: tensors; {} for no groups.

    Of a prompt only its position in the data and its tokens, by which it is known again: what a row carries for its
    reward may be of any type that a file has.
    """
    if not groups:
        return {}
    prompts = [group.prompt for group in groups]
    return {
        "prompts": torch.tensor([[prompt.part, prompt.row, len(prompt.token_ids)] for prompt in prompts]),
        "prompt_token_ids": torch.tensor([token for prompt in prompts for token in prompt.token_ids]),
        "places": torch.tensor([[_or_none(group.number), _or_none(group.home)] for group in groups]),
    }


def begun_tensors(groups: Sequence[Group]) -> dict[str, Tensor]:
    """Return the responses to groups that this rank has, for a checkpoint."""
    rows = [(index, number, row) for index, group in enumerate(groups) for number, row in sorted(group.begun.items())]
    completions = [completion for _, _, completion in rows]
    return {
        "rows": torch.tensor(
            [[index, number, len(row.token_ids), _ENDINGS.index(row.finish_reason)] for index, number, row in rows],
            dtype=torch.int64,
        ).reshape(-1, 4),
        "token_ids": torch.tensor([token for row in completions for token in row.token_ids], dtype=torch.int64),
        "logprobs": torch.tensor([value for row in completions for value in row.logprobs], dtype=torch.float64),
        "weight_versions": torch.tensor([version for row in completions for version in row.weight_versions]).long(),
    } | _choices_state([row.expert_choices for row in completions])


def with_begun(state: dict[str, Any], parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    """Return a ``groups_state`` with the ``begun_tensors`` of several ranks, for ``groups_from_state``.

    Raises KeyError or ValueError where they are none.
    """
    parts = [part for part in parts if part] or [begun_tensors([])]
    none = torch.zeros(0, dtype=torch.int64)
    lengths = [part.get("expert_choice_lengths", none.new_zeros(len(part["rows"]))) for part in parts]
    known = [part["expert_choices"] for part in parts if "expert_choices" in part]
    try:
        of_begun = {name: torch.cat([part[name] for part in parts]) for name in _OF_BEGUN}
        choices = {"expert_choices": torch.cat(known), "expert_choice_lengths": torch.cat(lengths)} if known else {}
    except RuntimeError as error:
        raise ValueError("groups that wait have responses of other shapes than each other") from error
    return state | of_begun | choices


def _or_none(number: int | None) -> int:
    return _NONE if number is None else number


def _choices_state(choices: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """Return the rows' choices of experts, concatenated; nothing where none are recorded."""
    known = [of_row for of_row in choices if of_row is not None]
    if not known:
        return {}
    lengths = torch.tensor([0 if of_row is None else len(of_row) for of_row in choices])
    return {"expert_choices": torch.cat(known), "expert_choice_lengths": lengths}


def _choices_from_state(state: dict[str, Any], rows: int, choices: ChoiceShape | None) -> Sequence[Tensor | None]:
    """Return each row's choices; None for all where they are not recorded now, or were not then.

    Raises ValueError where they are not those of so many rows.
    """
    if choices is None or "expert_choices" not in state:
        return [None] * rows
    lengths = state["expert_choice_lengths"].tolist()
    if len(lengths) != rows or min(lengths, default=0) < 0:
        raise ValueError(f"groups that wait have expert choices of {len(lengths)} rows, and not of {rows}")
    choices.check(state["expert_choices"], sum(lengths))
    of_rows: Sequence[Tensor] = state["expert_choices"].split(lengths)
    return of_rows


def _check(state: dict[str, Any], vocabulary: int) -> None:
    """Raise ValueError where tensors of groups do not belong together, or no engine takes them."""
    prompts, rows = state["prompts"], state["rows"]
    if not rows.numel():  # without any, there is one dimension
        rows = rows.reshape(0, 4)
    sizes = {name: len(state[name]) for name in ("token_ids", "logprobs", "weight_versions")}
    sound = (
        prompts.dim() == rows.dim() == 2
        and prompts.shape[1] == 3
        and rows.shape[1] == 4
        and not prompts.is_floating_point()
        and not rows.is_floating_point()
        and bool((prompts >= 0).all() and (rows >= 0).all())
        and int(prompts[:, 2].sum()) == len(state["prompt_token_ids"])
        and set(sizes.values()) == {int(rows[:, 2].sum())}
        and ("places" not in state or state["places"].shape == (len(prompts), 2))
    )
    if not sound:
        raise ValueError("groups that wait have tensors of other sizes than they say")
    tokens, versions = state["token_ids"], state["weight_versions"]
    if tokens.is_floating_point() or bool(((tokens < 0) | (tokens >= vocabulary)).any()):
        raise ValueError(f"groups that wait have tokens beyond the vocabulary of {vocabulary}")
    if versions.is_floating_point() or not bool(state["logprobs"].isfinite().all()):
        raise ValueError("groups that wait have logprobs or versions that are none")


def groups_from_state(
    state: dict[str, Any],
    responses_per_prompt: int,
    read: ReadPrompts,
    vocabulary: int,
    choices: ChoiceShape | None = None,
    replica: Replica = ALONE,
) -> list[Group]:
    """Return the groups of a state ``with_begun``, of a recipe with so many responses now, as ``replica`` has them.

    A group that is begun goes to the replica that had it, or where there are others now, to one by its number.

    ``read`` gives the prompts at (part, row) of the data, None where one is left out now, as its group is then. Where a
    prompt has other tokens now (another chat template), its responses begin anew. ``choices``: of experts, where they
    are recorded now.
    """
    if not state:
        return []
    _check(state, vocabulary)
    positions = state["prompts"].tolist()
    prompts = read([(part, row) for part, row, _ in positions])
    tokens = state["prompt_token_ids"].split([length for _, _, length in positions])
    same = [
        prompt is not None and list(prompt.token_ids) == saved.tolist()
        for prompt, saved in zip(prompts, tokens, strict=True)
    ]
    begun: list[dict[int, Completion]] = [{} for _ in prompts]
    end = 0
    rows = state["rows"].tolist()
    for (index, number, length, ending), of_experts in zip(
        rows, _choices_from_state(state, len(rows), choices), strict=True
    ):
        start, end = end, end + length
        if of_experts is not None and len(of_experts) > positions[index][2] + length:
            raise ValueError("groups that wait have expert choices of more tokens than their rows have")
        if number >= responses_per_prompt or not same[index]:
            continue
        begun[index][number] = Completion(
            number,
            state["token_ids"][start:end].tolist(),
            state["logprobs"][start:end].tolist(),
            _ENDINGS[ending],
            state["weight_versions"][start:end].tolist(),
            expert_choices=of_experts,
        )
    # Of before groups had numbers, by place.
    places = state["places"].tolist() if "places" in state else [[index, _NONE] for index in range(len(prompts))]
    return [
        _placed(Group(prompt, rows, None if number == _NONE else number), home, responses_per_prompt, replica)
        for prompt, rows, (number, home) in zip(prompts, begun, places, strict=True)
        if prompt is not None
    ]


def _placed(group: Group, home: int, responses_per_prompt: int, replica: Replica) -> Group:
    """Return the group on the ranks of ``replica``, of which ``home`` had it in the run that was saved, if any."""
    if not group.begun and home == _NONE:
        return group
    home = ((group.number or 0) if home == _NONE else home) % replica.count
    known = begun_numbers(group.begun.values(), responses_per_prompt) if group.begun else {}
    return dataclasses.replace(group, begun=group.begun if home == replica.index else {}, home=home, **known)
