"""Scheduling policy of generation: a replica claims groups of requests as it has room for them, and no more.

It knows an engine as an `EngineCore`, and nothing of vLLM. The rank that leads the replica claims and decides; its
tensor-parallel peers learn the decision by a broadcast and make the same calls in the same order, since their engines
must do the same. When a decision is due follows from what all of them see alike.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from rlhf_megatron.data.expert_choices import merged
from rlhf_megatron.rollout.engine import Completion, Environment, GenerationRecord, Request, Sampling
from rlhf_megatron.rollout.engine_core import EngineCore, EngineOutput, EngineRequest
from rlhf_megatron.rollout.environment_turns import Answer, EnvironmentTurns
from rlhf_megatron.rollout.lockstep import ReplicaRanks
from rlhf_megatron.rollout.response_lengths import ResponseLengths, groups_that_fit
from rlhf_megatron.rollout.work_queue import WorkQueue

# Engine steps after which a decision is due at the latest: whether enough is done, or whether there is memory again.
_MAX_STEPS_BETWEEN_DECISIONS = 8
# Long responses are progress too, as a watchdog should know.
_STEPS_OF_PROGRESS = 64
_SEED_STRIDE = 1_000_003  # between two turns of a row

Ended = list[tuple[int, Completion]]  # with the number of each one's request


class GenerationScheduler:
    """One generation of a replica on this rank. A request's number is its index in `requests`."""

    def __init__(
        self,
        core: EngineCore,
        requests: Sequence[Request],
        sampling: Sampling,
        version: int,
        lengths: ResponseLengths,
        ranks: ReplicaRanks | None = None,
        queue: WorkQueue | None = None,
        environment: Environment | None = None,
    ) -> None:
        """Prepare to generate with weights of `version`.

        Without a `queue` all requests are this replica's. `lengths` learns from one generation for the next.
        """
        self._core, self._sampling, self._ranks = core, sampling, ranks or ReplicaRanks()
        self._requests, self._version, self._lengths = requests, version, lengths
        self._groups = [
            list(numbers)
            for _, numbers in itertools.groupby(range(len(requests)), lambda number: requests[number].group_id)
        ]
        self._group_of = {number: group for group, numbers in enumerate(self._groups) for number in numbers}
        self._rows_per_group = len(requests) / max(len(self._groups), 1)
        self._queue = queue or WorkQueue(range(len(self._groups)))
        share = math.ceil(len(requests) / self._queue.replicas)
        # All that could run at a time, but no more than an even share: who asks first would leave others with nothing.
        self._capacity = min(core.max_num_seqs, share)
        self._prompt_tokens = self._cached_prompt_tokens()
        begun = sum(len(request.begun.token_ids) for request in requests if request.begun)
        self._begun_tokens = begun / max(len(requests), 1)
        self._turns = EnvironmentTurns(environment, self._ranks)
        self._so_far = {number: request.begun for number, request in enumerate(requests) if request.begun}
        self._in_flight: dict[int, int] = {}  # requests that run or wait in the engine -> tokens that they began with
        self._ended: Ended = []  # by an answer, and not yet reported
        self._unfinished: dict[int, int] = {}  # group -> its rows that have not ended
        self._finished = 0  # groups since the last decision
        self._has_more, self._is_enough = bool(requests), False
        self._steps_since_decision, self._has_ended = 0, False
        self._begun = self._resumed = self._steps = self._sampled_tokens = self._aborted = 0
        self._seconds = 0.0

    def _cached_prompt_tokens(self) -> float:
        """Return the mean prompt tokens of a group in the cache: shared prompts once, and half a block for each row."""
        prompts = sum(len(request.prompt_token_ids) for request in self._requests) / max(len(self._requests), 1)
        copies = 1 if self._core.enable_prefix_caching else self._rows_per_group
        return prompts * copies + self._rows_per_group * self._core.block_size / 2

    @property
    def record(self) -> GenerationRecord:
        """Counts and time so far."""
        return GenerationRecord(self._seconds, self._steps, self._sampled_tokens, self._resumed, self._aborted)

    def generate(
        self,
        on_progress: Callable[[int, int], None] | None = None,
        on_completion: Callable[[Completion], None] | None = None,
    ) -> list[Completion]:
        """Return the completions in the order of their requests; see `RolloutEngine.generate`. After an error nothing
        is in flight any more."""
        completions: dict[int, Completion] = {}
        started = time.perf_counter()
        try:
            for ended in self._run():
                for number, completion in ended:
                    completions[number] = completion
                    if on_completion and completion.is_whole:
                        on_completion(completion)
                if on_progress and (ended or self._is_waiting or self._steps % _STEPS_OF_PROGRESS == 0):
                    on_progress(len(completions), self._begun)
        except BaseException:
            self._abort()
            raise
        self._seconds = time.perf_counter() - started
        return [completions[number] for number in sorted(completions)]

    def _run(self) -> Iterator[Ended]:
        """Yield what has ended in each step of the engine; what is aborted comes last."""
        while not self._is_over():
            if self._is_due():
                self._decide()
                if self._is_enough:
                    break
            if self._ended:
                ended, self._ended = self._ended, []
                yield ended
            if self._in_flight and not self._turns.is_blocked:
                yield self._step()
            elif self._turns:
                yield []  # time passes all the same, and a watchdog should know that it is not lost
        yield [*self._ended, *self._abort()]

    def _abort(self) -> Ended:
        """Abort what is in flight; returns the partial completions."""
        pending = self._turns.abort().items()
        partial = [(number, dataclasses.replace(completion, finish_reason="abort")) for number, completion in pending]
        outputs = [output for output in self._core.abort_requests() if output.number in self._in_flight]
        self._aborted += len(partial) + len(outputs)
        self._in_flight = {}
        return [*partial, *((output.number, self._completion(output)) for output in outputs if output.token_ids)]

    # ---- deciding

    @property
    def _is_waiting(self) -> bool:
        """Returns whether the engine does nothing until an answer comes."""
        return bool(self._turns) and (self._turns.is_blocked or not self._in_flight)

    def _is_over(self) -> bool:
        has_work = self._in_flight or self._turns or self._ended
        return not has_work and not self._has_more and not (self._finished and self._may_stop_early)

    @property
    def _may_stop_early(self) -> bool:
        """Returns whether the generation ends with enough groups, so that finished ones are to be counted."""
        return self._queue.wanted is not None

    @property
    def _has_room(self) -> bool:
        return self._has_more and len(self._in_flight) < self._capacity

    def _is_due(self) -> bool:
        if self._turns.is_blocked or not self._in_flight or (self._has_room and self._has_ended):
            return True
        if self._turns.has_news():
            return True
        is_late = self._steps_since_decision >= _MAX_STEPS_BETWEEN_DECISIONS
        return is_late and (self._has_room or self._may_stop_early or bool(self._turns))

    def _decide(self) -> None:
        """Claim what there is room for, and find out whether enough is done."""
        decision = torch.zeros(self._capacity + 3, dtype=torch.int64)  # enough, more, how many, which
        if self._ranks.is_leader:
            decision[0] = enough = self._queue.is_enough(self._finished)
            room = 0 if enough or self._turns.is_blocked or not self._has_more else self._groups_that_fit()
            claimed, more = self._queue.claim(room) if room else ([], self._has_more)
            decision[1], decision[2] = more, len(claimed)
            decision[3 : 3 + len(claimed)] = torch.tensor(claimed, dtype=torch.int64)
        self._ranks.broadcast(decision)
        enough, more, count, *claimed = decision.tolist()
        self._is_enough, self._has_more = bool(enough), bool(more)
        self._finished, self._steps_since_decision, self._has_ended = 0, 0, False
        for group in claimed[:count]:
            self._begin(group)
        if self._turns and not self._is_enough:
            for answer in self._turns.receive(wait=not self._in_flight):
                self._continue(answer)

    def _groups_that_fit(self) -> int:
        """Return how many groups more can be kept running, by the engine's number of sequences and its free memory."""
        by_sequences = math.ceil((self._capacity - len(self._in_flight)) / self._rows_per_group)
        running = self._core.running()
        if self._in_flight and len(running) < len(self._in_flight):
            return 0  # the engine could not take all of them yet, or has preempted one
        by_memory = groups_that_fit(
            self._lengths.survival(self._sampling.max_tokens),
            self._core.free_tokens(),
            [self._in_flight[number] + sampled for number, sampled in running.items()],
            self._prompt_tokens,
            self._rows_per_group,
            self._begun_tokens,
        )
        return int(max(min(by_sequences, by_memory), not self._in_flight))

    # ---- rows

    def _begin(self, group: int) -> None:
        self._unfinished[group] = len(self._groups[group])
        for number in self._groups[group]:
            self._submit(number)
            self._begun += 1
            self._resumed += number in self._so_far

    def _submit(self, number: int) -> None:
        """Have the engine continue a row."""
        request, begun = self._requests[number], self._so_far.get(number)
        tokens = begun.token_ids if begun else []
        # A turn that drew what the one before drew would say much the same.
        spoken = begun.turns if begun and begun.sampled else 0
        seed = (request.seed + spoken * _SEED_STRIDE) & 0x7FFFFFFF
        self._core.add_request(
            EngineRequest(number, [*request.prompt_token_ids, *tokens], seed, self._limit(number) - len(tokens)),
            self._sampling,
        )
        self._in_flight[number] = len(tokens)

    def _limit(self, number: int) -> int:
        """Return the most tokens of a row after its prompt."""
        return min(self._requests[number].max_tokens or self._sampling.max_tokens, self._sampling.max_tokens)

    def _step(self) -> Ended:
        ended = []
        for output in self._core.step():
            number, completion = output.number, self._completion(output)
            del self._in_flight[number]
            if not self._turns.take(number, completion):
                ended.append(self._end(number, completion))
        self._steps += 1
        self._steps_since_decision += 1
        return ended

    def _continue(self, answer: Answer) -> None:
        """Begin the model's next turn; or end the row, also where the answer leaves the model nothing to say."""
        number, completion, tokens = answer
        if tokens is None:
            self._ended.append(self._end(number, completion))
        elif len(completion.token_ids) + len(tokens) >= self._limit(number):
            self._ended.append(self._end(number, dataclasses.replace(completion, finish_reason="length")))
        else:
            self._so_far[number] = completion.answered(tokens)
            self._submit(number)

    def _end(self, number: int, completion: Completion) -> tuple[int, Completion]:
        group = self._group_of[number]
        self._unfinished[group] -= 1
        self._finished += not self._unfinished[group]
        self._has_ended = True
        self._lengths.learn(len(completion.token_ids))
        return number, completion

    def _completion(self, output: EngineOutput) -> Completion:
        request, begun = self._requests[output.number], self._so_far.get(output.number)
        tokens, logprobs = output.token_ids, output.logprobs
        if output.finish_reason not in ("stop", "length", "abort"):
            raise RuntimeError(
                f"{self._core.name} ended row {request.row_id} with {output.finish_reason!r} after {len(tokens)} tokens"
            )
        versions, sampled, choices = [self._version] * len(tokens), None, output.expert_choices
        self._sampled_tokens += len(tokens)
        if begun:
            if begun.sampled is not None:
                sampled = [*begun.sampled, *[True] * len(tokens)]
            tokens = [*begun.token_ids, *tokens]
            logprobs = [*begun.logprobs, *logprobs]
            versions = [*begun.weight_versions, *versions]
            choices = merged(begun.expert_choices, choices)
        return Completion(request.row_id, tokens, logprobs, output.finish_reason, versions, sampled, choices)
