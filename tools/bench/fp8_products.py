"""Products of a decode step in 8 bits by number of sequences, by the kernels of several libraries; needs a GPU.

    python tools/bench/fp8_products.py [--model recipes/models/qwen2.5-7b] [--rows 64 128 200] [--output FILE.json]

Microseconds of one layer's four linear layers, started as CUDA graphs, beside bfloat16: with a scale for each row and
token, and by blocks, as ``rollout.quantization`` has them. The floor is reading the weights once, as fast as a large
copy does. A way that is not there says why.
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
from gpu_clock import milliseconds, recorded
from reports import write_report
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rlhf_megatron.compat.deep_gemm import Quantized
from rlhf_megatron.kernels.block_quantization import (
    BLOCK,
    TYPE,
    quantize_blocks,
    quantize_blocks_reference,
    quantize_groups,
    quantize_groups_reference,
)
from rlhf_megatron.models.architecture import Architecture, read_architecture
from rlhf_megatron.rollout.vllm.process_environment import prepare_environment

WARM_UPS, REPEATS = 5, 30
COPIES = 8  # of the weights, by turns, so that none is found in the GPU's cache


def main() -> int:
    """Return the exit status."""
    options = options_on_gpu(__doc__, [64, 128, 200, 256, 512])
    if options is None:
        return 1
    shapes = linear_shapes(read_architecture(options.model))
    results = []
    for rows, (name, shape) in itertools.product(options.rows, shapes.items()):
        results.append(measure(rows, name, *shape))
        if options.output:
            write_report(options.output, {"model": options.model.name, "results": results})
    show(results)
    return 0


def options_on_gpu(text: str | None, rows: list[int]) -> argparse.Namespace | None:
    """Return the options of a benchmark of a model's products, of a process that is ready for vLLM; None where there is
    no GPU, which it says."""
    parser = argparse.ArgumentParser(description=(text or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("recipes/models/qwen2.5-7b"), help="default: %(default)s")
    parser.add_argument("--rows", type=int, nargs="+", default=rows, help="tokens; default: %(default)s")
    parser.add_argument("--output", type=Path, help="write the results there as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU here, and these kernels run on no CPU", file=sys.stderr)
        return None
    prepare_environment()
    return options


def linear_shapes(model: Architecture) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of a dense layer's linear layers, as vLLM joins them."""
    width = model.head_dim * model.heads
    return {
        "qkv_proj": (width + 2 * model.head_dim * model.key_value_heads, model.hidden),
        "o_proj": (model.hidden, width),
        "gate_up_proj": (2 * model.feed_forward, model.hidden),
        "down_proj": (model.hidden, model.feed_forward),
    }


