"""Number of further groups that a replica can keep running, by its sequences and by its cache at every time to come.

Rows that wait for their environment run none, but come back: what they have in the cache is not free, unless it is
cheaper to compute it again (``generation_clock``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlhf_megatron.rollout.engine import Sampling
from rlhf_megatron.rollout.engine_core import EngineCore
from rlhf_megatron.rollout.generation_clock import GenerationClock
from rlhf_megatron.rollout.grouped_requests import GroupedRequests
from rlhf_megatron.rollout.response_lengths import ResponseLengths, groups_that_fit
from rlhf_megatron.rollout.work_queue import WorkQueue


class Admission:
    """The limits of one generation.

    Attributes:
        capacity: rows that may run at a time.
    """

    def __init__(
        self,
        core: EngineCore,
        sampling: Sampling,
        lengths: ResponseLengths,
        requests: GroupedRequests,
        queue: WorkQueue,
        clock: GenerationClock | None,
    ) -> None:
        """Set up; without a ``clock``, where admission may depend on no time, rows that wait always keep their
        cache."""
        self._core, self._sampling, self._lengths, self._clock = core, sampling, lengths, clock
        groups = len(requests.group_ids)
        self._rows_per_group = len(requests) / max(groups, 1)
        own = sum(len(requests.numbers(group)) for group in range(min(queue.own, groups)))
        share = own + math.ceil((len(requests) - own) / queue.replicas)
        # All that could run at a time, but no more than an even share: who asks first would leave others with nothing.
        self.capacity = min(core.max_num_seqs, share)
        # Mean prompt tokens of a group in the cache: shared prompts once, and half a block for each row.
        prompts = requests.prompt_tokens / max(len(requests), 1)
        copies = 1 if core.enable_prefix_caching else self._rows_per_group
        self._prompt_tokens = prompts * copies + self._rows_per_group * core.block_size / 2
        begun = sum(len(completion.token_ids) for completion in requests.begun.values())
        self._begun_tokens = begun / max(len(requests), 1)

    def groups_that_fit(self, rows: int, running: Sequence[int], waiting: Sequence[int]) -> int:
        """Return for how many groups more there is room; one at least where nothing runs.

        Args:
            rows: that run, or will as soon as an environment has begun them.
            running, waiting: tokens of each row that is in the cache, and that waits for an environment.
        """
        by_sequences = math.ceil((self.capacity - rows) / self._rows_per_group)
        free = self._core.free_tokens()
        held = sum(waiting) + len(waiting) * self._prompt_tokens / self._rows_per_group
        if not self._core.enable_prefix_caching or not self._keeps_waiting(free + sum(running)):
            held, waiting = 0.0, ()
        by_memory = groups_that_fit(
            self._lengths.survival(self._sampling.max_tokens),
            free - held,
            [*running, *waiting],
            self._prompt_tokens,
            self._rows_per_group,
            self._begun_tokens,
        )
        return int(max(min(by_sequences, by_memory), not rows))

    def _keeps_waiting(self, cache_tokens: float) -> bool:
        return self._clock is None or self._clock.keeps_waiting(cache_tokens)
