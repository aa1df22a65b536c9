"""Products of a decode step in 8 bits by number of sequences: vLLM's kernel, cuBLAS's and ours; needs a GPU.

    python tools/bench/fp8_products.py [--model recipes/models/qwen2.5-7b] [--rows 64 128 200] [--output FILE.json]

Microseconds of one layer's four linear layers, started as CUDA graphs: beside bfloat16, and with the quantization of
the input as the rollout does it. The floor is reading the weights once, as fast as a large copy does. With --sweep our
kernel is measured by tiles and splits of the inner dimension too.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from gpu_clock import milliseconds, recorded
from reports import write_report
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rlhf_megatron.kernels.triton_fp8_product import TILES, Tiles, launch
from rlhf_megatron.models.architecture import Architecture, read_architecture
from rlhf_megatron.rollout.vllm.process_environment import prepare_environment

WARM_UPS, REPEATS = 5, 30
COPIES = 8  # of the weights, by turns, so that none is found in the GPU's cache
SWEEP = (
    TILES,
    Tiles(stages=3),
    Tiles(depth=64, stages=6),
    Tiles(most_tokens=128, warps=4),
    Tiles(most_tokens=128),
    Tiles(rows=64, warps=4),
    Tiles(rows=256, most_tokens=128, stages=3),
)
SPLITS = (1, 2, 3, 4, 5, 7)


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("recipes/models/qwen2.5-7b"), help="default: %(default)s")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 128, 200, 256, 512], help="default: %(default)s")
    parser.add_argument("--sweep", action="store_true", help="by tiles and splits too")
    parser.add_argument("--output", type=Path, help="write the results there as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU here, and these kernels run on no CPU", file=sys.stderr)
        return 1
    prepare_environment()
    shapes = linear_shapes(read_architecture(options.model))
    results = []
    for rows, (name, shape) in itertools.product(options.rows, shapes.items()):
        results.append(measure(rows, name, *shape, sweeps=options.sweep))
        if options.output:
            write_report(options.output, {"model": options.model.name, "results": results})
    show(results)
    return 0


def linear_shapes(model: Architecture) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of a dense layer's linear layers, as vLLM joins them."""
    width = model.head_dim * model.heads
    return {
        "qkv_proj": (width + 2 * model.head_dim * model.key_value_heads, model.hidden),
        "o_proj": (model.hidden, width),
        "gate_up_proj": (2 * model.feed_forward, model.hidden),
        "down_proj": (model.hidden, model.feed_forward),
    }


def measure(rows: int, name: str, outputs: int, inputs: int, sweeps: bool) -> dict[str, Any]:
    """Return microseconds of each way for one linear layer, and of our kernel by what it is cut into."""
    from vllm import _custom_ops

    from rlhf_megatron.compat.vllm.fp8_linear import quantized_rows

    generator = torch.Generator("cuda").manual_seed(1)
    weights = [
        torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(COPIES)
    ]
    tokens = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16, generator=generator)
    in_8_bits = [quantized_rows(weight) for weight in weights]
    given, scale = quantized_rows(tokens)

    def by_vllm(given: Tensor, scale: Tensor, weight: tuple[Tensor, Tensor]) -> Tensor:
        return _custom_ops.cutlass_scaled_mm(given, weight[0].t(), scale, weight[1], torch.bfloat16)

    def by_cublas(given: Tensor, scale: Tensor, weight: tuple[Tensor, Tensor]) -> Tensor:
        return torch._scaled_mm(
            given, weight[0].t(), scale, weight[1].t(), out_dtype=torch.bfloat16, use_fast_accum=True
        )

    def by_ours(copy: int, tiles: Tiles = TILES, splits: int | None = None) -> Tensor:
        return launch((given, scale), in_8_bits[copy], None, torch.bfloat16, tiles, splits)

    ways: dict[str, Callable[[int], Any]] = {
        "bfloat16": lambda copy: tokens @ weights[copy].t(),
        "vLLM": lambda copy: by_vllm(given, scale, in_8_bits[copy]),
        "vLLM, quantizing": lambda copy: by_vllm(*quantized_rows(tokens), in_8_bits[copy]),
        "cuBLAS": lambda copy: by_cublas(given, scale, in_8_bits[copy]),
        "ours": by_ours,
    }
    apart = {way: (ways[way](0) - ways["vLLM"](0)).abs().max().item() for way in ("cuBLAS", "ours")}
    target = [torch.empty_like(quantized) for quantized, _ in in_8_bits]
    ways["reading in 8 bits"] = lambda copy: target[copy].copy_(in_8_bits[copy][0])
    taken = {way: microseconds(action) for way, action in ways.items()}
    taken["reading in 8 bits"] /= 2  # a copy writes as much
    cuts: dict[str, float | str] = {}
    for tiles, splits in itertools.product(SWEEP if sweeps else (), SPLITS):
        cut = f"{tuple(tiles)}, {splits}"
        try:
            cuts[cut] = microseconds(functools.partial(by_ours, tiles=tiles, splits=splits))
        except triton.OutOfResources as error:
            cuts[cut] = str(error)
    return {
        "layer": name, "rows": rows, "shape": [outputs, inputs], "microseconds": taken, "cuts": cuts, "apart": apart
    }  # fmt: skip


def microseconds(action: Callable[[int], Any]) -> float:
    """Return what ``action`` takes with one copy."""
    return milliseconds(recorded(in_turn(action)), WARM_UPS, REPEATS)["median"] / COPIES * 1000


def in_turn(action: Callable[[int], Any]) -> Callable[[], None]:
    """Return what does ``action`` with each copy."""

    def run() -> None:
        for copy in range(COPIES):
            action(copy)

    return run


def show(results: list[dict[str, Any]]) -> None:
    """Print a line for each product."""
    table = Table("layer", "rows", *results[0]["microseconds"])
    for result in results:
        table.add_row(
            result["layer"], str(result["rows"]), *(f"{value:.1f}" for value in result["microseconds"].values())
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    sys.exit(main())
