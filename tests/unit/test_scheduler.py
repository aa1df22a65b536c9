"""The scheduling policy over an engine that is played: every step, every cache token, no model."""

from __future__ import annotations

import math
from concurrent.futures import Future
from typing import Any

import pytest

from rlhf_megatron.rollout.engine import Completion, EnvironmentReply, Request, Sampling
from rlhf_megatron.rollout.engine_core import EngineOutput, EngineRequest
from rlhf_megatron.rollout.response_lengths import ResponseLengths
from rlhf_megatron.rollout.scheduler import GenerationScheduler
from rlhf_megatron.rollout.work_queue import WorkQueue

PROMPT, LONGEST = 4, 40
SAMPLING = Sampling(1.0, 1.0, -1, LONGEST, ())


class PlayedCore:
    """An engine that samples the token 1 until a request's length is reached; what does not fit waits."""

    name, block_size, enable_prefix_caching = "played", 0, False

    def __init__(self, cache_tokens: float, max_num_seqs: int = 100, reason: str = "length") -> None:
        self.max_num_seqs, self._cache_tokens, self._reason = max_num_seqs, cache_tokens, reason
        self._requests: dict[int, EngineRequest] = {}
        self._sampled: dict[int, int] = {}
        self.seeds: list[int] = []
        self.most_in_flight, self.fullest, self.waited = 0, 0, 0

    def add_request(self, request: EngineRequest, sampling: Sampling) -> None:
        self._requests[request.number] = request
        self.seeds.append(request.seed)
        self.most_in_flight = max(self.most_in_flight, len(self._requests))

    def step(self) -> list[EngineOutput]:
        for number, request in self._requests.items():
            if number not in self._sampled and self.free_tokens() >= len(request.token_ids):
                self._sampled[number] = 0
        self.waited += len(self._requests) - len(self._sampled)
        for number in self._sampled:
            self._sampled[number] += 1
        self.fullest = max(self.fullest, int(self._cache_tokens - self.free_tokens()))
        ended = [number for number, count in self._sampled.items() if count == self._requests[number].max_tokens]
        return [self._drop(number, self._reason) for number in ended]

    def abort_requests(self) -> list[EngineOutput]:
        return [self._drop(number, "abort") for number in list(self._requests)]

    def abort_request(self, number: int) -> None:
        self._drop(number, "abort")

    def pause(self) -> list[EngineOutput]:
        return []

    def unfinished(self) -> list[EngineOutput]:
        return [self._output(number, "abort") for number in self._requests]

    def running(self) -> dict[int, int]:
        return dict(self._sampled)

    def free_tokens(self) -> float:
        return self._cache_tokens - sum(len(self._requests[each].token_ids) + n for each, n in self._sampled.items())

    def _output(self, number: int, reason: str) -> EngineOutput:
        count = self._sampled.get(number, 0)
        return EngineOutput(number, [1] * count, [-1.0] * count, reason)

    def _drop(self, number: int, reason: str) -> EngineOutput:
        output = self._output(number, reason)
        del self._requests[number]
        self._sampled.pop(number, None)
        return output


