"""Rollout in 8 bits on a GPU: a layer against the formula, an engine that is compiled and captured in CUDA graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.ranks import run_ranks
from parallel.test_fp8_rollout import (
    FAMILIES,
    UPDATES,
    WAYS,
    answers,
    cached_in_8_bits,
    differences,
    make_models,
    rounded,
)
from rlhf_megatron.rollout.vllm.process_environment import prepare_environment


@pytest.mark.parametrize("rows", [768, 40], ids=["multiple of 16", "not"])
def test_a_layer_is_the_product_of_what_is_left_of_both(rows: int) -> None:
    prepare_environment()
    from rlhf_megatron.compat.vllm import fp8_linear

    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(size, generator=generator).bfloat16() for size in ((3, 100, 512), (rows, 512), rows))
    layer: Any = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight.cuda(), requires_grad=False)
    fp8_linear.add_room(layer)
    # vLLM's constructor asks for an engine's settings.
    method = fp8_linear.Fp8LinearMethod.__new__(fp8_linear.Fp8LinearMethod)
    method.process_weights_after_loading(layer)
    for given in (bias, None):
        expected = rounded(x.float().view(-1, 512)) @ rounded(weight.float()).t() + (0 if given is None else given)
        found = method.apply(layer, x.cuda(), None if given is None else given.cuda())
        assert found.shape == (3, 100, rows) and found.dtype == torch.bfloat16
        difference = (found.cpu().float().view(-1, rows) - expected).abs()
        # bfloat16 keeps 8 bits. The kernel multiplies by 1 / scale, so that a number half-way between two of e4m3 may
        # fall to the other side.
        assert difference.max() < 0.02 * expected.abs().max()
        assert difference.median() < 0.004 * expected.abs().mean()


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_follows_the_weights(family: str, tmp_path: Path) -> None:
    models = make_models(tmp_path, family)
    # Both engines are awake all the time: asleep, they would share one allocator and each other's fate.
    rollout = {"kv_cache_gb": 1.0, "sleep": False}
    arguments: dict[str, Any] = {"models": [str(model) for model in models], "dtype": "bfloat16"}
    found: dict[str, Any] = run_ranks(answers, 1, arguments | rollout, timeout=300)[0]
    assert found["shared"]
    for way in WAYS:
        for update in range(UPDATES):
            of_full = differences(models[update], found[way][update])[1]
            print(f"{family}, {way}: median difference {of_full.median():.1e} from the model in full")
            # A tiny model with random weights: with those of another model it would be above 1.
            assert 1e-3 < of_full.median() < 0.2


def to_nearest(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float8_e4m3fn).to(values.dtype)


def test_keys_and_values_in_8_bits_outlive_sleep(tmp_path: Path) -> None:
    models = make_models(tmp_path, "qwen3")
    rollout = {"kv_cache_gb": 1.0, "quantization": None, "kv_cache_dtype": "fp8", "sleeps": True}
    arguments: dict[str, Any] = {"models": [str(model) for model in models], "dtype": "bfloat16", "ways": ["copies"]}
    found: dict[str, Any] = run_ranks(answers, 1, arguments | rollout, timeout=300)[0]
    for model, answered in zip(models, found["copies"], strict=True):
        of_rounded, of_full = differences(model, answered, lambda folder: cached_in_8_bits(folder, to_nearest))
        print(f"median differences {of_rounded.median():.1e} from the rounded model, {of_full.median():.1e} in full")
        # Queries are rounded too, and bfloat16 is not float32. With other weights it would be above 1.
        assert of_rounded.median() < 0.1
        assert 1e-3 < of_full.median() < 0.2
