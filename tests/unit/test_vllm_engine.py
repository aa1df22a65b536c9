"""What is vLLM's own: parameters, refusals, and what it does to the process; the rest is in test_engine_contract.py.

One engine serves all tests of the file.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hugging_face import make_model
from rlhf_megatron.compat.vllm import block_allocation, internals, model_inspection, model_runner, steady_steps
from rlhf_megatron.errors import RolloutError, is_transient
from rlhf_megatron.recipe import RolloutSection
from rlhf_megatron.rollout.engine import Completion, Request, Sampling
from rlhf_megatron.rollout.vllm.process_environment import prepare_environment
from rlhf_megatron.rollout.vllm.refusals import refusal_of
from rlhf_megatron.rollout.vllm.vllm_engine import VllmEngine
from served_model import SAMPLED, Served, prompts, requests_for, tokens_of


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if torch.cuda.is_available():
        pytest.skip("float32 on vLLM's CPU kernels; here vLLM would take the GPU")
    prepare_environment()
    serving = Served(tmp_path_factory.mktemp("models"))
    serving.serve(0, version=1)
    yield serving
    serving.engine.close()


def test_making_an_engine_leaves_the_process_as_it_was(served: Served) -> None:
    assert served.after == served.before
    assert torch.set_num_threads is served.set_num_threads


def test_parameters_are_the_fused_ones_with_tied_embeddings_once(served: Served) -> None:
    names = served.engine.parameters()
    assert "lm_head.weight" not in names
    assert len(names) == 2 + 4 * 8
    assert names["model.layers.0.self_attn.qkv_proj.weight"].shape == ((4 + 2 + 2) * 32, 64)
    assert all(parameter.numel() for parameter in names.values())


def test_more_prompts_than_a_step_takes(served: Served) -> None:
    asked = requests_for(prompts(4, length=40))
    together = tokens_of(served.engine.generate(asked, SAMPLED))
    assert together == [tokens_of(served.engine.generate([request], SAMPLED))[0] for request in asked]


def test_the_same_is_sampled_from_the_same_blocks_where_all_steps_are_vllms_own(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests_for(prompts(9, length=26))  # of a block of 32 tokens: its end comes while they sample
    found, blocks = generate_by_steps(served, asked, monkeypatch)
    monkeypatch.setattr(block_allocation, "only_where_needed", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(steady_steps, "taken_at_once", lambda *_: contextlib.nullcontext())
    of_vllm, blocks_of_vllm = generate_by_steps(served, asked, monkeypatch)
    assert found == of_vllm
    assert blocks == blocks_of_vllm
    assert {len(table) for tables, _ in blocks for table in tables} == {1, 2}


def generate_by_steps(
    served: Served, asked: list[Request], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Completion], list[tuple[list[list[int]], int]]]:
    """Return completions, and each step's tables of blocks, by their places among the free, and how many are free."""
    served.engine.drop_paused()  # nothing of an earlier call is in the cache
    core = served.engine._core
    manager = internals.scheduler(served.engine._engine).kv_cache_manager
    pool, [kind] = manager.block_pool, manager.coordinator.single_type_managers
    places = {block.block_id: place for place, block in enumerate(pool.free_block_queue.get_all_free_blocks())}
    steps, step = [], core.step

    def recorded() -> Any:
        outputs = step()
        tables = [[places[block.block_id] for block in row] for row in kind.req_to_blocks.values()]
        steps.append((tables, pool.get_num_free_blocks()))
        return outputs

    with monkeypatch.context() as patch:
        patch.setattr(core, "step", recorded)
        return served.engine.generate(asked, SAMPLED), steps


def test_a_moved_parameter_is_named(served: Served) -> None:
    served.engine.pointer_check()
    name = "model.layers.1.mlp.down_proj.weight"
    parameter = dict(internals.model(served.engine._engine).named_parameters())[name]
    storage = parameter.data
    parameter.data = storage.clone()
    with pytest.raises(RuntimeError, match=name):
        served.engine.weights_updated(3)
    parameter.data = storage
    served.engine.pointer_check()


def test_models_are_inspected_in_this_process(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.models import registry

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a process was started")

    model_inspection.inspect_models_in_this_process()
    monkeypatch.setattr(subprocess, "run", refuse)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))  # nothing is known of any class
    path = "vllm.model_executor.models.llama"
    seen = registry._LazyRegisteredModel(module_name=path, class_name="LlamaForCausalLM").inspect_model_cls()
    assert seen.is_text_generation_model and not seen.is_hybrid


@pytest.mark.parametrize("has_rule", [True, False])
def test_mixtures_that_generate_take_the_newer_runner(
    served: Served, has_rule: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import VllmConfig

    name = "_is_default_v2_model_runner_model"
    if not has_rule:  # later versions choose by features
        monkeypatch.delattr(VllmConfig, name, raising=False)
        model_runner.take_newer_runner.apply()
        assert not hasattr(VllmConfig, name)
        return
    monkeypatch.setattr(VllmConfig, name, lambda config: config.model_config.dense, raising=False)  # as in 0.25
    model_runner.take_newer_runner.apply()

    def takes_newer(dense: bool, **fields: Any) -> bool:
        usual = {"is_moe": not dense, "runner_type": "generate", "is_hybrid": False, "is_attention_free": False}
        model = types.SimpleNamespace(dense=dense, **(usual | fields))
        return getattr(VllmConfig, name)(types.SimpleNamespace(model_config=model))

    assert takes_newer(dense=True) and takes_newer(dense=False)
    assert not takes_newer(dense=False, is_hybrid=True)
    assert not takes_newer(dense=False, runner_type="pooling")


@pytest.mark.parametrize(
    ("tokens", "sampling", "message"),
    [
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
            RolloutSection(max_response_length=4, max_num_seqs=1, max_num_batched_tokens=4),
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
    assert refusal_of(RuntimeError("something that nobody knows"), 99) is None


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
