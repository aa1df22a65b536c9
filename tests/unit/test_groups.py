"""Groups that wait: what is asked for them, and a checkpoint's copy."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rlhf_megatron.checkpoint.storage import TensorFile, join_tensors, split_tensors, write_tensors
from rlhf_megatron.data.expert_choices import ChoiceShape
from rlhf_megatron.data.prompts import Prompt
from rlhf_megatron.generation.prompt_groups import (
    Group,
    begun_tensors,
    groups_from_state,
    groups_state,
    requests_for,
    with_begun,
)
from rlhf_megatron.rollout.engine import Completion


def prompt(row: int, length: int = 3, part: int = 0) -> Prompt:
    messages = ({"role": "user", "content": f"question {row} \N{SNOWMAN}"},)
    return Prompt(row, "source", tuple(range(row, row + length)), "answer", {"number": part}, messages, part=part)


def completion(number: int, tokens: int, ending: str, versions: list[int] | None = None) -> Completion:
    logprobs = [-0.1 * (k + 1) / 3 for k in range(tokens)]
    return Completion(number, list(range(tokens)), logprobs, ending, versions or [1] * tokens)


GROUPS = [
    Group(prompt(7), {0: completion(0, 3, "stop"), 2: completion(2, 4, "abort", [1, 1, 2, 3])}, 4, 0, 1),
    Group(prompt(8), number=9),
    Group(prompt(7, part=1), {1: completion(1, 5, "length")}, 2, 0, 1),
]
VOCABULARY = 12
DATA = {(group.prompt.part, group.prompt.row): group.prompt for group in GROUPS}


def read(places: Sequence[tuple[int, int]]) -> list[Prompt | None]:
    return [DATA.get(place) for place in places]


def state_of(groups: Sequence[Group]) -> dict[str, Any]:
    """Return groups as a checkpoint has them, each begun on another rank."""
    alone = [
        [group if index == rank else dataclasses.replace(group, begun={}) for index, group in enumerate(groups)]
        for rank in range(len(groups))
    ]
    return with_begun(groups_state(groups), [begun_tensors(of_rank) for of_rank in alone]) if groups else {}


def test_a_checkpoint_keeps_groups_exactly(tmp_path: Any) -> None:
    plain, tensors = split_tensors({"waiting": state_of(GROUPS), "none": state_of([])}, "parts")
    write_tensors(tmp_path / "step-1", "rank-0.safetensors", tensors, {})
    [path] = tmp_path.rglob("*.safetensors")
    with TensorFile(path) as file:
        state = join_tensors(json.loads(json.dumps(plain)), file)
    assert groups_from_state(state["waiting"], 3, read, VOCABULARY) == GROUPS
    assert groups_from_state(state["none"], 3, read, VOCABULARY) == []
    fewer = groups_from_state(state["waiting"], 2, read, VOCABULARY)
    assert [sorted(group.begun) for group in fewer] == [[0], [], [1]], "responses that are no longer asked for"
    assert fewer[2] == GROUPS[2]


def test_a_checkpoint_keeps_expert_choices(tmp_path: Any) -> None:
    shape = ChoiceShape(experts=300, layers=2, chosen=1)
    choices = torch.arange(10, dtype=shape.dtype).reshape(5, 2, 1)
    begun = {0: dataclasses.replace(completion(0, 3, "abort"), expert_choices=choices), 1: completion(1, 2, "abort")}
    plain, tensors = split_tensors({"waiting": state_of([Group(prompt(7), begun)])}, "parts")
    write_tensors(tmp_path / "step-1", "rank-0.safetensors", tensors, {})
    [path] = tmp_path.rglob("*.safetensors")
    with TensorFile(path) as file:
        state = join_tensors(json.loads(json.dumps(plain)), file)["waiting"]
    [group] = groups_from_state(state, 3, read, VOCABULARY, shape)
    kept = group.begun[0].expert_choices
    assert kept is not None and torch.equal(kept, choices) and group.begun[1].expert_choices.shape[0] == 0
    [group] = groups_from_state(state, 3, read, VOCABULARY)
    assert group.begun[0].expert_choices is None, "they are not replayed now"
    for name, value in {"expert_choices": choices + 300, "expert_choice_lengths": torch.tensor([7, -2])}.items():
        with pytest.raises(ValueError, match="expert choices"):
            groups_from_state(state | {name: value}, 3, read, VOCABULARY, shape)
    with pytest.raises(ValueError, match="more tokens than their rows have"):
        moved = {"expert_choices": choices.repeat(2, 1, 1), "expert_choice_lengths": torch.tensor([10, 0])}
        groups_from_state(state | moved, 3, read, VOCABULARY, shape)


def test_groups_without_a_token_are_kept_too() -> None:
    groups = [GROUPS[1], GROUPS[1]]
    state = state_of(groups)
    assert state["rows"].dtype == state["token_ids"].dtype == torch.int64
    assert groups_from_state(state, 1, read, VOCABULARY) == groups


def test_a_group_starts_anew_where_its_prompt_is_another_now_and_goes_where_it_is_left_out() -> None:
    other = dataclasses.replace(GROUPS[0].prompt, token_ids=(7, 8, 9, 10))

    def changed(places: Sequence[tuple[int, int]]) -> list[Prompt | None]:
        return [{(0, 7): other, (1, 7): DATA[1, 7]}.get(place) for place in places]

    assert groups_from_state(state_of(GROUPS), 3, changed, VOCABULARY) == [
        Group(other, number=4, home=0),
        GROUPS[2],
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token_ids", torch.full([12], VOCABULARY)),
        ("token_ids", torch.full([12], -1)),
        ("token_ids", torch.zeros(12)),
        ("logprobs", torch.full([12], float("nan"))),
        ("weight_versions", torch.zeros(12)),
        ("token_ids", torch.zeros(11, dtype=torch.int64)),
        ("rows", torch.tensor([[9, 0, 12, 0]])),
        ("rows", torch.tensor([[0, 0, 12, 9]])),
        ("prompts", torch.tensor([[0, -7, 3]])),
        ("prompts", torch.tensor(5)),
    ],
)
def test_a_damaged_copy_is_no_groups(name: str, value: torch.Tensor) -> None:
    with pytest.raises((ValueError, IndexError)):
        groups_from_state(state_of(GROUPS) | {name: value}, 3, read, VOCABULARY)


def test_begun_groups_come_first_then_long_prompts() -> None:
    groups = [Group(prompt(0, 2)), Group(prompt(1, 5)), GROUPS[0], Group(prompt(3, 5))]
    requests = requests_for(groups, 3, lambda _: 8, lambda row: 100 + row)
    assert [request.group_id for request in requests] == [2, 2] + [1] * 3 + [3] * 3 + [0] * 3
    first, second = requests[:2]
    assert (first.row_id, first.seed, first.begun) == (7, 107, None), "response 0 is whole"
    assert second.row_id == 8 and second.begun is not None and second.begun.token_ids == [0, 1, 2, 3]
    assert [request.row_id for request in requests[2:5]] == [3, 4, 5]


@pytest.mark.parametrize(("limit", "goes_on"), [(5, True), (4, False)])
def test_what_is_longer_than_is_allowed_now_starts_anew(limit: int, goes_on: bool) -> None:
    request = requests_for(GROUPS[:1], 3, lambda _: limit, lambda row: row)[1]
    assert (request.begun is not None) == goes_on
