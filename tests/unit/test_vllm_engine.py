"""The in-process vLLM engine against transformers: tokens, logprobs, seeds, in-place weights, and its good manners.

One engine serves all tests of the file. Weights are fused here by hand, without the library's weight map.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from hugging_face import load_model, make_model, row_logprobs
from rlhf_megatron.errors import is_transient
from rlhf_megatron.recipe import RolloutSection
from rlhf_megatron.rollout.engine import Completion, Request, RolloutError, Sampling
from rlhf_megatron.rollout.vllm.process_environment import prepare_environment
from rlhf_megatron.rollout.vllm.vllm_engine import VllmEngine, refusal_of

VOCABULARY = 250
MAX_PROMPT, MAX_RESPONSE = 80, 16
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=12, stop_token_ids=())
SAMPLED = Sampling(temperature=0.7, top_p=1.0, top_k=-1, max_tokens=12, stop_token_ids=())


class Served:
    """The engine, the two models whose weights it serves in turn, and what making it did to the process."""

    def __init__(self, folder: Path) -> None:
        self.folders = [make_model(folder / name, "qwen3", seed=seed) for seed, name in enumerate(("first", "second"))]
        # A generation_config.json in which every token ends a text: only Sampling's stop tokens may count.
        for path in self.folders:
            (path / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(VOCABULARY))}))
        self.models = [load_model(path) for path in self.folders]
        # Two prompts of 40 tokens are as many as one step takes.
        longest = MAX_PROMPT + MAX_RESPONSE
        section = RolloutSection(max_response_length=MAX_RESPONSE, max_num_seqs=4, max_num_batched_tokens=longest)
        torch.manual_seed(11)
        self.set_num_threads = torch.set_num_threads
        self.before = process_state()
        self.engine = VllmEngine(str(self.folders[0]), section, "float32", MAX_PROMPT, seed=5)
        self.after = process_state()

    def serve(self, model: int, version: int) -> None:
        """Writes a model's weights in place and says so."""
        write_fused(self.models[model].state_dict(), self.engine.parameters())
        self.engine.weights_updated(version)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if torch.cuda.is_available():
        pytest.skip("float32 on vLLM's CPU kernels; here vLLM would take the GPU")
    prepare_environment()
    serving = Served(tmp_path_factory.mktemp("models"))
    serving.serve(0, version=1)
    yield serving
    serving.engine.close()


def process_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state()[1].tolist(),
        "torch": torch.get_rng_state().tolist(),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "affinity": os.sched_getaffinity(0),
    }


def write_fused(weights: dict[str, Tensor], parameters: dict[str, Tensor]) -> None:
    """transformers' tensors into vLLM's: q, k, v and gate, up stacked; rows of a padded vocabulary left alone."""
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    for name, parameter in parameters.items():
        fused = next((kind for kind in parts if kind in name), None)
        pieces = [weights[name.replace(fused, part)] for part in parts[fused]] if fused else [weights[name]]
        value = torch.cat(pieces)
        assert parameter[: len(value)].shape == value.shape
        assert len(parameter) == len(value) or "embed_tokens" in name
        parameter[: len(value)].copy_(value)


def prompts(count: int, length: int = 9) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, VOCABULARY, (length + i % 3,), generator=generator).tolist() for i in range(count)]


def requests_for(token_lists: Sequence[list[int]], first_seed: int = 100) -> list[Request]:
    return [Request(1000 + i, tokens, first_seed + i) for i, tokens in enumerate(token_lists)]


