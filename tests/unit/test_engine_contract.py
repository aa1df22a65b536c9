"""The contract of rollout/engine.py, kept by two engines: vLLM, also as it speculates, and one on transformers.

One engine of each kind serves all tests of the file. Weights are fused here by hand, without the library's weight map.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from echo import Echo
from hugging_face import row_logprobs
from rlhf_megatron.errors import RolloutError
from rlhf_megatron.rollout import engine_registry
from rlhf_megatron.rollout.engine import Completion, EnvironmentReply, Request, Sampling, SamplingOfLength
from rlhf_megatron.rollout.vllm.process_environment import has_gpu, prepare_environment
from rlhf_megatron.rollout.work_queue import WorkQueue
from served_model import (
    GREEDY,
    SAMPLED,
    VOCABULARY,
    Served,
    greedy_tokens,
    process_state,
    prompts,
    requests_for,
    tokens_of,
    write_fused,
)
from transformers_engine import TransformersEngine

pytestmark = pytest.mark.skipif(has_gpu(), reason="float32 on vLLM's CPU kernels; here vLLM would take the GPU")


SPECULATIVE = {"match": 1, "max_running": 4}
# The names of engines, and what drafts for them.
KINDS = {
    "vllm": ("vllm", {}),
    "speculative": ("vllm", {"speculative": SPECULATIVE}),
    "head": ("vllm", {"speculative": {**SPECULATIVE, "method": "eagle3"}}),
    "transformers": ("transformers", {}),
}


@pytest.fixture(scope="module", params=KINDS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    prepare_environment()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(engine_registry.ENGINES, "transformers", TransformersEngine)
        name, settings = KINDS[request.param]
        serving = Served(tmp_path_factory.mktemp("models"), name, **settings)
        with pytest.raises(RuntimeError, match="call weights_updated first"):
            serving.engine.generate(requests_for(prompts(1)), GREEDY)
        serving.serve(0, version=1)
        yield serving
        serving.engine.close()


def groups_of(count: int, responses: int) -> list[Request]:
    """Return requests in groups of the same prompt, of many lengths."""
    return [
        Request(
            10 * group + k,
            prompt,
            500 + 10 * group + k,
            group,
            max_tokens=3 + (5 * group + 3 * k) % 10,
        )
        for group, prompt in enumerate(prompts(count))
        for k in range(responses)
    ]


def expected_logprobs(served: Served, request: Request, completion: Completion, temperature: float) -> torch.Tensor:
    with torch.no_grad():
        return row_logprobs(served.models[0], list(request.prompt_token_ids), completion.token_ids, temperature)


def test_making_an_engine_leaves_the_process_as_it_was(served: Served) -> None:
    assert served.after == served.before


def test_parameters_are_live_storage(served: Served) -> None:
    pointers = [{name: each.data_ptr() for name, each in served.engine.parameters().items()} for _ in range(2)]
    assert pointers[0] == pointers[1] and all(pointers[0].values())


def test_greedy_tokens_are_those_of_transformers(served: Served) -> None:
    asked = requests_for(prompts(5))
    completions = served.engine.generate(asked, GREEDY)
    expected = [greedy_tokens(served.models[0], list(r.prompt_token_ids), GREEDY.max_tokens) for r in asked]
    assert tokens_of(completions) == expected
    assert {(c.finish_reason, c.weight_version) for c in completions} == {("length", 1)}


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_are_those_of_the_tempered_distribution(served: Served, temperature: float) -> None:
    asked = requests_for(prompts(4))
    sampling = Sampling(temperature, 1.0, -1, 12, ())
    for request, completion in zip(asked, served.engine.generate(asked, sampling), strict=True):
        prompt = list(request.prompt_token_ids)
        with torch.no_grad():
            expected = row_logprobs(served.models[0], prompt, completion.token_ids, temperature or 1.0)
        assert len(completion.logprobs) == len(completion.token_ids) == 12
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


def test_logprobs_under_top_k_are_those_of_the_cut_distribution(served: Served) -> None:
    asked = requests_for(prompts(2))
    for request, completion in zip(asked, served.engine.generate(asked, Sampling(1.0, 1.0, 2, 6, ())), strict=True):
        row = [*request.prompt_token_ids, *completion.token_ids]
        with torch.no_grad():
            likeliest = served.models[0](torch.tensor([row])).logits[0, len(request.prompt_token_ids) - 1 : -1].topk(2)
        drawn = likeliest.indices == torch.tensor(completion.token_ids)[:, None]
        assert drawn.any(-1).all()
        expected = likeliest.values.log_softmax(-1)[drawn]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


def test_seeds_decide_whatever_else_is_in_the_batch(served: Served) -> None:
    prompt = prompts(1)[0]
    asked = requests_for([prompt] * 6)
    together = tokens_of(served.engine.generate(asked, SAMPLED))
    assert len({tuple(tokens) for tokens in together}) == 6
    torch.manual_seed(999)  # the trainer's random numbers have no say
    assert tokens_of(served.engine.generate(asked, SAMPLED)) == together
    assert tokens_of(served.engine.generate(asked[4:5], SAMPLED)) == together[4:5]
    assert tokens_of(served.engine.generate(asked[::-1], SAMPLED)) == together[::-1]


def test_generating_leaves_the_random_state_as_it_was(served: Served) -> None:
    before = process_state()
    served.engine.generate(requests_for(prompts(3)), SAMPLED)
    assert process_state() == before


def test_more_requests_than_fit_come_back_in_order_and_report_progress(served: Served) -> None:
    asked = requests_for(prompts(11))
    seen: list[tuple[int, int]] = []
    completions = served.engine.generate(asked, SAMPLED, lambda done, total: seen.append((done, total)))
    assert [completion.row_id for completion in completions] == [request.row_id for request in asked]
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (11, 11)
    assert served.engine.generate([], SAMPLED) == []


def test_a_stop_token_is_the_last_one(served: Served) -> None:
    asked = requests_for(prompts(1))
    free = served.engine.generate(asked, GREEDY)[0].token_ids
    stop = free[5]
    stopped = served.engine.generate(asked, Sampling(0.0, 1.0, -1, 12, (stop,)))[0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free[: free.index(stop) + 1]
    assert len(stopped.logprobs) == len(stopped.token_ids)


def test_new_weights_take_effect_in_place_and_for_cached_prompts(served: Served) -> None:
    asked = requests_for(prompts(2, length=70))  # two full blocks of the prefix cache
    old = tokens_of(served.engine.generate(asked, GREEDY))
    expected = [greedy_tokens(served.models[1], list(request.prompt_token_ids), 12) for request in asked]
    write_fused(served.models[1].state_dict(), served.engine.parameters())
    # The prompts' blocks still hold what the old weights made of them: neither model's answer.
    assert tokens_of(served.engine.generate(asked, GREEDY)) not in (old, expected)
    served.engine.weights_updated(2)
    fresh = served.engine.generate(asked, GREEDY)
    assert tokens_of(fresh) == expected
    assert {completion.weight_version for completion in fresh} == {2}
    served.serve(0, version=1)
    assert tokens_of(served.engine.generate(asked, GREEDY)) == old


def assert_logprobs_equal(served: Served, one: Sequence[Completion], other: Sequence[Completion]) -> None:
    """Assert that logprobs are equal: to rounding where drafts differ, with which others are computed together."""
    bounds = {"atol": 1e-5, "rtol": 0.0} if served.speculates else {}
    torch.testing.assert_close([each.logprobs for each in one], [each.logprobs for each in other], **bounds)


@pytest.mark.parametrize("keeps_weights", [False, True])
def test_sleeping_keeps_the_weights_on_a_cpu_but_asks_for_an_update(served: Served, keeps_weights: bool) -> None:
    asked = requests_for(prompts(2))
    awake = served.engine.generate(asked, GREEDY)
    served.engine.sleep(keeps_weights)
    served.engine.wake_weights()
    served.engine.wake_kv_cache()
    with pytest.raises(RuntimeError, match="call weights_updated first"):
        served.engine.generate(asked, GREEDY)
    served.engine.weights_updated(awake[0].weight_version)
    again = served.engine.generate(asked, GREEDY)
    if served.speculates:
        assert_logprobs_equal(served, again, awake)
        again = [dataclasses.replace(new, logprobs=old.logprobs) for new, old in zip(again, awake, strict=True)]
    assert again == awake


def test_an_error_on_the_way_leaves_no_requests_behind(served: Served) -> None:
    def give_up(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        served.engine.generate(requests_for(prompts(9)), SAMPLED, give_up)
    served.engine.weights_updated(1)  # refuses while requests run
    assert len(served.engine.generate(requests_for(prompts(2)), SAMPLED)) == 2


def test_requests_have_lengths_of_their_own(served: Served) -> None:
    asked = groups_of(4, 3)
    completions = served.engine.generate(asked, SAMPLED)
    assert [len(completion.token_ids) for completion in completions] == [request.max_tokens for request in asked]
    assert {completion.finish_reason for completion in completions} == {"length"}
    longest = dataclasses.replace(asked[0], max_tokens=SAMPLED.max_tokens + 4)
    assert len(served.engine.generate([longest], SAMPLED)[0].token_ids) == SAMPLED.max_tokens


def test_short_prompts_have_sampling_of_their_own(served: Served) -> None:
    asked = requests_for(prompts(6))
    shortest = min(len(request.prompt_token_ids) for request in asked)
    sampling = dataclasses.replace(SAMPLED, by_length=[SamplingOfLength(shortest, 1.0, 1, 5)])
    usual = served.engine.generate(asked, SAMPLED)
    completions = served.engine.generate(asked, sampling)
    for request, completion, before in zip(asked, completions, usual, strict=True):
        prompt = list(request.prompt_token_ids)
        if len(prompt) == shortest:  # the likeliest of one token
            assert completion.token_ids == greedy_tokens(served.models[0], prompt, 5)
        else:
            assert completion.token_ids == before.token_ids
    assert {len(request.prompt_token_ids) for request in asked} > {shortest}


def test_the_record_counts_what_was_done(served: Served) -> None:
    asked = groups_of(3, 2)
    completions = served.engine.generate(asked, SAMPLED)
    record = served.engine.record
    assert record.sampled_tokens == sum(len(completion.token_ids) for completion in completions)
    assert record.accepted_tokens <= record.drafted_tokens <= 3 * record.verifications
    longest = max(len(completion.token_ids) for completion in completions)
    assert record.steps >= longest / (4 if record.drafted_tokens else 1)
    assert (record.resumed, record.aborted) == (0, 0) and record.seconds > 0


def test_expected_lengths_change_no_answer(served: Served) -> None:
    asked = groups_of(4, 2)
    before = served.engine.generate(asked, SAMPLED)
    served.engine.expect([1] * 100)
    assert tokens_of(served.engine.generate(asked, SAMPLED)) == tokens_of(before)


def test_a_cache_in_use_is_not_reset(served: Served) -> None:
    refused: list[str] = []

    def reset(done: int, begun: int) -> None:
        if done < 6:
            with pytest.raises(RuntimeError, match="requests are still running"):
                served.engine.reset_prefix_cache()
            refused.append("once")

    lengths = [dataclasses.replace(each, max_tokens=2 + 3 * i) for i, each in enumerate(requests_for(prompts(4)))]
    served.engine.generate(lengths, SAMPLED, lambda done, begun: reset(done + 2, begun))
    assert refused
    served.engine.reset_prefix_cache()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([2] * 85, "row 1000: 85 prompt tokens and 12 new ones exceed the engine's 96"),
        ([], "row 1000: the prompt has no tokens"),
        ([3, VOCABULARY], "row 1000: token 250 or 3 is outside the model's vocabulary of 250"),
        ([3, -1], "row 1000: token 3 or -1 is outside the model's vocabulary of 250"),
    ],
)
def test_what_cannot_be_generated_is_refused_in_one_line(served: Served, tokens: list[int], message: str) -> None:
    with pytest.raises(RolloutError, match=message) as caught:
        served.engine.generate([Request(1000, tokens, 1)], GREEDY)
    assert "\n" not in str(caught.value)


# ---- a queue of groups


def test_groups_of_others_are_left_alone(served: Served) -> None:
    asked = groups_of(5, 2)
    everything = {completion.row_id: completion for completion in served.engine.generate(asked, SAMPLED)}
    own = served.engine.generate(asked, SAMPLED, queue=WorkQueue(range(1, 5, 2)))
    assert [completion.row_id for completion in own] == [10, 11, 30, 31]
    assert tokens_of(own) == tokens_of([everything[completion.row_id] for completion in own])


def test_enough_groups_end_the_generation_and_the_rest_is_resumed(served: Served) -> None:
    asked = groups_of(6, 2)
    reference = {completion.row_id: completion for completion in served.engine.generate(asked, SAMPLED)}
    done: list[int] = []
    first = served.engine.generate(
        asked, SAMPLED, on_completion=lambda each: done.append(each.row_id), queue=WorkQueue(range(6), wanted=2)
    )
    whole = [completion.row_id for completion in first if completion.is_whole]
    partial = {completion.row_id: completion for completion in first if not completion.is_whole}
    assert partial and sorted(done) == sorted(whole)
    assert sum({2 * group, 2 * group + 1} <= {row // 10 * 2 + row % 10 for row in whole} for group in range(6)) >= 2
    assert served.engine.record.aborted >= len(partial)
    for row, completion in partial.items():
        count = len(completion.token_ids)
        assert 0 < count == len(completion.logprobs) < len(reference[row].token_ids)
        assert completion.finish_reason == "abort"
        assert completion.token_ids == reference[row].token_ids[:count]

    served.engine.weights_updated(2)
    left = [
        dataclasses.replace(request, begun=partial.get(request.row_id))
        for request in asked
        if request.row_id not in whole
    ]
    second = served.engine.generate(left, SAMPLED)
    assert served.engine.record.resumed == len(partial)
    for request, completion in zip(left, second, strict=True):
        begun = partial.get(request.row_id)
        count = len(begun.token_ids) if begun else 0
        assert len(completion.token_ids) == request.max_tokens and completion.finish_reason == "length"
        if begun:
            assert completion.token_ids[:count] == begun.token_ids and completion.logprobs[:count] == begun.logprobs
        assert completion.weight_versions == [1] * count + [2] * (len(completion.token_ids) - count)
        expected = expected_logprobs(served, request, completion, SAMPLED.temperature)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)
    served.engine.weights_updated(1)


def test_greedy_rows_resume_as_if_they_had_not_been_aborted(served: Served) -> None:
    request = requests_for(prompts(1))[0]
    whole = served.engine.generate([request], GREEDY)[0]
    begun = dataclasses.replace(
        whole,
        token_ids=whole.token_ids[:5],
        logprobs=whole.logprobs[:5],
        weight_versions=whole.weight_versions[:5],
        finish_reason="abort",
    )
    resumed = served.engine.generate([dataclasses.replace(request, begun=begun)], GREEDY)[0]
    assert (resumed.token_ids, resumed.weight_versions) == (whole.token_ids, whole.weight_versions)
    torch.testing.assert_close(torch.tensor(resumed.logprobs), torch.tensor(whole.logprobs), atol=1e-4, rtol=0)


# ---- pausing


def keyed(requests: list[Request], begun: list[Completion] | None = None) -> list[Request]:
    """Return requests that can be paused, with what there is of them, groups that go on before others."""
    known = {completion.row_id: completion for completion in begun or ()}
    asked = [
        dataclasses.replace(each, key=each.row_id, begun=known.get(each.row_id))
        for each in requests
        if each.row_id not in known or not known[each.row_id].is_whole
    ]
    going_on = {each.group_id for each in asked if each.begun}
    return sorted(asked, key=lambda each: (each.group_id not in going_on, each.group_id))


def paused_after(served: Served, asked: list[Request], wanted: int = 2) -> list[Completion]:
    queue = WorkQueue(range(len({each.group_id for each in asked})), wanted)
    return served.engine.generate(keyed(asked), SAMPLED, queue=queue, pauses=True)


def joined(first: list[Completion], second: list[Completion]) -> list[Completion]:
    rows = {completion.row_id: completion for completion in (*first, *second)}
    return [rows[row] for row in sorted(rows)]


def test_paused_rows_go_on_as_if_nothing_had_been(served: Served) -> None:
    asked = groups_of(6, 2)
    reference = served.engine.generate(asked, SAMPLED)
    first = paused_after(served, asked)
    record = served.engine.record
    assert record.aborted == 0 < record.paused and 1 <= record.in_flight <= 4
    assert {each.finish_reason for each in first} == {"abort", "length"}
    while any(not each.is_whole for each in first) or len(first) < len(asked):
        left = keyed(asked, first)
        groups = len({each.group_id for each in left})
        rest = served.engine.generate(left, SAMPLED, queue=WorkQueue(range(groups), 1), pauses=True)
        first = joined(first, rest)
    assert tokens_of(first) == tokens_of(reference)
    assert_logprobs_equal(served, first, reference)
    served.engine.reset_prefix_cache()  # refuses while requests run


def test_weights_change_under_paused_rows_and_no_new_row_shares_their_cache(served: Served) -> None:
    asked = [
        Request(10 * group, prompt, 500 + group, group, max_tokens=12 if group else 3)
        for group, prompt in enumerate(prompts(4, length=70))
    ]
    first = paused_after(served, asked, wanted=1)
    paused = [each for each in first if not each.is_whole]
    assert paused
    served.serve(1, version=2)
    new = [Request(900 + i, each.prompt_token_ids, 7, 100 + i, key=900 + i) for i, each in enumerate(asked)]
    greedy = dataclasses.replace(SAMPLED, temperature=0.0)
    rest = served.engine.generate([*keyed(asked, first), *new], greedy)
    for request, completion in zip(new, rest[-4:], strict=True):
        prompt = list(request.prompt_token_ids)
        assert completion.token_ids == greedy_tokens(served.models[1], prompt, SAMPLED.max_tokens)
        assert set(completion.weight_versions) == {2}
    gone_on = {each.row_id: each for each in rest}
    differences = []
    for before in paused:
        after, count = gone_on[before.row_id], len(before.token_ids)
        assert after.token_ids[:count] == before.token_ids and after.logprobs[:count] == before.logprobs
        assert after.weight_versions == [1] * count + [2] * (len(after.token_ids) - count)
        prompt = list(asked[before.row_id // 10].prompt_token_ids)
        with torch.no_grad():
            anew = row_logprobs(served.models[1], prompt, after.token_ids, 1.0)[count:]
        differences.append((torch.tensor(after.logprobs)[count:] - anew).abs().max().item())
    assert max(differences) > 1e-3, "what the weights of before have computed is kept"
    served.serve(0, version=1)


@pytest.mark.parametrize("drop", ["by itself", "by another generation"])
def test_rows_that_are_no_longer_paused_are_computed_anew(served: Served, drop: str) -> None:
    asked = groups_of(5, 2)
    first = paused_after(served, asked)
    if drop == "by itself":
        served.engine.drop_paused()
    else:
        served.engine.generate(requests_for(prompts(3)), GREEDY)
    served.engine.reset_prefix_cache()  # refuses while requests run
    served.serve(1, version=2)
    left = keyed(asked, first)
    for request, completion in zip(left, served.engine.generate(left, SAMPLED), strict=True):
        count = len(request.begun.token_ids) if request.begun else 0
        assert completion.weight_versions == [1] * count + [2] * (len(completion.token_ids) - count)
        with torch.no_grad():
            prompt = list(request.prompt_token_ids)
            expected = row_logprobs(served.models[1], prompt, completion.token_ids, SAMPLED.temperature)
        torch.testing.assert_close(torch.tensor(completion.logprobs)[count:], expected[count:], atol=1e-4, rtol=0)
    served.serve(0, version=1)


def test_an_error_leaves_nothing_paused(served: Served) -> None:
    def give_up(completion: Completion) -> None:
        raise KeyboardInterrupt

    asked = groups_of(5, 2)
    first = paused_after(served, asked)
    with pytest.raises(KeyboardInterrupt):
        served.engine.generate(keyed(asked, first), SAMPLED, on_completion=give_up, pauses=True)
    served.engine.reset_prefix_cache()


# ---- an environment


EVERY_EVEN_TOKEN = Sampling(1.0, 1.0, -1, 12, tuple(range(0, VOCABULARY, 2)))


def turns_of(completion: Completion) -> list[tuple[bool, list[int]]]:
    """Return the runs of tokens of a completion, and whose they are."""
    runs: list[tuple[bool, list[int]]] = []
    for token, sampled in zip(completion.token_ids, completion.sampled or [], strict=True):
        if not runs or runs[-1][0] is not sampled:
            runs.append((sampled, []))
        runs[-1][1].append(token)
    return runs


@pytest.mark.parametrize("repeatable", [False, True])
def test_an_environment_speaks_between_turns(served: Served, repeatable: bool) -> None:
    asked, environment = requests_for(prompts(9)), Echo(3, repeatable)
    completions = served.engine.generate(asked, EVERY_EVEN_TOKEN, environment=environment)
    assert [completion.row_id for completion in completions] == [request.row_id for request in asked]
    several = [completion for completion in completions if completion.sampled is not None]
    assert several and len(environment.asked) >= len(several)
    for request, completion in zip(asked, completions, strict=True):
        assert completion.turns <= 3 and len(completion.token_ids) <= EVERY_EVEN_TOKEN.max_tokens
        if completion.sampled is None:
            continue
        runs = turns_of(completion)
        assert [own for own, _ in runs] == [index % 2 == 0 for index in range(len(runs))]
        assert all(tokens == list(Echo.ANSWER) for own, tokens in runs if not own)
        assert all(tokens[-1] % 2 == 0 and all(token % 2 for token in tokens[:-1]) for own, tokens in runs[:-1] if own)
        own_tokens = torch.tensor(completion.sampled)
        logprobs = torch.tensor(completion.logprobs)
        assert (logprobs[~own_tokens] == 0).all()
        expected = expected_logprobs(served, request, completion, 1.0)[own_tokens]
        torch.testing.assert_close(logprobs[own_tokens], expected, atol=1e-4, rtol=0)
    sampled = sum(completion.sampled_tokens for completion in completions)
    assert served.engine.record.sampled_tokens == sampled


def test_answers_that_come_together_make_a_generation_repeatable(served: Served) -> None:
    asked = requests_for(prompts(6))
    first, second = (served.engine.generate(asked, EVERY_EVEN_TOKEN, environment=Echo(3, True)) for _ in range(2))
    assert first == second


def test_a_row_ends_where_the_environment_has_no_answer_or_no_room(served: Served) -> None:
    asked = requests_for(prompts(4))
    silent = served.engine.generate(asked, EVERY_EVEN_TOKEN, environment=Echo(3, answers=0))
    plain = served.engine.generate(asked, EVERY_EVEN_TOKEN)
    assert tokens_of(silent) == tokens_of(plain)
    assert [completion.finish_reason for completion in silent] == [completion.finish_reason for completion in plain]
    short = dataclasses.replace(EVERY_EVEN_TOKEN, max_tokens=3)
    cut = served.engine.generate(asked, short, environment=Echo(3))
    assert all(len(completion.token_ids) <= 3 for completion in cut)
    ended = {
        completion.row_id for completion in served.engine.generate(asked, short) if completion.finish_reason == "stop"
    }
    full = [completion for completion in cut if completion.row_id in ended and len(completion.token_ids) > 1]
    assert all(completion.finish_reason == "length" for completion in full)


def test_an_environment_that_fails_leaves_no_requests_behind(served: Served) -> None:
    class Broken(Echo):
        def read(self, completion: Completion, answer: Any, /) -> EnvironmentReply:
            raise RolloutError("it is broken")

    with pytest.raises(RolloutError, match="it is broken"):
        served.engine.generate(requests_for(prompts(6)), EVERY_EVEN_TOKEN, environment=Broken(3))
    served.engine.weights_updated(1)  # refuses while requests run
    assert len(served.engine.generate(requests_for(prompts(2)), SAMPLED)) == 2
