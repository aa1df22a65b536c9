"""Barriers of ranks that write into each other's memory: threads do the operations that streams of GPUs do."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from torch import Tensor

from rlhf_megatron.regather.peer_memory import barrier_operations

ROUNDS = 300


@pytest.mark.parametrize("partners", [{0: {1}, 1: {0}}, {0: {1, 2}, 1: {0, 2}, 2: {0, 1}}, {0: {1}, 1: {0, 2}, 2: {1}}])
def test_nobody_goes_on_before_its_partners_have_come(partners: dict[int, set[int]]) -> None:
    numbers = {rank: torch.zeros(2, len(partners), dtype=torch.int32) for rank in partners}
    come, early, done = dict.fromkeys(partners, 0), list[tuple[int, int]](), list[int]()
    threads = [
        threading.Thread(target=come_and_go, args=(rank, partners[rank], numbers, come, early, done), daemon=True)
        for rank in partners
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert (sorted(done), early) == (sorted(partners), [])
    assert not any(own.any() for own in numbers.values())


def come_and_go(
    rank: int,
    partners: set[int],
    numbers: dict[int, Tensor],
    come: dict[int, int],
    early: list[tuple[int, int]],
    done: list[int],
) -> None:
    """Come to both barriers in turn, now and then late; ``early`` gets the times that a partner had not come yet."""
    turns = [
        barrier_operations(numbers[rank][turn], {other: numbers[other][turn, rank:] for other in partners})
        for turn in range(2)
    ]
    chance = random.Random(rank)
    for number in range(ROUNDS):
        time.sleep(chance.choice([0, 0, 0.002]))
        come[rank] += 1
        for kind, place, value in turns[number % 2]:
            if kind == "write":
                place[0] = value
            while kind == "wait" and place[0] < value:
                time.sleep(0)
            time.sleep(0)
        early += [(rank, number) for other in partners if come[other] <= number]
    done.append(rank)
