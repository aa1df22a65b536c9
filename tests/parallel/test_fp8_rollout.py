"""Rollout in 8 bits against transformers with every linear layer and expert quantized by the formula."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hugging_face import load_model, make_model, random_rows, row_logprobs
from parallel.ranks import run_ranks
from rlhf_megatron.errors import RolloutError
from rounded_numbers import rounded, rounded_blocks

# Without and with biases, also of experts. vLLM's Qwen2 takes the size of a head from the hidden size; GPT-OSS has the
# limit that vLLM has, and widths that its kernels for CPUs take.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {"hidden_size": 128},
    "qwen3_moe": {},
    "gpt_oss": {"swiglu_limit": 7.0, "intermediate_size": 128},
}
MIXTURES = ("qwen3_moe", "gpt_oss")
WAYS = ("copies", "views")
UPDATES = 2


def answers(
    models: list[str],
    dtype: str = "float32",
    quantization: str | None = "fp8",
    ways: Sequence[str] = WAYS,
    sleeps: bool = False,
    **rollout: Any,
) -> dict[str, Any]:
    """Return greedy answers with the weights of one model after the other, by a fresh engine for each way; between
    two models it ``sleeps``. Collective over the tensor-parallel ranks of one replica."""
    from rlhf_megatron.rollout.vllm.process_environment import prepare_environment

    prepare_environment()
    from rlhf_megatron.compat.vllm import internals
    from rlhf_megatron.models.architecture import read_architecture
    from rlhf_megatron.models.hf_files import CheckpointFiles
    from rlhf_megatron.models.weight_map import rollout_blocks
    from rlhf_megatron.models.weight_source import load_blocks
    from rlhf_megatron.recipe import RolloutSection
    from rlhf_megatron.regather.learned_rollout import learned_rollout_blocks
    from rlhf_megatron.rollout.engine import Request, Sampling
    from rlhf_megatron.rollout.vllm import engine_start
    from rlhf_megatron.rollout.vllm.vllm_engine import VllmEngine

    architecture, rank = read_architecture(models[0]), dist.get_rank()
    section = RolloutSection(max_response_length=16, max_num_seqs=8, quantization=quantization, **rollout)
    tensor, whole = section.layout.tensor, section.layout.expert_parallel
    learned = learned_rollout_blocks(
        architecture, models[0], range(tensor), tensor, whole, dtype, Path(models[0]).parent
    )
    blocks = learned[rank] if learned else rollout_blocks(architecture, tensor, rank, whole)
    requests = [Request(row, prompt, 1) for row, prompt in enumerate(random_rows(16, 250, seed=3)[0])]
    found: dict[str, Any] = {}
    engines = []
    own: dict[str, Tensor] = {}
    for way in ways:
        engine = VllmEngine(models[0], section, dtype, 16, seed=1, shared=own if way == "views" else None)
        engines.append(engine)  # one that is collected takes torch.distributed with it
        module = internals.model(engine._engine)
        places = {name: each.data_ptr() for name, each in module.named_parameters()}
        found[way] = []
        for version, model in enumerate(models):
            with CheckpointFiles(model, architecture) as files:
                load_blocks(blocks, engine.parameters(), files)
            engine.weights_updated(version)
            completions = engine.generate(requests, Sampling(0.0, 1.0, -1, 12, ()))
            found[way].append([(completion.token_ids, completion.logprobs) for completion in completions])
            if sleeps:
                engine.sleep()
                engine.wake_weights()
                engine.wake_kv_cache()
        parameters = dict(module.named_parameters())
        found[f"{way} stay"] = places == {name: each.data_ptr() for name, each in parameters.items()}
        of_experts = [each for name, each in parameters.items() if ".quantized_w" in name and each.dim() == 3]
        found["quantized stacks"] = len(of_experts)
        with warnings.catch_warnings(record=True, action="always") as caught:  # tests have them off
            engine_start.tell_of_experts_in_full(module)
        found["told"] = [str(warning.message) for warning in caught]
        if way == "copies":
            own = {name: tensor.clone() for name, tensor in engine.parameters().items()}
        else:
            found["shared"] = all(engine.parameters()[name].data_ptr() == own[name].data_ptr() for name in own)
    return found


def quantized_model(folder: Path, tensor: int = 1, expert_parallel: bool = False) -> Any:
    """Return the folder's model, whose linear layers and experts round their weights and what they are given, as
    ``tensor`` ranks would; not the output layer and routers."""
    model = load_model(folder)
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            parts = tensor if name.endswith(("o_proj", "down_proj")) else 1
            layer.weight.data = rounded(layer.weight.data, parts)
            layer.register_forward_pre_hook(lambda _, given, parts=parts: (rounded(given[0][0], parts)[None],))
        elif hasattr(layer, "gate_up_proj") and hasattr(layer, "down_proj"):
            layer.forward = functools.partial(rounding_experts, layer, 1 if expert_parallel else tensor)
    return model


def rounding_experts(experts: Any, parts: int, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Return what experts of transformers' do [tokens, hidden], with both products of rounded numbers."""

    def multiply(name: str, values: Tensor, expert: int, of: int) -> Tensor:
        weight = getattr(experts, name)[expert]
        bias = getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None
        return linear(rounded(values, of), rounded(weight.t() if experts.is_transposed else weight, of), bias)

    result = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        inside = experts._apply_gate(multiply("gate_up_proj", x[tokens], expert, 1))
        outside = multiply("down_proj", inside, expert, parts)
        result.index_add_(0, tokens, outside * shares[tokens, places, None])
    return result


