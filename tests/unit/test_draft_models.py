"""Models that draft: an EAGLE-3 head changes no sample, and a layer for further tokens drafts what torch computes.

One engine with a head serves its tests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hugging_face import make_model, row_logprobs
from kept_drafts import keep_drafts
from parallel.ranks import run_ranks
from repeating_head import DRAFTED_TOKENS
from rlhf_megatron.compat.vllm import internals
from rlhf_megatron.compat.vllm.draft_models import KeptBuffers
from rlhf_megatron.errors import RolloutError
from rlhf_megatron.recipe import RolloutSection
from rlhf_megatron.rollout.engine import Request, Sampling
from rlhf_megatron.rollout.engine_registry import make_engine
from rlhf_megatron.rollout.vllm.engine_arguments import engine_arguments
from rlhf_megatron.rollout.vllm.process_environment import has_gpu, prepare_environment
from served_model import SAMPLED, VOCABULARY, Served, greedy_tokens, prompts, requests_for, tokens_of
from small_predictions import PredictionReference, make_predicting_model
from statistics_of_draws import chi_square_z

without_gpu = pytest.mark.skipif(has_gpu(), reason="float32 on vLLM's CPU kernels; here vLLM would take the GPU")
RUNNING = 64
# A prompt and a temperature of which the model repeats tokens often enough, and not always.
PROMPT, TEMPERATURE = [5, 6, 7, 8] * 4, 0.25


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    prepare_environment()
    serving = Served(
        tmp_path_factory.mktemp("models"),
        speculative={"method": "eagle3", "max_running": RUNNING},
        max_response_length=40,
        max_num_seqs=RUNNING,
        max_num_batched_tokens=1024,
        scheduling="static",
    )
    serving.serve(0, version=1)
    yield serving
    serving.engine.close()


@pytest.fixture
def proposals(served: Served) -> Any:
    return internals.model_runner(served.engine._engine).drafter.propose


@without_gpu
def test_a_head_has_its_own_output_layer_and_the_models_embeddings(served: Served) -> None:
    parameters, of_model = served.engine.draft_parameters(), served.engine.parameters()
    assert parameters["lm_head.weight"].shape == (256, 64), "padded"
    assert parameters["draft_id_to_target_id"].shape == (DRAFTED_TOKENS,)
    assert not [name for name in parameters if "embed_tokens" in name]
    assert not {each.data_ptr() for each in parameters.values()} & {each.data_ptr() for each in of_model.values()}
    served.engine.pointer_check()
    with pytest.MonkeyPatch.context() as patch:
        norm = internals.draft_model(served.engine._engine).model.norm.weight
        patch.setattr(norm, "data", norm.data.clone())
        with pytest.raises(RuntimeError, match=r"parameter draft model: model\.norm\.weight has moved"):
            served.engine.pointer_check()


@without_gpu
def test_greedy_tokens_are_those_of_transformers_up_to_the_longest_length(served: Served) -> None:
    asked = requests_for([PROMPT * 5, *prompts(3)])  # the first ends where the model's length does
    completions = served.engine.generate(asked, Sampling(0.0, 1.0, -1, 40, ()))
    record = served.engine.record
    assert tokens_of(completions) == [greedy_tokens(served.models[0], list(r.prompt_token_ids), 40) for r in asked]
    assert record.steps < 40 and 0 < record.accepted_tokens <= record.drafted_tokens <= 3 * record.verifications


@without_gpu
@pytest.mark.parametrize("top_k", [-1, 20])
def test_samples_and_their_logprobs_are_those_without_drafts(served: Served, proposals: Any, top_k: int) -> None:
    asked = [Request(row, PROMPT, 70 + row, 0) for row in range(8)]
    sampling = Sampling(TEMPERATURE, 1.0, top_k, 40, ())
    with_drafts = served.engine.generate(asked, sampling)
    record = served.engine.record
    assert 15 < record.accepted_tokens < record.drafted_tokens
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proposals, "max_running", 7)
        without = served.engine.generate(asked, sampling)
        assert served.engine.record.drafted_tokens == 0, "more run than are to be drafted for"
        patch.setattr(proposals, "max_running", 8)
        again = served.engine.generate(asked, sampling)
    assert tokens_of(with_drafts) == tokens_of(without) == tokens_of(again)
    assert served.engine.record.accepted_tokens == record.accepted_tokens
    for completion in with_drafts if top_k < 0 else ():
        expected = row_logprobs(served.models[0], PROMPT, completion.token_ids, TEMPERATURE)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected.detach(), atol=1e-4, rtol=0)


@without_gpu
@torch.no_grad()
def test_drafted_tokens_have_the_distribution_of_transformers(served: Served) -> None:
    count = 1500
    served.engine.reset_prefix_cache()
    sampled = served.engine.generate(
        [Request(row, PROMPT, row, row) for row in range(count)], Sampling(TEMPERATURE, 1.0, -1, 2, ())
    )
    assert served.engine.record.accepted_tokens > 20
    tokens = torch.tensor(tokens_of(sampled))
    first = (served.models[0](torch.tensor([PROMPT])).logits[0, -1] / TEMPERATURE).softmax(-1)
    rows = torch.tensor([[*PROMPT, token] for token in range(VOCABULARY)])
    second = (served.models[0](rows).logits[:, -1] / TEMPERATURE).softmax(-1)
    assert chi_square_z(tokens[:, 0], first) < 4
    assert chi_square_z(tokens[:, 1], first @ second) < 4


@without_gpu
def test_a_head_that_changes_changes_drafts_and_no_sample(served: Served) -> None:
    asked = [Request(row, PROMPT, 70 + row, 0) for row in range(8)]
    sampling = dataclasses.replace(SAMPLED, temperature=TEMPERATURE)
    before, right = tokens_of(served.engine.generate(asked, sampling)), served.engine.record.accepted_tokens
    served.engine.sleep()
    served.engine.wake_weights()
    served.engine.draft_parameters()["lm_head.weight"].neg_()
    served.engine.wake_kv_cache()
    served.engine.weights_updated(2)
    assert tokens_of(served.engine.generate(asked, sampling)) == before
    assert served.engine.record.accepted_tokens < right / 2
    served.serve(0, version=3)
    assert tokens_of(served.engine.generate(asked, sampling)) == before
    assert served.engine.record.accepted_tokens == right


@without_gpu
def test_buffers_of_a_head_outlive_a_sleep_that_drops_them(served: Served) -> None:
    head = internals.draft_model(served.engine._engine)
    before = {name: buffer.clone() for name, buffer in head.named_buffers()}
    assert any(buffer.any() for buffer in before.values())
    kept = KeptBuffers(head)
    for buffer in head.buffers():
        buffer.zero_()
    kept.restore()
    assert all(torch.equal(buffer, before[name]) for name, buffer in head.named_buffers())


@without_gpu
def test_benchmarks_accept_as_many_drafts_as_they_ask_for(served: Served) -> None:
    asked = [Request(row, prompts(1)[0], row, 0) for row in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        for wanted in (1.0, 2.0, 2.5):
            patch.setattr(served.engine._speculation, "_synthetic_length", wanted)
            served.engine.generate(asked, dataclasses.replace(SAMPLED, max_tokens=40))
            record = served.engine.record
            assert 1 + record.accepted_tokens / record.verifications == pytest.approx(wanted, abs=0.1)


def test_a_head_is_needed_and_stays_in_full_precision() -> None:
    section = RolloutSection.model_validate({"max_response_length": 4, "speculative": {"method": "eagle3"}})
    with pytest.raises(RolloutError, match=r"method=eagle3: heads draft in training alone"):
        engine_arguments(section, "float32", 0, 8, on_gpu=False)
    with pytest.raises(ValueError, match=r"speculative\.method=mtp: with quantization=fp8"):
        RolloutSection.model_validate(
            {"max_response_length": 4, "quantization": "fp8", "speculative": {"method": "mtp"}}
        )


@without_gpu
def test_a_model_without_a_layer_for_further_tokens_is_refused(tmp_path: Path) -> None:
    prepare_environment()
    section = RolloutSection.model_validate({"max_response_length": 4, "speculative": {"method": "mtp"}})
    with pytest.raises(
        RolloutError, match=r"^rollout\.speculative\.method: vLLM has no model that drafts for this one"
    ):
        make_engine(str(make_model(tmp_path)), section, "float32", 8, seed=1)


def drafts_of_layer(folder: str, recycles_normed: bool) -> dict[str, Any]:
    """Return what a layer of vLLM's has drafted in a generation, and torch of the same; run on a rank of its own."""
    settings = {"max_response_length": 16, "max_num_seqs": 6, "speculative": {"method": "mtp", "max_running": 3}}
    section = RolloutSection.model_validate(settings)
    engine = make_engine(folder, section, "float32", 40, seed=1, load_format="auto")
    engine.weights_updated(1)
    drafts = keep_drafts(internals.model_runner(engine._engine))  # type: ignore[attr-defined]
    # The first have no drafts, while six run; those after them are as of a layer that has seen all tokens.
    asked = [Request(row, [*PROMPT, 20 + row], 70 + row, row, max_tokens=4 if row < 3 else 16) for row in range(6)]
    completions = engine.generate(asked, Sampling(1.0, 1.0, -1, 16, ()))
    reference = PredictionReference(Path(folder), recycles_normed)
    return {
        "lengths": [len(completion.token_ids) for completion in completions],
        "drafted": [draft for _, draft in drafts],
        "expected": [reference.draft(tokens, 3) for tokens, _ in drafts],
        "names": sorted(engine.draft_parameters()),
    }


# Widths that vLLM's kernels of latent attention for CPUs take.
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}


@without_gpu
@pytest.mark.parametrize(
    ("family", "fields", "recycles_normed"), [("glm4_moe", {}, False), ("deepseek_v3", LATENT, True)]
)
def test_a_layer_drafts_what_torch_computes_of_it(
    family: str, fields: dict[str, int], recycles_normed: bool, tmp_path: Path
) -> None:
    folder = make_predicting_model(tmp_path, family, scale=0.3, copies=True, tied=False, **fields)
    [result] = run_ranks(drafts_of_layer, 1, {"folder": str(folder), "recycles_normed": recycles_normed})
    assert result["lengths"] == [4] * 3 + [16] * 3
    assert result["drafted"] == result["expected"]
    assert len({tuple(draft) for draft in result["drafted"]}) > 20
    assert all(name.startswith("model.layers.4.") for name in result["names"])
    assert "model.layers.4.eh_proj.weight" in result["names"]
    assert not [name for name in result["names"] if "shared_head.head" in name]
