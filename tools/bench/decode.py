"""A step of the engine while it decodes: milliseconds by number of sequences, beside what it must read, and by kernel.

    python tools/bench/decode.py [--model recipes/models/qwen2.5-7b] [--settings NAME ...] [--running 64 200 256]

Each setting has an engine in a process of its own, with random weights; sequences have prompts of their own, seeds and
logprobs, as in a run. Two generations that differ in their lengths alone give the time of a step, in turn with inputs
that are kept from step to step and with those that vLLM makes anew; a further, shorter one runs under torch's profiler.
The floor is reading weights and keys and values once, as fast as a large copy does.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch
from gpu_clock import milliseconds
from kernel_times import kernel_times
from launching import main_or_rank, measured_on_ranks
from reports import spread, write_report
from rollout import model_or_toy

SETTINGS: dict[str, dict[str, Any]] = {  # of the recipe's rollout section
    "bfloat16": {},
    "bfloat16, cache in fp8": {"kv_cache_dtype": "fp8"},
    "fp8": {"quantization": "fp8"},
    "fp8, cache too": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "fp8 by blocks": {"quantization": "fp8_blockwise"},
    "fp8 by blocks, cache too": {"quantization": "fp8_blockwise", "kv_cache_dtype": "fp8"},
}
# tokens of a prompt; of the shorter and the longer generation, and of that under the profiler; cache in GB
SIZES = {"toy": (32, 4, 12, 4, None), "gpu": (736, 64, 320, 48, 24.0)}
WARM_UPS, REPEATS, SAMPLED = 1, 2, (2, 500)


def main() -> int:
    """Measure one setting after the other; return 1 where one failed."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder with a config.json; default: Qwen2.5-7B, on CPUs a toy")
    settings = list(SETTINGS) if on_gpu else list(SETTINGS)[:1]
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=settings, help="default: all")
    parser.add_argument(
        "--running", type=int, nargs="+", default=[64, 200, 256] if on_gpu else [2, 4], help="default: %(default)s"
    )
    parser.add_argument("--output", type=Path, default=Path("docs/results/decode.json"), help="default: %(default)s")
    options = parser.parse_args()
    rows, failed = [], False
    with model_or_toy(options.model) as model:
        for name in options.settings:
            given = {"model": str(model), "name": name, "running": options.running, "size": "gpu" if on_gpu else "toy"}
            reason, found = measured_on_ranks(1, Path(__file__), given, 600.0)
            failed |= bool(reason)
            found = [{"setting": name, **row} for row in ([{"failed": reason}] if reason else found)]
            rows += found
            print(json.dumps(found), flush=True)
            write_report(options.output, {"model": model.name, "rows": rows})
    return int(failed)


def measure(model: str, name: str, running: list[int], size: str) -> list[dict[str, Any]]:
    """Return a row for each number of sequences of one setting."""
    from rlhf_megatron.recipe import RolloutSection
    from rlhf_megatron.rollout.engine import Request, Sampling
    from rlhf_megatron.rollout.vllm import vllm_engine

    setting, (length, shorter, longer, profiled, kv_cache_gb) = SETTINGS[name], SIZES[size]
    section = RolloutSection(
        max_response_length=longer, max_num_seqs=max(running), kv_cache_gb=kv_cache_gb, sleep=False, **setting
    )
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    engine = vllm_engine.VllmEngine(model, section, dtype, length, seed=1)
    engine.weights_updated(1)

    def generate(count: int, tokens: int) -> float:
        drawn = (tuple(Random(row).choices(range(*SAMPLED), k=length)) for row in range(count))
        asked = [Request(row, prompt, seed=row, group_id=row, max_tokens=tokens) for row, prompt in enumerate(drawn)]
        started = time.perf_counter()
        completions = engine.generate(asked, Sampling(1.0, 1.0, -1, tokens, ()))
        taken = time.perf_counter() - started
        assert sum(len(completion.token_ids) for completion in completions) == count * tokens
        return taken

    rows = []
    bandwidth = bytes_per_millisecond() if torch.cuda.is_available() else None
    for count in running:
        generate(count, 1)  # from now on prompts are in the cache
        ways: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
            "step_ms": contextlib.nullcontext,
            "step_ms_of_inputs_made_anew": inputs_made_anew,
        }
        steps: dict[str, list[float]] = {way: [] for way in ways}
        for repeat in range(WARM_UPS + REPEATS):
            for way, inputs in ways.items():
                with inputs():
                    seconds = generate(count, longer) - generate(count, shorter)
                if repeat >= WARM_UPS:
                    steps[way].append(seconds / (longer - shorter) * 1000)
        read = bytes_of_step(model, setting, count * (length + (shorter + longer) / 2))
        rows.append(
            {
                "running": count,
                **{way: spread(of_way) for way, of_way in steps.items()},
                "read_gb": {key: size / 1e9 for key, size in read.items()},
                "floor_ms": sum(read.values()) / bandwidth if bandwidth else None,
                "kernels": kernel_times(functools.partial(generate, count, profiled), profiled),
            }
        )
    return rows


@contextlib.contextmanager
def inputs_made_anew() -> Iterator[None]:
    """Have vLLM make the inputs of every step anew inside."""
    from rlhf_megatron.compat.vllm import steady_inputs

    with mock.patch.object(steady_inputs, "kept", lambda _: contextlib.nullcontext()):
        yield


def bytes_per_millisecond() -> float:
    """Return what a large copy on the GPU reads and writes."""
    source = torch.empty(1 << 31, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source), 2, 10)["median"]


def bytes_of_step(model: str, setting: Mapping[str, Any], tokens: float) -> dict[str, float]:
    """Return what a step reads at least: weights, and keys and values of so many ``tokens``."""
    from rlhf_megatron.models.architecture import read_architecture
    from rlhf_megatron.models.flops import kv_cache_bytes_per_token
    from rlhf_megatron.planning.row_lengths import used_weights

    shape = read_architecture(model)
    head = shape.vocabulary * shape.hidden
    in_layers = used_weights(shape) - head
    return {
        "weights": in_layers * (1 if setting.get("quantization") else 2) + head * 2,
        "cache": tokens * kv_cache_bytes_per_token(shape, 1, 1 if setting.get("kv_cache_dtype") else 2),
    }


if __name__ == "__main__":
    sys.exit(main_or_rank(main, measure))
