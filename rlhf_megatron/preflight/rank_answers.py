"""Answers that ranks give each other in a preflight, through torchrun's key-value store.

The store answers even where the network between the ranks is broken. No wait exceeds its limit, so a rank
that hangs is named and not joined.
"""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from rlhf_megatron.errors import UserError
from rlhf_megatron.topology.world import agents_keep_a_store, store_of_ranks

_CONNECT_SECONDS = 30.0


class RankAnswers:
    """One rank's side of the conversation. Values are JSON."""

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        self.rank, self.world, self._store = rank, world, store

    def give(self, question: str, value: Any) -> None:
        """Give this rank's answer to a question."""
        self._store.set(f"{question}/{self.rank}", json.dumps(value))

    def collect(self, question: str, seconds: float) -> dict[int, Any]:
        """Return rank -> answer, of the ranks that have answered when all have or ``seconds`` have passed."""
        deadline = time.monotonic() + seconds
        keys = {rank: f"{question}/{rank}" for rank in range(self.world)}
        return {rank: self._read(key) for rank, key in keys.items() if self._is_there(key, deadline)}

    def announce(self, what: str, value: Any) -> None:
        """Give rank 0's word to all."""
        self._store.set(what, json.dumps(value))

    def hear(self, what: str, seconds: float) -> Any:
        """Return rank 0's word, or None where it does not come within ``seconds``."""
        if not self._is_there(what, time.monotonic() + seconds):
            return None
        word = self._read(what)
        self.give(f"{what} heard", True)
        return word

    def wait_until_heard(self, what: str, ranks: Iterable[int], seconds: float) -> None:
        """Wait until ``ranks`` have heard rank 0's word, or ``seconds`` have passed: rank 0 may serve the store, which
        is gone when it ends."""
        deadline = time.monotonic() + seconds
        for rank in ranks:
            self._is_there(f"{what} heard/{rank}", deadline)

    def _is_there(self, key: str, deadline: float) -> bool:
        remaining = deadline - time.monotonic()
        try:
            if remaining <= 0:
                return bool(self._store.check([key]))
            self._store.wait([key], datetime.timedelta(seconds=remaining))
        except RuntimeError:  # of torch.distributed: the time is over, or the store is gone
            return False
        return True

    def _read(self, key: str) -> Any:
        return json.loads(self._store.get(key))


def answers_of_torchrun(attempt: str | None = None) -> RankAnswers:
    """Return the ranks that torchrun started; needs no process group. Raises UserError where torchrun did not start
    this.

    ``attempt``: a word that all ranks have and no earlier attempt had, whose answers may still be there. Without it
    torchrun's count of restarts is taken, which may differ between nodes.
    """
    if "RANK" not in os.environ:
        raise UserError("a preflight runs under torchrun: torchrun --nproc-per-node N tools/preflight.py RECIPE")
    timeout = datetime.timedelta(seconds=_CONNECT_SECONDS)
    if agents_keep_a_store() or dist.is_initialized():
        store: dist.Store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timeout,
            wait_for_workers=False,
        )
    else:
        store = store_of_ranks(timeout)
    prefix = f"preflight/{attempt or os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return RankAnswers(dist.PrefixStore(prefix, store), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
