"""WorkQueue: all groups are claimed, each once, whoever claims how many; enough is enough over all replicas."""

from __future__ import annotations

import threading
from random import Random

import pytest
import torch.distributed as dist

from rlhf_megatron.recipe import RolloutSection
from rlhf_megatron.rollout.work_queue import Deadlines, SharedWorkQueue, WorkQueue, WorkQueues


def test_replicas_claim_every_group_once() -> None:
    store, count, replicas = dist.HashStore(), 500, 5
    claimed: list[list[int]] = [[] for _ in range(replicas)]

    def claim(replica: int) -> None:
        queue, random, more = SharedWorkQueue(store, count, replicas), Random(replica), True
        while more:
            numbers, more = queue.claim(random.randint(1, 7))
            claimed[replica] += numbers

    threads = [threading.Thread(target=claim, args=(replica,)) for replica in range(replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(number for numbers in claimed for number in numbers) == list(range(count))
    assert all(numbers == sorted(numbers) for numbers in claimed)


def test_the_last_claim_says_that_none_is_left() -> None:
    store = dist.HashStore()
    one, other = SharedWorkQueue(store, 5, 2), SharedWorkQueue(store, 5, 2)
    assert one.claim(3) == ([0, 1, 2], True)
    assert other.claim(4) == ([3, 4], False)
    assert one.claim(1) == ([], False)
    own = WorkQueue(range(1, 8, 3))
    assert [own.claim(2), own.claim(2), own.claim(2)] == [([1, 4], True), ([7], False), ([], False)]


def test_finished_groups_are_counted_over_all_replicas() -> None:
    store = dist.HashStore()
    one, other = SharedWorkQueue(store, 9, 2, wanted=4), SharedWorkQueue(store, 9, 2, wanted=4)
    assert [one.is_enough([0, 1]), other.is_enough([2]), one.is_enough([]), other.is_enough([3])] == [False] * 3 + [
        True
    ]
    assert one.is_enough([])
    assert not SharedWorkQueue(dist.HashStore(), 9, 2).is_enough(range(9)), "all are wanted"
    alone = WorkQueue(range(9), wanted=3)
    assert [alone.is_enough([0, 1]), alone.is_enough([2])] == [False, True]


def test_a_queue_that_is_over_leaves_no_keys() -> None:
    store = dist.HashStore()
    before = store.num_keys()
    queue = SharedWorkQueue(store, 5, 2, wanted=2)
    queue.claim(1)
    queue.is_enough([1])
    assert store.num_keys() == before + 2
    queue.delete_keys()
    assert store.num_keys() == before


def test_a_static_split_and_a_single_replica_need_no_store() -> None:
    shares = [WorkQueues("static", replica, 3).open(8).claim(8) for replica in range(3)]
    assert shares == [([0, 3, 6], False), ([1, 4, 7], False), ([2, 5], False)]
    assert WorkQueues("queue", 0, 1).open(4, wanted=2).claim(9) == ([0, 1, 2, 3], False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"oversample": 1.5, "scheduling": "static"}, "oversample=1.5 needs scheduling queue"),
        ({"max_staleness": 2}, "max_staleness=2: with partial=discard nothing goes on after an update"),
        ({"partial": "resume", "oversample": 2.5}, "oversample=2.5: the last of so many groups would be older"),
        ({"partial": "resume", "steps_ahead": 1}, "max_staleness=1: with steps_ahead=1 every group is an update old"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutSection.model_validate({"max_response_length": 8, **settings})


def test_own_groups_come_first_and_the_rest_is_shared() -> None:
    store = dist.HashStore()
    one, other = SharedWorkQueue(store, 3, 2, own=2), SharedWorkQueue(store, 3, 2)
    assert one.claim(1) == ([0], True) and other.claim(1) == ([0], True)
    assert one.claim(2) == ([1, 3], True), "its own, and the second of the shared ones"
    assert other.claim(5) == ([2], False) and one.claim(5) == ([], False)
    assert WorkQueues("static", 1, 2).open(4, own=2).claim(9) == ([0, 1, 3, 5], False)


@pytest.mark.parametrize("shared", [False, True])
def test_enough_are_done_when_none_of_the_rest_becomes_too_old(shared: bool) -> None:
    deadlines = Deadlines([0, 1, 1, 2, 2], [1, 2])
    queue = SharedWorkQueue(dist.HashStore(), 5, 2, 2, 0, deadlines) if shared else WorkQueue(range(5), 2, 5, deadlines)
    assert not queue.is_enough([3, 4]), "two are done, and both might have waited"
    assert not queue.is_enough([1])
    assert queue.is_enough([0])