def requests(groups: int, rows: int = 2, tokens: int = 10) -> list[Request]:
    return [
        Request(row, [5] * PROMPT, 100 + row, row // rows, max_tokens=tokens + row % rows)
        for row in range(groups * rows)
    ]


def generate(core: PlayedCore, asked: list[Request], **named: Any) -> list[Completion]:
    lengths = ResponseLengths([10, 11] * 256)
    return GenerationScheduler(core, asked, SAMPLING, 1, lengths, **named).generate()


def test_groups_are_admitted_as_the_cache_has_room() -> None:
    core, asked = PlayedCore(cache_tokens=150), requests(20)
    assert [len(each.token_ids) for each in generate(core, asked)] == [each.max_tokens for each in asked]
    assert core.waited == 0 and core.fullest <= 1.15 * 150, "what would not fit is not begun, as far as can be foreseen"
    assert core.most_in_flight >= 8, "and what fits is"


def test_one_group_runs_whatever_the_cache_holds() -> None:
    core = PlayedCore(cache_tokens=PROMPT + 12)
    assert len(generate(core, requests(3))) == 6
    assert core.most_in_flight == 2


def test_sequences_are_limited_by_the_engine_and_by_an_even_share() -> None:
    core = PlayedCore(float("1e9"), max_num_seqs=6)
    generate(core, requests(10))
    assert core.most_in_flight == 7, "a group is not divided"
    core, queue = PlayedCore(float("1e9")), WorkQueue(range(10))
    queue.replicas = 5
    generate(core, requests(10), queue=queue)
    assert core.most_in_flight == 5, "four, and the rest of a group"


def test_enough_is_noticed_within_eight_steps() -> None:
    core = PlayedCore(float("1e9"), max_num_seqs=4)
    scheduler = GenerationScheduler(
        core, requests(10), SAMPLING, 1, ResponseLengths(), queue=WorkQueue(range(10), wanted=4)
    )
    completions = scheduler.generate()
    assert sum(completion.is_whole for completion in completions) >= 8
    assert scheduler.record.steps <= 2 * 11 + 8
    assert core.running() == {}


def test_an_ending_that_is_not_known_is_an_error_and_leaves_nothing() -> None:
    core = PlayedCore(float("1e9"), reason="error")
    with pytest.raises(RuntimeError, match="played ended row 0 with 'error' after 10 tokens"):
        generate(core, requests(2))
    assert core.running() == {}


class Reply:
    """Answers with one token, twice."""

    repeatable, opens = True, False

    def goes_on(self, completion: Completion) -> bool:
        return completion.finish_reason == "stop" and completion.turns < 3

    def ask(self, completion: Completion) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result([2])
        return future

    def read(self, completion: Completion, answer: Any, /) -> EnvironmentReply:
        return EnvironmentReply(list(answer))


class Game(Reply):
    """Begins rows with prompts of their own, but for row 1, where it fails; pays 1 for a turn, and 5 for the end."""

    opens = True

    def goes_on(self, completion: Completion) -> bool:
        return True

    def ask(self, completion: Completion) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(None)
        return future

    def read(self, completion: Completion, answer: Any, /) -> EnvironmentReply:
        if not completion.token_ids:
            return EnvironmentReply(None, math.nan) if completion.row_id == 1 else EnvironmentReply([4, 5])
        if completion.finish_reason == "length" or completion.turns == 3:
            return EnvironmentReply(None, 5.0)
        return EnvironmentReply([2, 2], 1.0)


def test_an_environment_begins_rows_and_sees_their_end() -> None:
    class Stopping(PlayedCore):
        def add_request(self, request: EngineRequest, sampling: Sampling) -> None:
            assert request.token_ids[:2] == [4, 5]
            super().add_request(EngineRequest(request.number, request.token_ids, request.seed, 3), sampling)

    whole, failed = generate(Stopping(float("1e9"), reason="stop"), requests(1, rows=2, tokens=20), environment=Game())
    assert whole.prompt_token_ids == [4, 5] and whole.turn_rewards == [1.0, 1.0, 5.0] and whole.turns == 3
    assert failed.token_ids == [] and failed.is_whole and all(map(math.isnan, failed.turn_rewards or [0.0]))
    (cut, _) = generate(Stopping(float("1e9"), reason="stop"), requests(1, rows=2, tokens=8), environment=Game())
    assert (cut.finish_reason, cut.turns, cut.turn_rewards) == ("length", 2, [1.0, 6.0])


def test_turns_of_a_row_have_seeds_of_their_own() -> None:
    class Stopping(PlayedCore):
        def add_request(self, request: EngineRequest, sampling: Sampling) -> None:
            super().add_request(EngineRequest(request.number, request.token_ids, request.seed, 3), sampling)

    core = Stopping(float("1e9"), reason="stop")
    (completion,) = generate(core, requests(1, rows=1, tokens=20), environment=Reply())
    assert core.seeds == [100, 100 + 1_000_003, 100 + 2 * 1_000_003]
    assert completion.token_ids == [1, 1, 1, 2, 1, 1, 1, 2, 1, 1, 1] and completion.turns == 3
    assert completion.logprobs == [-1.0] * 3 + [0.0] + [-1.0] * 3 + [0.0] + [-1.0] * 3