def make_models(home: Path, family: str, **sizes: int) -> list[Path]:
    """Return the models whose weights follow each other, of these ``sizes`` or the family's."""
    folders = [home / f"{family}-{update}" for update in range(UPDATES)]
    sizes = sizes or FAMILIES[family]
    return [make_model(each, family, tied=False, seed=seed, **sizes) for seed, each in enumerate(folders)]


def differences(
    folder: Path, answered: list[Any], quantized_by: Callable[[Path], Any] = quantized_model
) -> tuple[Tensor, Tensor]:
    """Return differences of the answers' logprobs from those of the folder's model, quantized and in full."""
    prompts = random_rows(16, 250, seed=3)[0]
    of_rollout = torch.tensor([value for _, logprobs in answered for value in logprobs])
    with torch.no_grad():
        quantized, in_full = (
            torch.cat([row_logprobs(model, p, tokens) for p, (tokens, _) in zip(prompts, answered, strict=True)])
            for model in (quantized_by(folder), load_model(folder))
        )
    return (of_rollout - quantized).abs(), (of_rollout - in_full).abs()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fp8")


@pytest.fixture(scope="module")
def results(home: Path) -> dict[str, dict[str, Any]]:
    models = {family: [str(model) for model in make_models(home, family)] for family in FAMILIES}
    return {family: run_ranks(answers, 1, {"models": models[family]})[0] for family in FAMILIES}


@pytest.mark.parametrize("update", range(UPDATES))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_the_quantized_model(
    family: str, way: str, update: int, home: Path, results: dict[str, dict[str, Any]]
) -> None:
    assert results[family]["shared"] and results[family][f"{way} stay"]
    assert results[family]["quantized stacks"] == (8 if family in MIXTURES else 0), "two of each layer"
    check(home / f"{family}-{update}", results[family][way][update], quantized_model)


def check(folder: Path, answered: list[Any], quantized_by: Callable[[Path], Any], largest: float = 0.1) -> None:
    of_quantized, of_full = differences(folder, answered, quantized_by)
    # A number half-way between two of e4m3 falls to either side by rounding in float32, which costs a sixteenth of it.
    assert of_quantized.median() < 1e-4
    assert of_quantized.max() < largest
    assert of_full.median() > 10 * of_quantized.median(), "8 bits do differ"


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["TP2", "EP2"])
def test_ranks_quantize_what_they_hold(expert_parallel: bool, home: Path) -> None:
    models = make_models(home, "qwen3_moe")
    layout = {"tensor": 2, "expert_parallel": expert_parallel}
    arguments = {"models": [str(model) for model in models], "layout": layout, "ways": ["copies"]}
    for found in run_ranks(answers, 2, arguments):
        assert found["told"] == []
        assert found["copies stay"] and found["quantized stacks"] == 8
        for model, answered in zip(models, found["copies"], strict=True):
            check(model, answered, functools.partial(quantized_model, **layout))


def test_experts_that_stay_in_full_are_told_of(tmp_path: Path) -> None:
    """By the one way that there is on CPUs to have them: a model that is not quantized."""
    model = make_model(tmp_path / "model", "qwen3_moe", tied=False)
    found = run_ranks(answers, 1, {"models": [str(model)], "quantization": None, "ways": ["copies"]})[0]
    [line] = found["told"]
    assert line.startswith("rollout.quantization: the experts of 4 layers stay as they are: vLLM's model does not")
    assert found["quantized stacks"] == 0


# Linear layers of whole blocks also on each of two ranks.
OF_BLOCKS: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 4
}  # fmt: skip


