"""WorkQueue: all groups are claimed, each once, whoever claims how many; enough is enough over all replicas."""

from __future__ import annotations

import threading
from random import Random

import pytest
import torch.distributed as dist

from rlhf_megatron.recipe import RolloutSection
from rlhf_megatron.rollout.work_queue import SharedWorkQueue, WorkQueue, WorkQueues


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
    assert [one.is_enough(2), other.is_enough(1), one.is_enough(0), other.is_enough(1)] == [False] * 3 + [True]
    assert one.is_enough(0)
    assert not SharedWorkQueue(dist.HashStore(), 9, 2).is_enough(9), "all are wanted"
    alone = WorkQueue(range(9), wanted=3)
    assert [alone.is_enough(2), alone.is_enough(1)] == [False, True]


def test_a_queue_that_is_over_leaves_no_keys() -> None:
    store = dist.HashStore()
    before = store.num_keys()
    queue = SharedWorkQueue(store, 5, 2, wanted=2)
    queue.claim(1)
    queue.is_enough(1)
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
        ({"partial": "resume"}, "partial=resume: without oversample no group is given up"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutSection.model_validate({"max_response_length": 8, **settings})