def greedy_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def tokens_of(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def test_making_an_engine_leaves_the_process_as_it_was(served: Served) -> None:
    assert served.after == served.before
    assert torch.set_num_threads is served.set_num_threads


def test_parameters_are_the_fused_ones_with_tied_embeddings_once(served: Served) -> None:
    names = served.engine.parameters()
    assert "lm_head.weight" not in names
    assert len(names) == 2 + 4 * 8
    assert names["model.layers.0.self_attn.qkv_proj.weight"].shape == ((4 + 2 + 2) * 32, 64)
    assert all(parameter.numel() for parameter in names.values())


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


def test_more_prompts_than_a_step_takes(served: Served) -> None:
    asked = requests_for(prompts(4, length=40))
    together = tokens_of(served.engine.generate(asked, SAMPLED))
    assert together == [tokens_of(served.engine.generate([request], SAMPLED))[0] for request in asked]


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


def test_a_moved_parameter_is_named(served: Served) -> None:
    served.engine.pointer_check()
    name = "model.layers.1.mlp.down_proj.weight"
    parameter = dict(served.engine._model().named_parameters())[name]
    storage = parameter.data
    parameter.data = storage.clone()
    with pytest.raises(RuntimeError, match=name):
        served.engine.weights_updated(3)
    parameter.data = storage
    served.engine.pointer_check()


def test_sleeping_keeps_the_weights_on_a_cpu_but_asks_for_an_update(served: Served) -> None:
    asked = requests_for(prompts(2))
    awake = served.engine.generate(asked, GREEDY)
    served.engine.sleep()
    served.engine.wake_weights()
    served.engine.wake_kv_cache()
    with pytest.raises(RuntimeError, match="call weights_updated first"):
        served.engine.generate(asked, GREEDY)
    served.engine.weights_updated(awake[0].weight_version)
    assert served.engine.generate(asked, GREEDY) == awake


def test_an_error_on_the_way_leaves_no_requests_behind(served: Served) -> None:
    def give_up(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        served.engine.generate(requests_for(prompts(9)), SAMPLED, give_up)
    served.engine.weights_updated(1)  # refuses while requests run
    assert len(served.engine.generate(requests_for(prompts(2)), SAMPLED)) == 2


@pytest.mark.parametrize(
    ("tokens", "sampling", "message"),
    [
        ([2] * 85, GREEDY, "row 1000: 85 prompt tokens and 12 new ones exceed the engine's 96"),
        ([], GREEDY, "row 1000: the prompt has no tokens"),
        ([3, VOCABULARY], GREEDY, "row 1000: token 250 or 3 is outside the model's vocabulary of 250"),
        ([3, -1], GREEDY, "row 1000: token 3 or -1 is outside the model's vocabulary of 250"),
        ([3], Sampling(0.001, 1.0, -1, 4, ()), "temperature 0.001 is below vLLM's lowest, 0.01"),
    ],
)
def test_what_cannot_be_generated_is_refused_in_one_line(
    served: Served, tokens: list[int], sampling: Sampling, message: str
) -> None:
    with pytest.raises(RolloutError, match=message) as caught:
        served.engine.generate([Request(1000, tokens, 1)], sampling)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: config.pop("architectures"), '"architectures" is missing'),
        (lambda config: config.pop("vocab_size"), "vocab_size is missing"),
        (lambda config: config.update(vocab_size="8"), "configs that transformers refuses"),
        (lambda config: config.update(architectures=["Qwen3ForSequenceClassification"]), "generates nothing"),
        (lambda config: config.update(num_hidden_layers=10**9), "num_hidden_layers is 1000000000; at most"),
        (lambda config: config.update(to_dict=1), "configs that transformers refuses"),
        (lambda config: config.update(torch_dtype="bf16"), "configs that transformers refuses"),
    ],
)
def test_a_config_that_vllm_would_misread_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 8} | sizes
    change(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RolloutError, match=message):
        VllmEngine(str(tmp_path), RolloutSection(max_response_length=4), "float32", 4, seed=1)


@pytest.mark.parametrize("content", ["[]", "[" * 10**5, ""])
def test_a_generation_config_that_cannot_be_read_is_refused(tmp_path: Path, content: str) -> None:
    make_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(RolloutError) as caught:
        VllmEngine(str(tmp_path), RolloutSection(max_response_length=4), "float32", 4, seed=1)
    assert str(caught.value).isprintable()


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match=r"config.json: .*model.path must be a folder in Hugging Face format"):
        VllmEngine(str(tmp_path), RolloutSection(max_response_length=4), "float32", 4, seed=1)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            RolloutSection(max_response_length=4, max_num_seqs=8, max_num_batched_tokens=4),
            "rollout: vLLM refuses these settings: .*max_num_batched_tokens",
        ),
        (
            RolloutSection(max_response_length=300),
            "data.max_prompt_length and rollout.max_response_length add up to 304 tokens, more than",
        ),
    ],
)
def test_settings_that_vllm_refuses_are_told_in_one_line(tmp_path: Path, section: RolloutSection, message: str) -> None:
    make_model(tmp_path)
    with pytest.raises(RolloutError, match=message) as caught:
        VllmEngine(str(tmp_path), section, "float32", 4, seed=1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "line", "may_pass"),
    [
        (
            AssertionError(
                "Error in memory profiling. Initial free memory 70.1 GiB, current free memory 75.2 GiB. This happens "
                "when other processes sharing the same container release GPU memory while vLLM is profiling."
            ),
            "rollout: another process has given memory of this GPU back while vLLM measured what is free; ",
            True,
        ),
        (
            ValueError(
                "Free memory on device cuda:0 (10.1/79.1 GiB) on startup is less than desired GPU memory utilization "
                "(0.5, 39.5 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
            ),
            "rollout: another process has taken memory that vLLM was to have (Free memory on device cuda:0 (10.1/",
            True,
        ),
        (
            ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"),
            "the KV cache would not hold one sequence of 99 tokens; raise rollout.kv_cache_gb or ",
            False,
        ),
    ],
)
def test_memory_that_is_not_there_when_the_engine_starts_is_told_in_one_line(
    error: ValueError | AssertionError, line: str, may_pass: bool
) -> None:
    """The texts are those of vllm/v1/worker/gpu_worker.py, v1/worker/utils.py and v1/core/kv_cache_utils.py."""
    refusal = refusal_of(error, 99)
    assert str(refusal).startswith(line) and "\n" not in str(refusal)
    assert refusal is not None and is_transient(refusal) is may_pass
    assert refusal_of(AssertionError("something that nobody knows"), 99) is None


def test_the_environment_is_prepared_without_torch_and_keeps_what_the_user_set() -> None:
    code = (
        "import json, os, sys\n"
        "from rlhf_megatron.rollout.vllm.process_environment import prepare_environment\n"
        "prepare_environment()\n"
        "print(json.dumps([sorted({'torch', 'vllm'} & set(sys.modules)), dict(os.environ)]))"
    )
    environment = {
        "CUDA_VISIBLE_DEVICES": "",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_LOGGING_LEVEL": "DEBUG",
    }
    found = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    imported, variables = json.loads(found.stdout)
    assert imported == []
    assert "VLLM_CPU_KVCACHE_SPACE" not in variables
    expected = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    assert {name: variables.get(name) for name in expected} == expected