def model_of_rounded_blocks(folder: Path) -> Any:
    """Return the folder's model, whose linear layers round blocks of 128 x 128 weights and 128 activations of a
    token."""
    model = load_model(folder)
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            layer.weight.data = rounded_blocks(layer.weight.data)
            layer.register_forward_pre_hook(lambda _, given: (rounded(given[0][0], given[0].shape[2] // 128)[None],))
    return model


@pytest.mark.parametrize("tensor", [1, 2])
def test_blocks_are_those_of_the_model_in_any_layout(tensor: int, tmp_path: Path) -> None:
    """Qwen2's have biases, which the kernel for blocks does not add."""
    models = make_models(tmp_path, "qwen2" if tensor == 1 else "qwen3", **OF_BLOCKS)
    arguments = {"models": [str(model) for model in models], "quantization": "fp8_blockwise"}
    for found in run_ranks(answers, tensor, arguments | {"layout": {"tensor": tensor}}):
        assert found["shared"] and all(found[f"{way} stay"] for way in WAYS)
        for way in WAYS:
            for model, answered in zip(models, found[way], strict=True):
                check(model, answered, model_of_rounded_blocks, largest=0.3)  # wider: more such numbers


def quantized_layer(weight: Tensor, kind: str, block: tuple[int, int] | None = None) -> tuple[Any, Any]:
    """Return (layer, method of this class) with a quantized copy of a weight."""
    from rlhf_megatron.compat.vllm import fp8_linear

    layer: Any = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    fp8_linear.add_room(layer, block=block)
    of_kind = getattr(fp8_linear, kind)
    method = of_kind.__new__(of_kind)  # vLLM's constructor asks for an engine's settings
    method.process_weights_after_loading(layer)
    return layer, method


def compiled_products() -> float:
    """Return how far a product by blocks is from itself once compiled for any number of tokens, as vLLM compiles."""
    from rlhf_megatron.rollout.vllm.process_environment import prepare_environment

    prepare_environment()
    os.environ["TORCHDYNAMO_DISABLE"] = "0"  # it is off on CPUs
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(256, 256, generator=generator)
    layer, method = quantized_layer(weight, "Fp8BlockwiseLinearMethod", block=(128, 128))
    compiled = torch.compile(functools.partial(method.apply, layer), fullgraph=True, backend="aot_eager")
    apart = []
    for tokens in (40, 41):
        x, bias = torch.randn(tokens, 256, generator=generator), torch.randn(256, generator=generator)
        torch._dynamo.mark_dynamic(x, 0)
        with torch.compiler.set_stance("fail_on_recompile" if apart else "default"):
            apart.append(float((compiled(x, bias) - method.apply(layer, x, bias)).abs().max()))
    return max(apart)


def test_blocks_are_compiled_once_for_any_number_of_tokens() -> None:
    assert run_ranks(compiled_products, 1, {}) == [0.0]


def refused(model: str) -> str:
    try:
        answers([model], quantization="fp8_blockwise")
    except RolloutError as error:
        return str(error)
    return ""


def test_weights_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3", tied=False)
    (line,) = run_ranks(refused, 1, {"model": str(model)})
    assert line.startswith("rollout.quantization=fp8_blockwise: a rank has ") and line.endswith(
        "; use fp8, or a smaller rollout.layout.tensor"
    )


def toward_zero(values: Tensor) -> Tensor:
    """Return what e4m3 leaves of them, by vLLM's kernel for CPUs."""
    nearest = values.to(torch.float8_e4m3fn)
    below = (nearest.view(torch.uint8) - 1).view(torch.float8_e4m3fn)
    back, smaller = nearest.to(values.dtype), below.to(values.dtype)
    return torch.where(back.abs() > values.abs(), smaller, back)


def cached_in_8_bits(folder: Path, rounding: Callable[[Tensor], Tensor] = toward_zero) -> Any:
    """Return the folder's model, whose attention reads keys and values as e4m3 leaves them."""

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *given: Any, **named: Any) -> Any:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, rounding(key), rounding(value), *given, **named)

    AttentionInterface.register("rounded_cache", attention)
    AttentionMaskInterface.register("rounded_cache", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model = load_model(folder)
    model.set_attn_implementation("rounded_cache")
    return model


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM's cache in 8 bits on CPUs needs AVX-512")
def test_logprobs_are_those_of_keys_and_values_in_8_bits(tmp_path: Path) -> None:
    models = make_models(tmp_path, "qwen3")
    given = {"models": [str(model) for model in models], "quantization": None, "kv_cache_dtype": "fp8"}
    found: dict[str, Any] = run_ranks(answers, 1, given)[0]
    assert found["shared"]
    for way in WAYS:
        for model, answered in zip(models, found[way], strict=True):
            of_rounded, of_full = differences(model, answered, cached_in_8_bits)
            assert of_rounded.median() < 1e-6
            assert of_rounded.max() < 0.01, "where rounding in float32 takes a number past one of e4m3"
            assert of_full.median() > 0.01, "8 bits do differ"
