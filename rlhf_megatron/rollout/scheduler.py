"""Scheduling policy of generation: a replica claims groups of requests as it has room for them, and no more.

It knows an engine as an ``EngineCore``, and nothing of vLLM. The rank that leads the replica claims and decides; its
tensor-parallel peers learn the decision by a broadcast and make the same calls in the same order, since their engines
must do the same. When a decision is due follows from what all of them see alike.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from rlhf_megatron.data.expert_choices import merged
from rlhf_megatron.rollout.admission import Admission
from rlhf_megatron.rollout.engine import Completion, Environment, GenerationRecord, Request, SampledTurn, Sampling
from rlhf_megatron.rollout.engine_core import EngineCore, EngineOutput, EngineRequest
from rlhf_megatron.rollout.environment_turns import Answer, EnvironmentTurns
from rlhf_megatron.rollout.generation_clock import GenerationClock
from rlhf_megatron.rollout.grouped_requests import GroupedRequests
from rlhf_megatron.rollout.lockstep import ReplicaRanks
from rlhf_megatron.rollout.paused import PausedRequest, PausedRequests
from rlhf_megatron.rollout.response_lengths import ResponseLengths
from rlhf_megatron.rollout.work_queue import WorkQueue

NONE_PAUSED: Mapping[int, PausedRequest] = {}
# Engine steps after which a decision is due at the latest: whether enough is done, or whether there is memory again.
_MAX_STEPS_BETWEEN_DECISIONS = 8
# Long responses are progress too, as a watchdog should know.
_STEPS_OF_PROGRESS = 64
_SEED_STRIDE = 1_000_003  # between two turns of a row

Ended = list[tuple[int, Completion]]  # with the number of each one's request


class GenerationScheduler:
    """One generation of a replica on this rank.

    A request's number is its index in ``requests``; the engine, which may have paused ones of before, has numbers of
    its own.
    """

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
        paused: PausedRequests | None = None,
        pauses: bool = False,
        check: Callable[[Sequence[Request]], None] | None = None,
    ) -> None:
        """Prepare to generate with weights of ``version``.

        Without a ``queue`` all requests are this replica's. ``lengths`` learns from one generation for the next, and
        ``paused`` is kept from one to the next; with ``pauses`` it gets what this one leaves unfinished. ``check``
        raises for requests that cannot be carried out, and is called with those of a group that begins.
        """
        self._core, self._sampling, self._ranks = core, sampling, ranks or ReplicaRanks()
        self._paused, self._pauses = paused if paused is not None else PausedRequests(), pauses
        self._requests, self._version, self._lengths = GroupedRequests.of(requests), version, lengths
        self._check, groups = check, len(self._requests.group_ids)
        self._group_of: dict[int, int] = {}  # of requests that have begun
        self._queue, self._clock = queue or WorkQueue(range(groups)), GenerationClock()
        times = None if environment is not None and environment.repeatable else self._clock
        self._admission = Admission(core, sampling, lengths, self._requests, self._queue, times)
        self._capacity = self._admission.capacity
        self._turns = EnvironmentTurns(environment, self._ranks, self._clock)
        self._so_far = dict(self._requests.begun)
        # Of rows that an environment has begun with others.
        self._prompts = {number: of for number, row in self._so_far.items() if (of := row.prompt_token_ids)}
        self._branches: dict[int, tuple[Completion, ...]] = {}  # of rows that it has begun again
        self._first_number = self._paused.take_numbers(len(requests))
        self._number_of: dict[int, int] = {}  # the engine's number -> ours, of what is in the engine
        self._known: dict[int, int] = {}  # tokens that the engine had sampled of a paused request
        self._in_flight: dict[int, int] = {}  # requests that run or wait in the engine -> tokens that they began with
        self._ended: Ended = []  # by an answer, and not yet reported
        self._unfinished: dict[int, int] = {}  # group -> its rows that have not ended
        self._finished: list[int] = []  # groups since the last decision
        self._has_more, self._is_enough = bool(requests), False
        self._steps_since_decision, self._has_ended = _MAX_STEPS_BETWEEN_DECISIONS, False
        self._begun = self._resumed = self._steps = self._sampled_tokens = self._aborted = self._row_steps = 0
        self._seconds, self._prompts_before = 0.0, (core.prompt_tokens, core.prefilled_tokens)

    @property
    def record(self) -> GenerationRecord:
        """Counts and time so far."""
        return GenerationRecord(
            self._seconds,
            self._steps,
            self._sampled_tokens,
            self._resumed,
            self._aborted,
            len(self._paused),
            self._row_steps / max(self._steps, 1),
            engine_seconds=self._clock.engine_seconds,
            idle_seconds=self._clock.idle_seconds,
            waiting_seconds=self._clock.waiting_seconds,
            prompt_tokens=self._core.prompt_tokens - self._prompts_before[0],
            prefilled_tokens=self._core.prefilled_tokens - self._prompts_before[1],
        )

    def generate(
        self,
        on_progress: Callable[[int, int], None] | None = None,
        on_completion: Callable[[Completion], None] | None = None,
    ) -> list[Completion]:
        """Return the completions in the order of their requests; see ``RolloutEngine.generate``. After an error nothing
        is in flight any more, or paused."""
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
            self._paused.release()
            self._abort()
            raise
        self._seconds = time.perf_counter() - started
        return [completions[number] for number in sorted(completions)]

    def _run(self) -> Iterator[Ended]:
        """Yield what has ended in each step of the engine; what is aborted or paused comes last."""
        self._go_on_with_paused()
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
        yield [*self._ended, *(self._pause() if self._pauses else self._abort())]

    # ---- requests of another generation

    def _go_on_with_paused(self) -> None:
        """Begin the groups with paused requests, and drop what is paused besides."""
        numbers, groups = self._requests.numbers, 0
        while groups < len(self._requests.group_ids) and self._has_paused(groups):  # those at the beginning
            groups += 1
        rows = [number for group in range(groups) for number in numbers(group)]
        going_on = {number: paused for number in rows if (paused := self._paused.find(self._requests[number]))}
        for engine_number in self._paused.release(going_on.values()):
            self._core.abort_request(engine_number)
        if groups and self._ranks.is_leader:
            claimed, self._has_more = self._queue.claim(groups)
            assert claimed == list(range(groups)), "the first groups of a replica with paused requests are its own"
        for group in range(groups):
            self._begin(group, going_on)

    def _has_paused(self, group: int) -> bool:
        return len(self._paused) > 0 and any(map(self._paused.find, self._requests.of_group(group)))

    def _pause(self) -> Ended:
        """Halt the engine; return what has ended on the way, and what there is of the others."""
        ended, partial = self._take(self._core.pause()), Ended()
        for output in self._core.unfinished():
            number = self._number_of[output.number]
            completion, begun_with = self._completion(number, output), self._in_flight[number]
            request = PausedRequest(output.number, begun_with, begun_with + len(output.token_ids))
            self._paused.add(self._requests[number].key, request)
            if completion.token_ids:
                partial.append((number, completion))
        self._in_flight = {}
        return [*ended, *partial]

    def _abort(self) -> Ended:
        """Abort what is in flight; return the partial completions."""
        pending = self._turns.abort().items()
        begun = [(number, completion) for number, completion in pending if completion.token_ids]
        partial = [(number, dataclasses.replace(completion, finish_reason="abort")) for number, completion in begun]
        outputs = [
            (self._number_of[output.number], output)
            for output in self._core.abort_requests()
            if output.number in self._number_of
        ]
        self._aborted += len(partial) + len(outputs)
        self._in_flight = {}
        return [
            *partial,
            *((number, self._completion(number, output)) for number, output in outputs if output.token_ids),
        ]

    # ---- deciding

    @property
    def _is_waiting(self) -> bool:
        """True if the engine does nothing until an answer comes."""
        return bool(self._turns) and (self._turns.is_blocked or not self._in_flight)

    def _is_over(self) -> bool:
        has_work = self._in_flight or self._turns or self._ended
        return not has_work and not self._has_more and not (self._finished and self._may_stop_early)

    @property
    def _may_stop_early(self) -> bool:
        """True if the generation ends with enough groups, so that finished ones are to be counted."""
        return self._queue.wanted is not None

    @property
    def _has_room(self) -> bool:
        return self._has_more and self._running < self._capacity

    @property
    def _running(self) -> int:
        """Rows in the engine, and those that will be there as soon as an environment has begun them."""
        return len(self._in_flight) + self._turns.opening

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
        self._finished, self._steps_since_decision, self._has_ended = [], 0, False
        for group in claimed[:count]:
            self._begin(group)
        if self._turns and not self._is_enough:
            for answer in self._turns.receive(wait=not self._in_flight):
                self._continue(answer)

    def _groups_that_fit(self) -> int:
        """Return how many groups more can be kept running."""
        running = self._core.running()
        if self._in_flight and len(running) < len(self._in_flight):
            return 0  # the engine could not take all of them yet, or has preempted one
        tokens = [self._in_flight[self._number_of[number]] + sampled for number, sampled in running.items()]
        return self._admission.groups_that_fit(self._running, tokens, self._turns.tokens)

    # ---- rows

    def _begin(self, group: int, paused: Mapping[int, PausedRequest] = NONE_PAUSED) -> None:
        """Have the engine answer a group's rows, and go on with those that are ``paused`` in it."""
        if self._check:
            self._check(self._requests.of_group(group))
        numbers = self._requests.numbers(group)
        self._unfinished[group] = len(numbers)
        self._group_of.update(dict.fromkeys(numbers, group))
        for number in numbers:
            request = paused.get(number)
            if request:
                self._number_of[request.number] = number
                self._in_flight[number], self._known[number] = request.begun_with, request.tokens - request.begun_with
            elif number in self._so_far or not self._turns.open(number, self._requests[number].row_id):
                self._submit(number)
            self._begun += 1
            self._resumed += number in self._so_far

    def _submit(self, number: int, most: int | None = None) -> None:
        """Have the engine continue a row, by at most so many tokens."""
        request, begun = self._requests[number], self._so_far.get(number)
        tokens = begun.token_ids if begun else []
        # A turn that drew what the one before drew would say much the same.
        spoken = begun.turns if begun and begun.sampled else 0
        spoken += sum(branch.turns for branch in self._branches.get(number, ()))
        seed = (request.seed + spoken * _SEED_STRIDE) & 0x7FFFFFFF
        engine_number = self._first_number + number
        self._number_of[engine_number], self._known[number] = number, 0
        prompt = self._prompts.get(number, request.prompt_token_ids)
        row, left = [*prompt, *tokens], self._limit(number) - len(tokens)
        limit = left if most is None else min(left, most)
        sampling = self._sampling_of(number)
        self._core.add_request(EngineRequest(engine_number, row, seed, limit, len(tokens)), sampling)
        self._in_flight[number] = len(tokens)

    def _limit(self, number: int) -> int:
        """Return the most tokens of a row after its prompt."""
        most = self._sampling_of(number).max_tokens
        return min(self._requests[number].max_tokens or most, most)

    def _sampling_of(self, number: int) -> Sampling:
        return self._sampling.of_prompt(len(self._requests[number].prompt_token_ids))

    def _step(self) -> Ended:
        self._steps += 1
        self._steps_since_decision += 1
        self._row_steps += min(len(self._in_flight), self._core.max_num_seqs)
        began, prefilled = time.perf_counter(), self._core.prefilled_tokens
        outputs = self._core.step()
        seconds, prefilled = time.perf_counter() - began, self._core.prefilled_tokens - prefilled
        self._clock.count_step(seconds, prefilled, len(self._turns))
        return self._take(outputs)

    def _take(self, outputs: Iterable[EngineOutput]) -> Ended:
        """Return the completions of requests that have ended, but for those that an environment answers first."""
        ended = []
        for output in outputs:
            number = self._number_of.pop(output.number)
            completion = self._completion(number, output)
            del self._in_flight[number]
            if not self._turns.take(number, completion):
                ended.append(self._end(number, completion))
        return ended

    def _continue(self, answer: Answer) -> None:
        """Begin the model's next turn; or end the row, also where the answer leaves the model nothing to say."""
        number, completion, reply = answer
        tokens, reward = reply.token_ids, reply.reward
        if reply.kept is not None:
            completion = completion.cut(reply.kept)
        if reward is not None:
            completion = completion.rewarded(reward)
        if tokens is None:
            self._ended.append(self._end(number, completion))
        elif not completion.token_ids:
            if tokens:
                self._prompts[number] = tokens
            self._speak(answer)
        elif reply.branches:
            branch = dataclasses.replace(completion, branches=())
            self._branches[number] = (*self._branches.get(number, ()), branch)
            self._prompts[number] = tokens
            self._so_far.pop(number, None)
            self._speak(answer)
        elif len(completion.token_ids) + len(tokens) >= self._limit(number):
            cut = dataclasses.replace(completion, finish_reason="length")
            if not self._turns.take(number, cut):
                self._ended.append(self._end(number, cut))
        else:
            self._so_far[number] = completion.answered(tokens)
            self._speak(answer)

    def _speak(self, answer: Answer) -> None:
        """Have the model's next turn, which the engine samples unless it was recorded."""
        number, _, reply = answer
        if reply.recorded is None:
            self._submit(number, reply.max_tokens)
            return
        completion = self._before(number).continued(reply.recorded)
        if not self._turns.take(number, completion):
            self._ended.append(self._end(number, completion))

    def _end(self, number: int, completion: Completion) -> tuple[int, Completion]:
        group = self._group_of[number]
        self._unfinished[group] -= 1
        if not self._unfinished[group]:
            self._finished.append(group)
        self._has_ended = True
        if completion.token_ids:  # else its environment did not begin
            self._lengths.learn(len(completion.token_ids))
        self._branches.pop(number, None)
        return number, completion

    def _completion(self, number: int, output: EngineOutput) -> Completion:
        known = self._known[number]
        tokens, logprobs = output.token_ids[known:], output.logprobs[known:]
        if output.finish_reason not in ("stop", "length", "abort"):
            row_id, reason = self._requests[number].row_id, output.finish_reason
            raise RuntimeError(f"{self._core.name} ended row {row_id} with {reason!r} after {len(tokens)} tokens")
        self._sampled_tokens += len(tokens)
        turn = SampledTurn(tokens, logprobs, [self._version] * len(tokens), output.finish_reason)
        completion = self._before(number).continued(turn)
        return dataclasses.replace(completion, expert_choices=merged(completion.expert_choices, output.expert_choices))

    def _before(self, number: int) -> Completion:
        """Return a row up to the model's next turn."""
        begun = self._so_far.get(number) or Completion(0, [], [], "abort", [])
        row_id, prompt, branches = self._requests[number].row_id, self._prompts.get(number), self._branches.get(number)
        return dataclasses.replace(begun, row_id=row_id, prompt_token_ids=prompt, branches=branches or ())
