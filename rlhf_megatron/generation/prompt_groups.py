"""Groups on their way: prompts with the responses that there are so far, what is asked of an engine for them, what is
left of them when a generation ends early, the text of what there is, and how a checkpoint keeps it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.data.expert_choices import ChoiceShape
from rlhf_megatron.data.prompts import Prompt
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.rollout.engine import Completion, Request
from rlhf_megatron.topology.exchange import gather_objects

_ENDINGS = ("abort", "stop", "length")


@dataclasses.dataclass(frozen=True)
class Group:
    """A prompt and the responses to it so far, whole ones and parts, by their number in the group."""

    prompt: Prompt
    begun: Mapping[int, Completion] = dataclasses.field(default_factory=dict)

    def whole(self) -> int:
        """Returns how many responses are whole."""
        return sum(completion.is_whole for completion in self.begun.values())


def requests_for(
    groups: Sequence[Group], responses_per_prompt: int, max_tokens: int, seed_of: Callable[[int], int]
) -> list[Request]:
    """Returns a request for every response that is not whole, group by group: those begun first, then long prompts.

    What comes last is what all replicas wait for, so it should not take long. Response k of group i is row
    ``i * responses_per_prompt + k``, with the sampling seed ``seed_of`` its row.
    """
    order = sorted(enumerate(groups), key=lambda item: (not item[1].begun, -len(item[1].prompt.token_ids)))
    requests = []
    for index, group in order:
        for number in range(responses_per_prompt):
            begun, row = group.begun.get(number), index * responses_per_prompt + number
            if begun and begun.is_whole:
                continue
            if begun and len(begun.token_ids) >= max_tokens:
                begun = None  # of a recipe that allowed more
            requests.append(Request(row, group.prompt.token_ids, seed_of(row), index, begun))
    return requests


def answer_text(completion: Completion, tokenizer: Tokenizer) -> str:
    """Returns the text of the model's last turn, by which a response is judged."""
    return turns_of_model(completion, tokenizer)[-1]


def turns_of_model(completion: Completion, tokenizer: Tokenizer) -> list[str]:
    """Returns the text of each of the model's turns."""
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
    team: dist.ProcessGroup | None = None,
) -> list[Group]:
    """Returns the groups that are not ``chosen``, by number, with their responses so far unless these are discarded.

    ``completions`` are those of this rank's own, whole or not, each on one rank only; collective over ``team``.
    """
    left = sorted(set(range(len(groups))).difference(chosen))
    if discard:
        return [Group(groups[index].prompt) for index in left]
    begun = {index: dict(groups[index].begun) for index in left}
    own = [completion for completion in completions if completion.row_id // responses_per_prompt in begun]
    for completion in itertools.chain(*gather_objects(own, team)):
        index, number = divmod(completion.row_id, responses_per_prompt)
        begun[index][number] = dataclasses.replace(completion, row_id=number)
    return [Group(groups[index].prompt, begun[index]) for index in left]


def groups_state(groups: Sequence[Group]) -> dict[str, Any]:
    """Returns what ``groups_from_state`` needs, for a checkpoint: tensors; {} for no groups.

    Of a prompt only its position in the data and its tokens, by which it is known again: what a row carries for its
    reward may be of any type that a file has.
    """
    if not groups:
        return {}
    prompts = [group.prompt for group in groups]
    rows = [(index, number, row) for index, group in enumerate(groups) for number, row in sorted(group.begun.items())]
    completions = [completion for _, _, completion in rows]
    return {
        "prompts": torch.tensor([[prompt.part, prompt.row, len(prompt.token_ids)] for prompt in prompts]),
        "prompt_token_ids": torch.tensor([token for prompt in prompts for token in prompt.token_ids]),
        "rows": torch.tensor(
            [[index, number, len(row.token_ids), _ENDINGS.index(row.finish_reason)] for index, number, row in rows],
            dtype=torch.int64,
        ),
        "token_ids": torch.tensor([token for row in completions for token in row.token_ids], dtype=torch.int64),
        "logprobs": torch.tensor([value for row in completions for value in row.logprobs], dtype=torch.float64),
        "weight_versions": torch.tensor([version for row in completions for version in row.weight_versions]).long(),
    } | _choices_state([row.expert_choices for row in completions])


def _choices_state(choices: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """The rows' choices of experts, concatenated; nothing where none are recorded."""
    known = [of_row for of_row in choices if of_row is not None]
    if not known:
        return {}
    lengths = torch.tensor([0 if of_row is None else len(of_row) for of_row in choices])
    return {"expert_choices": torch.cat(known), "expert_choice_lengths": lengths}


def _choices_from_state(state: dict[str, Any], rows: int, choices: ChoiceShape | None) -> Sequence[Tensor | None]:
    """Each row's choices; None for all where they are not recorded now, or were not then.

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
    """Raises ValueError where the tensors of a ``groups_state`` do not belong together, or no engine takes them."""
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
    read: Callable[[Sequence[tuple[int, int]]], Sequence[Prompt | None]],
    vocabulary: int,
    choices: ChoiceShape | None = None,
) -> list[Group]:
    """Returns the groups of a ``groups_state``, of a recipe with so many responses now.

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
    return [Group(prompt, rows) for prompt, rows in zip(prompts, begun, strict=True) if prompt is not None]
