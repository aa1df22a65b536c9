"""Replicas that draw from one queue, with real engines: every prompt once; what is given up can be gone on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hugging_face import load_model, make_model, row_logprobs
from parallel.queue_ranks import CACHE_TOKENS, GROUPS, RESPONSES, lockstep, replicas, requests_of
from parallel.ranks import run_ranks
from rlhf_megatron.rollout.vllm.process_environment import has_gpu

pytestmark = pytest.mark.skipif(has_gpu(), reason="float32 on vLLM's CPU kernels; here vLLM would take the GPU")
ROWS = GROUPS * RESPONSES
LENGTHS = {request.row_id: request.max_tokens for request in requests_of(range(GROUPS))}
ROW, TOKENS, LOGPROBS, ENDING, VERSIONS = range(5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", tied=False)


@pytest.fixture(scope="module")
def drawn(model: Path) -> list[dict[str, Any]]:
    """Return what two replicas found, each on its own rank."""
    return run_ranks(replicas, 2, {"model": str(model)})


def of_both(found: list[dict[str, Any]], name: str) -> dict[int, list[Any]]:
    """Return the completions of both replicas by row, of which none comes twice."""
    completions = [completion for result in found for completion in result[name]]
    by_row = {completion[ROW]: completion for completion in completions}
    assert len(by_row) == len(completions)
    return by_row


def test_every_prompt_is_answered_once_and_as_by_a_static_split(drawn: list[dict[str, Any]]) -> None:
    queue, static = of_both(drawn, "queue"), of_both(drawn, "static")
    assert sorted(queue) == sorted(static) == list(range(ROWS))
    assert all(result["queue"] for result in drawn)
    for result in drawn:
        groups = [completion[ROW] // RESPONSES for completion in result["queue"]]
        assert all(groups.count(group) == RESPONSES for group in groups), "a group stays on one replica"
    assert {row: len(of[TOKENS]) for row, of in queue.items()} == LENGTHS
    # Seeds are the rows', so who answers does not matter; which rows share a batch may, in the last bit of a logit.
    assert sum(queue[row][TOKENS] == static[row][TOKENS] for row in queue) >= ROWS - 2


def test_enough_groups_end_the_generation(drawn: list[dict[str, Any]]) -> None:
    first, reference = of_both(drawn, "first"), of_both(drawn, "static")
    whole = {row for row, completion in first.items() if completion[ENDING] == "length"}
    groups = [group for group in range(GROUPS) if whole.issuperset(range(group * RESPONSES, (group + 1) * RESPONSES))]
    assert 5 <= len(groups) < GROUPS
    assert sorted(row for result in drawn for row in result["done"]) == sorted(whole)
    partial = {row: completion for row, completion in first.items() if row not in whole}
    assert partial and {completion[ENDING] for completion in partial.values()} == {"abort"}
    equal = 0
    for row, (_, tokens, logprobs, _, versions, *_) in partial.items():
        assert 0 < len(tokens) == len(logprobs) == len(versions) < LENGTHS[row]
        equal += tokens == reference[row][TOKENS][: len(tokens)]
    assert equal >= len(partial) - 2, "what was given up is the beginning of what would have come"
    assert sum(result["record"]["aborted"] for result in drawn) >= len(partial)
    sampled = sum(len(completion[TOKENS]) for completion in first.values())
    assert sum(result["record"]["sampled_tokens"] for result in drawn) == sampled


def test_what_was_given_up_is_gone_on_with(drawn: list[dict[str, Any]], model: Path) -> None:
    first, second = of_both(drawn, "first"), of_both(drawn, "second")
    whole = {row for row, completion in first.items() if completion[ENDING] == "length"}
    assert sorted([*whole, *second]) == list(range(ROWS)), "every row is finished once"
    partial = [row for row in first if row not in whole]
    assert sum(result["resumed"] for result in drawn) == len(partial)
    trainer = load_model(model)
    prompts = {request.row_id: list(request.prompt_token_ids) for request in requests_of(range(GROUPS))}
    for row, (_, tokens, logprobs, _, versions, *_) in second.items():
        begun = first[row] if row in partial else [row, [], [], "", []]
        count = len(begun[TOKENS])
        assert len(tokens) == len(logprobs) == LENGTHS[row]
        assert (tokens[:count], logprobs[:count]) == (begun[TOKENS], begun[LOGPROBS])
        assert versions == [1] * count + [2] * (len(tokens) - count)
        with torch.no_grad():
            expected = row_logprobs(trainer, prompts[row], tokens, 1.0)
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)


def test_keys_of_the_generation_before_are_gone(drawn: list[dict[str, Any]]) -> None:
    assert [result["keys"] for result in drawn] == [[False, True]] * 2


def test_ranks_of_a_replica_keep_in_step_where_the_cache_is_small(model: Path) -> None:
    one, other = run_ranks(lockstep, 2, {"model": str(model), "tensor": 2})
    assert one == other
    assert one["cache"] <= CACHE_TOKENS, "sixteen of the longest sequences would not fit"
    assert one["left"] == 0
    by_group, together = one["preempted"][1:]
    assert by_group < together, "what would be preempted is not begun"
    trainer, prompts = load_model(model), {of.row_id: list(of.prompt_token_ids) for of in requests_of(range(GROUPS))}
    for row, tokens, logprobs, *_ in one["rounds"][-1][0]:
        with torch.no_grad():
            expected = row_logprobs(trainer, prompts[row], tokens, 1.0)
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)
    found = [completion for completions, *_ in one["rounds"][:3] for completion in completions]
    finished = [completion for completion in found if completion[ENDING] != "abort"]
    assert len(finished) < len(found), "some were given up"
    assert {completion[ROW]: len(completion[TOKENS]) for completion in finished} == LENGTHS
    assert len(finished) == ROWS
