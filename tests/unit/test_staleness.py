"""The bound on staleness, in steps that are played: whatever lengths responses have, no group becomes too old."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest

from rlhf_megatron.data.prompts import Prompt
from rlhf_megatron.generation.prompt_groups import Group
from rlhf_megatron.generation.staleness import StepGoal, groups_due, most_urgent, updates_left

PROMPT = Prompt(0, "source", (1, 2), "", {})


def test_updates_left_count_from_the_oldest_token() -> None:
    assert updates_left(Group(PROMPT), 7, 3) == 3
    assert [updates_left(Group(PROMPT, version=version), 7, 3) for version in (7, 6, 4, 2)] == [3, 2, 0, 0]


def test_groups_are_due_that_later_steps_cannot_take() -> None:
    assert groups_due([0, 0, 1, 2, 2], wanted=2, most=2) == [2, 1]
    assert groups_due([1, 1, 1, 2], wanted=2, most=2) == [0, 1]
    assert groups_due([2, 2], wanted=2, most=2) == [0, 0]
    assert groups_due([0, 0], wanted=2, most=0) == []


def test_those_are_taken_first_that_may_wait_least() -> None:
    assert most_urgent([0, 1, 2, 3], [2, 1, 2, 0], wanted=3) == [0, 1, 3]


@pytest.mark.parametrize("replicas", [None, 2])
@pytest.mark.parametrize("most", [1, 2, 3])
def test_no_group_is_older_than_allowed_lost_or_taken_twice(most: int, replicas: int | None) -> None:
    random, wanted, drawn, groups, taken = Random(f"{most}"), 4, 0, list[Group](), list[int]()
    work: dict[int, int] = {}
    for version in range(1, 60):
        while len(groups) < wanted * (most + 1):
            groups.append(Group(PROMPT, number=drawn, home=drawn % replicas if replicas else None))
            work[drawn] = random.choice([1, 1, 2, 30])
            drawn += 1
        goal = StepGoal(groups, wanted, version, most, replicas)
        lacking = {replica: goal.lacking(replica) for replica in range(replicas or 1)}
        for replica, (count, due) in lacking.items():
            own = [i for i, group in enumerate(groups) if not group.is_whole and group.home in (None, replica)]
            deadlines, finished = goal.deadlines(range(len(groups)), due), list[int]()

            def is_enough(finished: list[int], count: int, due: list[int], left: list[int]) -> bool:
                done = [sum(left[index] <= updates for index in finished) for updates in range(len(due))]
                return len(finished) >= count and all(a >= b for a, b in zip(done, due, strict=True))

            running = [index for index in own if groups[index].version is not None] + [
                index for index in own if groups[index].version is None
            ]
            while not is_enough(finished, count, due, list(deadlines.updates_left)):
                assert running, "what must be done can be done"
                for index in running[:6]:
                    number = groups[index].number
                    assert number is not None
                    work[number] -= 1
                    begun = groups[index].version
                    groups[index] = dataclasses.replace(groups[index], version=version if begun is None else begun)
                    if not work[number]:
                        groups[index] = dataclasses.replace(groups[index], is_whole=True)
                        finished.append(index)
                        running.remove(index)
        chosen = goal.chosen([index for index, group in enumerate(groups) if group.is_whole])
        assert len(chosen) == wanted
        for index in chosen:
            begun, number = groups[index].version, groups[index].number
            assert begun is not None and version - begun <= most and number is not None
            taken.append(number)
        groups = [group for index, group in enumerate(groups) if index not in chosen]
        assert all(group.version is None or version - group.version < most for group in groups)
    assert len(set(taken)) == len(taken)
    assert set(taken) | {group.number for group in groups} == set(range(drawn))
    assert min(group.number or 0 for group in groups) > drawn - 2 * wanted * (most + 1), "none starves"
