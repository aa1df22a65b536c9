"""How a replica keeps vLLM's engine busy: it draws groups of requests as it has room for them, and no more.

The rank that leads the replica draws and decides; its tensor-parallel peers learn the decision by a broadcast and make
the same calls in the same order, since their schedulers must do the same. When there is something to decide follows
from what all peers see alike.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from rlhf_megatron.compat.vllm_logprobs import SampledLogprobs
from rlhf_megatron.rollout.engine import Completion, Request, Sampling, Turns
from rlhf_megatron.rollout.response_lengths import ResponseLengths, groups_that_fit
from rlhf_megatron.rollout.work_queue import WorkQueue

# Engine steps after which the replica asks at the latest whether enough is done, or whether there is memory again.
_MOST_STEPS = 8
_SECONDS_TO_WAIT = 1.0  # for answers, at a time
_SEEDS_APART = 1_000_003  # of two turns of a row


class Pull:
    """One generation of a replica on this rank."""

    def __init__(
        self,
        core: Any,
        requests: Sequence[Request],
        sampling: Sampling,
        tickets: WorkQueue | None,
        peers: Any,
        version: int,
        lengths: ResponseLengths,
        turns: Turns | None = None,
    ) -> None:
        """``core`` is vLLM's LLMEngine, ``peers`` its group of tensor-parallel ranks, or None for a replica of one.

        Without ``tickets`` all requests are this replica's. ``lengths`` learns from one generation for the next.
        ``turns`` speak between the model's, where it has several.
        """
        self._core, self._sampling, self._peers = core, sampling, peers
        self._requests, self._version, self._lengths = requests, version, lengths
        self._groups = [
            list(places)
            for _, places in itertools.groupby(range(len(requests)), lambda place: requests[place].group_id)
        ]
        self._group_of = {place: number for number, places in enumerate(self._groups) for place in places}
        self._rows_per_group = len(requests) / max(len(self._groups), 1)
        self._tickets = tickets or WorkQueue(range(len(self._groups)))
        config = core.vllm_config
        share = math.ceil(len(requests) / self._tickets.replicas)
        # All that could run at a time, but no more than an even share: who asks first would leave others with nothing.
        self._capacity = min(config.scheduler_config.max_num_seqs, share)
        # Means over groups and rows; the cache holds the prompt of a group once where prefixes are shared, and the last
        # block of a row is half empty.
        prompts = sum(len(request.prompt_token_ids) for request in requests) / max(len(requests), 1)
        self._prompt_tokens = prompts * (1 if config.cache_config.enable_prefix_caching else self._rows_per_group)
        self._prompt_tokens += self._rows_per_group * config.cache_config.block_size / 2
        begun = sum(len(request.begun.token_ids) for request in requests if request.begun)
        self._begun_tokens = begun / max(len(requests), 1)
        self._turns = turns
        self._so_far = {place: request.begun for place, request in enumerate(requests) if request.begun}
        self._asked: dict[int, Completion] = {}  # rows that wait for somebody's answer, by place
        self._answers: dict[int, Future[Any]] = {}  # on the rank that leads: what is being found for them
        self._holds = False  # until all answers are there
        self._ended: list[tuple[int, Completion]] = []  # by an answer, and not yet told
        self._flight: dict[str, int] = {}  # vLLM's name of a request that runs or waits there -> its group's number
        self._begun: dict[str, int] = {}  # vLLM's own, longer name of a request -> tokens that it began with
        self._left: dict[int, int] = {}  # group -> its rows that have not ended
        self._finished = 0  # groups since the last decision
        self._more, self._enough = bool(requests), False
        self._steps_since, self._has_ended = 0, False
        self.begun = self.resumed = self.steps = self.sampled_tokens = self.aborted = 0

    def run(self) -> Iterator[list[tuple[int, Completion]]]:
        """What ended in each step of the engine, with the place of its request; what is given up comes last."""
        while not self._is_over():
            if self._is_due():
                self._decide()
                if self._enough:
                    break
            if self._ended:
                ended, self._ended = self._ended, []
                yield ended
            if self._flight and not self._holds:
                yield self._step()
            elif self._asked:
                yield []  # time passes all the same, and who watches should know that it is not lost
        yield [*self._ended, *self.give_up()]

    def give_up(self) -> list[tuple[int, Completion]]:
        """Ends what is in flight; what there is of it, if anything."""
        from vllm.v1.engine import FinishReason

        partial = [
            (place, dataclasses.replace(completion, finish_reason="abort")) for place, completion in self._asked.items()
        ]
        self.aborted += len(partial)
        for future in self._answers.values():
            future.cancel()
        self._asked, self._answers = {}, {}
        for state in list(self._core.output_processor.request_states.values()):
            name = state.external_req_id
            output = state.make_request_output([], None, FinishReason.ABORT, None)
            # One at a time: of several, vLLM frees the cache blocks in an order that differs between its ranks.
            self._core.abort_request([name])
            if name in self._flight:
                del self._flight[name]
                self.aborted += 1
                if output.outputs[0].token_ids:
                    partial.append((int(name), self._completion(output)))
        self._drain()
        return partial

    def _drain(self) -> None:
        """Waits for what vLLM has begun ahead (asynchronous scheduling): it reads weights that are about to change."""
        begun_ahead = self._core.engine_core.engine_core.batch_queue  # None where it does not schedule ahead
        while begun_ahead:
            self._core.step()

    # ---- deciding

    @property
    def waits(self) -> bool:
        """Whether the engine does nothing until an answer comes."""
        return bool(self._asked) and (self._holds or not self._flight)

    def _is_over(self) -> bool:
        waits = self._flight or self._asked or self._ended
        return not waits and not self._more and not (self._finished and self._counts)

    @property
    def _leads(self) -> bool:
        return self._peers is None or bool(self._peers.is_first_rank)

    @property
    def _counts(self) -> bool:
        """Whether the generation ends with enough groups, so that those that end are to be counted."""
        return self._tickets.wanted is not None

    @property
    def _has_room(self) -> bool:
        return self._more and len(self._flight) < self._capacity

    def _is_due(self) -> bool:
        if self._holds or not self._flight or (self._has_room and self._has_ended):
            return True
        hears_at_once = self._peers is None and self._turns is not None and not self._turns.repeatable
        if hears_at_once and any(future.done() for future in self._answers.values()):
            return True
        return self._steps_since >= _MOST_STEPS and (self._has_room or self._counts or bool(self._asked))

    def _decide(self) -> None:
        """Draws what there is room for, and finds out whether enough is done."""
        decision = torch.zeros(self._capacity + 3, dtype=torch.int64)  # enough, more, how many, which
        if self._leads:
            decision[0] = enough = self._tickets.are_enough(self._finished)
            room = 0 if enough or self._holds or not self._more else self._room()
            drawn, more = self._tickets.draw(room) if room else ([], self._more)
            decision[1], decision[2] = more, len(drawn)
            decision[3 : 3 + len(drawn)] = torch.tensor(drawn, dtype=torch.int64)
        if self._peers is not None:
            dist.broadcast(decision, self._peers.first_rank, group=self._peers.cpu_group)
        enough, more, count, *drawn = decision.tolist()
        self._enough, self._more = bool(enough), bool(more)
        self._finished, self._steps_since, self._has_ended = 0, 0, False
        for number in drawn[:count]:
            self._begin(number)
        if self._asked and not self._enough:
            heard = self._hear(wait=not self._flight)
            self._holds = heard is None
            for place, tokens in heard or []:
                self._go_on(place, tokens)

    def _hear(self, wait: bool) -> list[tuple[int, list[int] | None]] | None:
        """The answers that have come, by place, the same on all ranks of the replica; a row's tokens are None where its
        response ends.

        With ``wait``, since nothing else is to be done, it takes a second for the first of them. Where a run is to be
        repeatable it is all of them, or None while one is not there.
        """
        found: list[Any] = [None]
        if self._leads:
            assert self._turns is not None
            repeatable, answers = self._turns.repeatable, self._answers
            if repeatable or wait:
                until = concurrent.futures.ALL_COMPLETED if repeatable else concurrent.futures.FIRST_COMPLETED
                concurrent.futures.wait(answers.values(), _SECONDS_TO_WAIT, until)
            done = sorted(place for place, future in answers.items() if future.done())
            if not repeatable or len(done) == len(answers):
                results = [(place, answers.pop(place).result()) for place in done]
                found = [[(place, self._turns.read(self._asked[place], result)) for place, result in results]]
        if self._peers is not None:
            dist.broadcast_object_list(found, self._peers.first_rank, group=self._peers.cpu_group)
        heard: list[tuple[int, list[int] | None]] | None = found[0]
        return heard

    def _go_on(self, place: int, tokens: list[int] | None) -> None:
        """The model's next turn behind ``tokens``; or the end, also where these leave it nothing to say."""
        completion = self._asked.pop(place)
        if tokens is None:
            self._ended.append(self._end(place, completion))
        elif len(completion.token_ids) + len(tokens) >= self._limit(place):
            self._ended.append(self._end(place, dataclasses.replace(completion, finish_reason="length")))
        else:
            self._so_far[place] = completion.answered(tokens)
            self._submit(place)

    def _room(self) -> int:
        """How many groups more this replica could keep running, by its number of sequences and its free memory."""
        by_sequences = math.ceil((self._capacity - len(self._flight)) / self._rows_per_group)
        running = self._core.engine_core.engine_core.scheduler.running
        if self._flight and len(running) < len(self._flight):
            return 0  # vLLM could not take all of them yet, or has preempted one
        tokens = [self._begun[of.request_id] + of.num_output_tokens for of in running]
        by_memory = groups_that_fit(
            self._lengths.survival(self._sampling.max_tokens),
            _free_tokens(self._core),
            tokens,
            self._prompt_tokens,
            self._rows_per_group,
            self._begun_tokens,
        )
        return int(max(min(by_sequences, by_memory), not self._flight))

    # ---- vLLM

    def _begin(self, number: int) -> None:
        places = self._groups[number]
        self._left[number] = len(places)
        for place in places:
            self._submit(place)
            self.begun += 1
            self.resumed += place in self._so_far

    def _submit(self, place: int) -> None:
        """Has vLLM generate what comes behind what there is of a row."""
        request, begun = self._requests[place], self._so_far.get(place)
        tokens = begun.token_ids if begun else []
        # A turn that drew what the one before drew would say much the same.
        spoken = begun.turns if begun and begun.sampled else 0
        seed = (request.seed + spoken * _SEEDS_APART) & 0x7FFFFFFF
        prompt = {"prompt_token_ids": [*request.prompt_token_ids, *tokens]}
        parameters = sampling_params(self._sampling, seed, self._limit(place) - len(tokens))
        name = self._core.add_request(str(place), prompt, parameters)
        self._core.output_processor.request_states[name].logprobs_processor = SampledLogprobs()
        self._flight[str(place)], self._begun[name] = self._group_of[place], len(tokens)

    def _limit(self, place: int) -> int:
        """Most tokens of a row behind its prompt."""
        return min(self._requests[place].max_tokens or self._sampling.max_tokens, self._sampling.max_tokens)

    def _step(self) -> list[tuple[int, Completion]]:
        ended = []
        for output in self._core.step():
            if not output.finished:
                continue
            place, completion = int(output.request_id), self._completion(output)
            del self._flight[output.request_id]
            if self._turns and completion.finish_reason == "stop" and self._turns.goes_on(completion):
                self._asked[place] = completion
                if self._leads:
                    self._answers[place] = self._turns.ask(completion)
            else:
                ended.append(self._end(place, completion))
        self.steps += 1
        self._steps_since += 1
        return ended

    def _end(self, place: int, completion: Completion) -> tuple[int, Completion]:
        number = self._group_of[place]
        self._left[number] -= 1
        self._finished += not self._left[number]
        self._has_ended = True
        self._lengths.learn(len(completion.token_ids))
        return place, completion

    def _completion(self, output: Any) -> Completion:
        place, sample = int(output.request_id), output.outputs[0]
        request, begun = self._requests[place], self._so_far.get(place)
        if sample.finish_reason not in ("stop", "length", "abort"):
            raise RuntimeError(
                f"vLLM ended row {request.row_id} with {sample.finish_reason!r} after {len(sample.token_ids)} tokens"
            )
        tokens, logprobs = list(sample.token_ids), list(sample.logprobs)
        versions, sampled = [self._version] * len(tokens), None
        self.sampled_tokens += len(tokens)
        if begun:
            if begun.sampled is not None:
                sampled = [*begun.sampled, *[True] * len(tokens)]
            tokens = [*begun.token_ids, *tokens]
            logprobs = [*begun.logprobs, *logprobs]
            versions = [*begun.weight_versions, *versions]
        return Completion(request.row_id, tokens, logprobs, str(sample.finish_reason), versions, sampled)


def _free_tokens(core: Any) -> float:
    """Tokens that vLLM's cache still has room for; infinite in a version that does not tell, which then preempts."""
    try:
        manager = core.engine_core.engine_core.scheduler.kv_cache_manager
        blocks, layouts = manager.block_pool.get_num_free_blocks(), len(manager.kv_cache_config.kv_cache_groups)
    except AttributeError:
        return math.inf
    return float(blocks * core.vllm_config.cache_config.block_size / layouts)


def sampling_params(sampling: Sampling, seed: int, max_tokens: int) -> Any:
    """What vLLM is told about one request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # those of generation_config.json; stop_token_ids still end a response
        seed=seed,
        logprobs=0,  # of the sampled token only
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
