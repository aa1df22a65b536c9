"""Speculative decoding changes no sample: tokens, their distribution and logprobs are the model's own.

One engine serves all tests of the file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from hugging_face import row_logprobs
from rlhf_megatron.compat.vllm import internals
from rlhf_megatron.compat.vllm.seeded_draw import draw
from rlhf_megatron.recipe import RolloutSection
from rlhf_megatron.rollout.engine import Request, Sampling
from rlhf_megatron.rollout.vllm.process_environment import has_gpu, prepare_environment
from served_model import SAMPLED, VOCABULARY, Served, greedy_tokens, prompts, requests_for, tokens_of
from statistics_of_draws import chi_square_z

without_gpu = pytest.mark.skipif(has_gpu(), reason="float32 on vLLM's CPU kernels; here vLLM would take the GPU")
RUNNING = 64


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    prepare_environment()
    speculative = {"match": 1, "max_running": RUNNING}
    serving = Served(
        tmp_path_factory.mktemp("models"),
        speculative=speculative,
        max_response_length=40,
        max_num_seqs=RUNNING,
        max_num_batched_tokens=1024,
        scheduling="static",
    )
    serving.serve(0, version=1)
    yield serving
    serving.engine.close()


def test_draws_of_seeds_and_positions_have_the_distribution() -> None:
    count = 40_000
    logits = torch.randn(30, generator=torch.Generator().manual_seed(1)) * 2
    logits[7] = float("-inf")
    rows = torch.arange(count) % 100
    tokens = draw(logits.expand(count, -1), torch.ones(100), torch.arange(100) + 5, rows, torch.arange(count) // 100)
    assert chi_square_z(tokens, logits.softmax(-1)) < 4
    two, temperatures = torch.arange(2), torch.tensor([1.0, 0.0])
    again = draw(logits.expand(2, -1), temperatures, torch.tensor([5, 5]), two, torch.zeros_like(two))
    assert again[0] == tokens[0] and again[1] == logits.argmax()


@without_gpu
def test_greedy_tokens_are_those_without_drafts(served: Served) -> None:
    asked = requests_for([[5, 6, 7, 8] * 4, *prompts(3)])
    sampling = Sampling(0.0, 1.0, -1, 40, ())
    completions = served.engine.generate(asked, sampling)
    record = served.engine.record
    assert tokens_of(completions) == [greedy_tokens(served.models[0], list(r.prompt_token_ids), 40) for r in asked]
    assert record.steps < 40 and 0 < record.accepted_tokens < record.drafted_tokens <= 3 * record.verifications


@without_gpu
@pytest.mark.parametrize("top_k", [-1, 20])
def test_samples_and_their_logprobs_are_those_without_drafts(served: Served, top_k: int) -> None:
    asked = [Request(row, [5, 6, 7, 8] * 4, 70 + row, 0) for row in range(8)]
    sampling = Sampling(0.15, 1.0, top_k, 40, ())
    with_drafts = served.engine.generate(asked, sampling)
    assert served.engine.record.accepted_tokens > 15
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(internals.model_runner(served.engine._engine).drafter, "_max_running", 7)
        without = served.engine.generate(asked, sampling)
        assert served.engine.record.drafted_tokens == 0, "more run than are to be drafted for"
    assert tokens_of(with_drafts) == tokens_of(without)
    for completion in with_drafts if top_k < 0 else ():
        expected = row_logprobs(served.models[0], list(asked[0].prompt_token_ids), completion.token_ids, 0.15)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected.detach(), atol=1e-4, rtol=0)


@without_gpu
@torch.no_grad()
def test_drafted_tokens_have_the_distribution_of_transformers(served: Served) -> None:
    prompt, count, temperature = [5, 6, 7, 8] * 4, 1500, 0.15
    served.engine.reset_prefix_cache()
    sampled = served.engine.generate(
        [Request(row, prompt, row, row) for row in range(count)], Sampling(temperature, 1.0, -1, 2, ())
    )
    assert served.engine.record.accepted_tokens > 20
    tokens = torch.tensor(tokens_of(sampled))
    first = (served.models[0](torch.tensor([prompt])).logits[0, -1] / temperature).softmax(-1)
    rows = torch.tensor([[*prompt, token] for token in range(VOCABULARY)])
    second = (served.models[0](rows).logits[:, -1] / temperature).softmax(-1)
    assert chi_square_z(tokens[:, 0], first) < 4
    assert chi_square_z(tokens[:, 1], first @ second) < 4


@without_gpu
def test_text_of_the_epoch_before_is_forgotten_where_a_run_is_to_repeat(served: Served) -> None:
    asked = [Request(row, prompts(1)[0], row, 0) for row in range(4)]
    lengths = {}
    for name in ("first", "second", "after a checkpoint"):
        if name == "after a checkpoint":
            served.engine.drop_paused()
        served.engine.generate(asked, dataclasses.replace(SAMPLED, temperature=0.2))
        lengths[name] = served.engine.record.accepted_tokens
    assert lengths["second"] > lengths["first"] == lengths["after a checkpoint"]


@without_gpu
def test_benchmarks_accept_as_many_drafts_as_they_ask_for(served: Served) -> None:
    sampler = served.engine._speculation
    drafter = internals.model_runner(served.engine._engine).drafter
    asked = [Request(row, prompts(1)[0], row, 0) for row in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "_pads", True)
        for wanted in (1.0, 2.0, 2.5):
            patch.setattr(sampler, "_synthetic_length", wanted)
            served.engine.generate(asked, dataclasses.replace(SAMPLED, max_tokens=40))
            record = served.engine.record
            assert 1 + record.accepted_tokens / record.verifications == pytest.approx(wanted, abs=0.1)
            assert record.drafted_tokens == 3 * record.verifications


def test_settings_of_drafts_without_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"synthetic_acceptance_length=4.5: .* num_speculative_tokens \+ 1 = 4"):
        RolloutSection.model_validate({"max_response_length": 4, "speculative": {"synthetic_acceptance_length": 4.5}})