def measure(rows: int, name: str, outputs: int, inputs: int) -> dict[str, Any]:
    """Return microseconds of each way for one linear layer, and how far each is from the product in full."""
    generator = torch.Generator("cuda").manual_seed(1)
    weights = [
        torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(COPIES)
    ]
    tokens = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16, generator=generator)
    by_columns = quantize_groups(tokens)
    in_blocks: list[Quantized] = []
    for weight in weights:
        scales = torch.empty(outputs // BLOCK, inputs // BLOCK, device="cuda")
        in_blocks.append((torch.empty_like(weight, dtype=TYPE), scales))
        quantize_blocks(weight, *in_blocks[-1])
    ways: dict[str, Callable[[int], Any]] = {"bfloat16": lambda copy: tokens @ weights[copy].t()}
    ways |= ways_of_rows(tokens, weights) | ways_of_blocks(by_columns, in_blocks)
    ways["quantizing the weights in 8 bits"] = lambda copy: quantize_blocks(weights[copy], *in_blocks[copy])
    ways["quantizing the weights in 8 bits, torch"] = lambda copy: quantize_blocks_reference(
        weights[copy], *in_blocks[copy]
    )
    in_torch = torch.compile(quantize_groups_reference)
    ways["quantizing the tokens in 8 bits"] = lambda copy: quantize_groups(tokens)
    ways["quantizing the tokens in 8 bits, torch, compiled"] = lambda copy: in_torch(tokens, *by_columns)
    target = [torch.empty_like(quantized) for quantized, _ in in_blocks]
    ways["reading in 8 bits"] = lambda copy: target[copy].copy_(in_blocks[copy][0])
    taken: dict[str, float | str] = {}
    apart: dict[str, float] = {}
    expected = (tokens @ weights[0].t()).float()
    for way, action in ways.items():
        try:
            if "8 bits" not in way:
                apart[way] = ((action(0).float() - expected).abs().mean() / expected.abs().mean()).item()
            taken[way] = microseconds(action)
        except Exception as error:  # a library that is not there, or refuses
            taken[way] = f"{type(error).__name__}: {error}"[:300]
    taken["reading in 8 bits"] = float(taken["reading in 8 bits"]) / 2  # a copy writes as much
    return {"layer": name, "rows": rows, "shape": [outputs, inputs], "microseconds": taken, "apart": apart}


def ways_of_rows(tokens: Tensor, weights: list[Tensor]) -> dict[str, Callable[[int], Any]]:
    """Return products with a scale for each token and row of the weights."""
    from vllm import _custom_ops

    from rlhf_megatron.compat.vllm.fp8_linear import quantized_rows

    in_8_bits = [quantized_rows(weight) for weight in weights]
    given, scale = quantized_rows(tokens)

    def by_vllm(given: Tensor, scale: Tensor, weight: tuple[Tensor, Tensor]) -> Tensor:
        return _custom_ops.cutlass_scaled_mm(given, weight[0].t(), scale, weight[1], torch.bfloat16)

    def by_cublas(weight: tuple[Tensor, Tensor]) -> Tensor:
        return torch._scaled_mm(
            given, weight[0].t(), scale, weight[1].t(), out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return {
        "rows: vLLM": lambda copy: by_vllm(given, scale, in_8_bits[copy]),
        "rows: vLLM, quantizing": lambda copy: by_vllm(*quantized_rows(tokens), in_8_bits[copy]),
        "rows: cuBLAS": lambda copy: by_cublas(in_8_bits[copy]),
    }


def ways_of_blocks(tokens: Quantized, weights: list[Quantized]) -> dict[str, Callable[[int], Any]]:
    """Return products with a scale for each block."""
    from torch.nn.functional import ScalingType, scaled_mm
    from vllm import _custom_ops
    from vllm.model_executor.layers.quantization.utils.fp8_utils import w8a8_triton_block_scaled_mm
    from vllm.utils.deep_gemm import fp8_gemm_nt

    given, padded = tokens
    by_rows, scale = padded.contiguous(), padded.t().contiguous().t()

    def by_vllm(weight: Tensor, of_weight: Tensor) -> Tensor:
        return _custom_ops.cutlass_scaled_mm(given, weight.t(), scale, of_weight.t(), torch.bfloat16)

    def by_triton_of_vllm(weight: Tensor, of_weight: Tensor) -> Tensor:
        return w8a8_triton_block_scaled_mm(given, weight, by_rows, of_weight, [BLOCK, BLOCK], torch.bfloat16)

    def by_cublas(weight: Tensor, of_weight: Tensor) -> Tensor:
        kinds = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
        return scaled_mm(given, weight.t(), scale, kinds[0], of_weight.t(), kinds[1])

    def by_deep_gemm(weight: Tensor, of_weight: Tensor) -> Tensor:
        output = torch.empty(len(given), len(weight), dtype=torch.bfloat16, device="cuda")
        fp8_gemm_nt(tokens, (weight, of_weight), output, is_deep_gemm_e8m0_used=False)
        return output

    def by_deep_gemm_of_all_shapes(weight: Tensor, of_weight: Tensor) -> Tensor:
        from vllm.third_party import deep_gemm

        deep_gemm.set_ignore_compile_dims(True)
        try:
            return by_deep_gemm(weight, of_weight)
        finally:
            deep_gemm.set_ignore_compile_dims(False)

    ways = {"vLLM": by_vllm, "Triton of vLLM": by_triton_of_vllm, "cuBLAS": by_cublas, "DeepGEMM": by_deep_gemm}
    ways["DeepGEMM, kernels for all shapes"] = by_deep_gemm_of_all_shapes  # half as many to compile
    return {
        f"blocks: {way}": functools.partial(lambda action, copy: action(*weights[copy]), action)
        for way, action in ways.items()
    }


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
    """Print a column for each product."""
    table = Table("microseconds", *(f"{result['layer']}, {result['rows']}" for result in results))
    for way in results[0]["microseconds"]:
        taken = [result["microseconds"][way] for result in results]
        table.add_row(way, *(f"{value:.1f}" if isinstance(value, float) else "-" for value in taken))
    Console(width=200).print(table)


if __name__ == "__main__":
    sys.exit(main())
