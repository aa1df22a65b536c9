"""The scheduling policy over an engine that is played: every step, every cache token, no model."""

from __future__ import annotations

import math
from concurrent.futures import Future
from typing import Any

import pytest

from rlhf_megatron.rollout import environment_turns
from rlhf_megatron.rollout.admission import Admission
from rlhf_megatron.rollout.engine import Completion, EnvironmentReply, Request, Sampling
from rlhf_megatron.rollout.engine_core import EngineOutput, EngineRequest
from rlhf_megatron.rollout.generation_clock import GenerationClock
from rlhf_megatron.rollout.grouped_requests import GroupedRequests
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
        self.prompt_tokens = self.prefilled_tokens = 0

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
    """Environment that answers with one token, twice."""

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
    """Environment that begins rows with prompts of their own, but for row 1, where it fails; pays 1 for a turn, and 5
    for the end."""

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


class Later(Reply):
    """Environment that answers a turn when the engine has made so many steps more."""

    repeatable, steps = False, 12

    def __init__(self, core: Caching) -> None:
        self._core, self._asked = core, list[tuple[int, int, Future[Any]]]()
        core.environment = self

    def goes_on(self, completion: Completion) -> bool:
        return completion.turns < 3

    def ask(self, completion: Completion) -> Future[Any]:
        self._asked.append((self._core.steps + self.steps, PROMPT + len(completion.token_ids), Future()))
        return self._asked[-1][2]

    def progress(self, done: int, begun: int) -> None:
        """Let time pass where no step will come."""
        pending = [due for due, _, future in self._asked if not future.done()]
        if pending and not self._core.running():
            self._core.steps = max(self._core.steps, min(pending))
            self.answer()

    def answer(self) -> int:
        """Settle what is due; return the tokens of what waits."""
        for due, _, future in self._asked:
            if due <= self._core.steps and not future.done():
                future.set_result([2])
        return sum(tokens for _, tokens, future in self._asked if not future.done())


class Caching(PlayedCore):
    """Its rows keep their cache while they wait, as far as it goes."""

    enable_prefix_caching, steps, most_held = True, 0, 0
    environment: Later

    def add_request(self, request: EngineRequest, sampling: Sampling) -> None:
        super().add_request(
            EngineRequest(request.number, request.token_ids, request.seed, 2 + request.seed % 5, request.begun),
            sampling,
        )

    def step(self) -> list[EngineOutput]:
        ended, self.steps = super().step(), self.steps + 1
        running = int(self._cache_tokens - self.free_tokens())
        self.most_held = max(self.most_held, running + self.environment.answer())
        return ended


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_turns, "_SECONDS_TO_WAIT", 0.001)


@pytest.mark.usefixtures("short_waits")
def test_rows_that_wait_keep_their_cache_and_hold_up_nothing() -> None:
    core, lengths = Caching(cache_tokens=200), ResponseLengths([14] * 256)
    asked, environment = requests(40, rows=1, tokens=24), Later(core)
    scheduler = GenerationScheduler(core, asked, SAMPLING, 1, lengths, environment=environment)
    assert [each.turns for each in scheduler.generate(environment.progress)] == [3] * 40
    assert core.most_held <= 1.15 * 200, "what waits is counted, or it would be computed again"
    assert scheduler.record.in_flight > 3, "others run in the meantime"


def test_the_cache_of_what_waits_is_given_up_where_prefilling_it_again_costs_less() -> None:
    clock = GenerationClock()
    assert clock.keeps_waiting(1.0), "before anything is measured"
    for step in range(40):  # 10 ms, and 0.1 ms for each prefilled token
        prefilled = 50 * (step % 4)
        clock.count_step(0.01 + 1e-4 * prefilled, prefilled, waiting=10)
    clock.count_wait(0.3, waiting=10)
    clock.count_answers(10)
    assert clock.seconds_per_prefilled_token == pytest.approx(1e-4)
    assert clock.engine_seconds == pytest.approx(0.7) and clock.idle_seconds == pytest.approx(0.3)
    assert clock.waiting_seconds == pytest.approx(10.0), "ten rows, for a second each"
    assert clock.keeps_waiting(10_001) and not clock.keeps_waiting(9_999)
    asked, core = GroupedRequests.of(requests(20, rows=1)), Caching(cache_tokens=300)
    fitting = [
        Admission(core, SAMPLING, ResponseLengths([10] * 256), asked, WorkQueue(range(20)), measured).groups_that_fit(
            2, [4, 8], [8] * 20
        )
        for measured in (None, GenerationClock(), clock)
    ]
    assert fitting[0] == fitting[1] < fitting[2], "without times they keep it"


@pytest.mark.usefixtures("short_waits")
def test_what_every_engine_measures_of_prompts_is_in_the_record() -> None:
    core = Caching(cache_tokens=1000)
    core.prompt_tokens, core.prefilled_tokens = 7, 5  # of a generation before
    asked, environment = requests(2, rows=1, tokens=24), Later(core)
    scheduler = GenerationScheduler(core, asked, SAMPLING, 1, ResponseLengths(), environment=environment)
    scheduler.generate(environment.progress)
    record = scheduler.record
    assert record.prompt_tokens == record.prefilled_tokens == 0, "of this one, in which none was counted"
    assert 0 < record.engine_seconds <= record.seconds and record.waiting_seconds > 0
