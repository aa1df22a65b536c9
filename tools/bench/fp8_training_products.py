"""Products of training in 8 bits by blocks, of Transformer Engine and of DeepGEMM; needs a Hopper GPU.

    python tools/bench/fp8_training_products.py [--model recipes/models/qwen2.5-7b] [--rows 5120 8704] [--output FILE]

Milliseconds for the output of each of a layer's four linear layers, and for the gradient of its input. Both libraries
have the same numbers in 8 bits; how far their results are apart is in the file. Each product is timed with nothing in
the GPU's cache (cold), and as the mean of many in a row, for which the GPU may have to slow down (sustained).
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from fp8_products import linear_shapes, options_on_gpu
from gpu_clock import milliseconds
from reports import write_report
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rlhf_megatron.compat.transformer_engine import with_deep_gemm
from rlhf_megatron.models.architecture import read_architecture

WARM_UPS, REPEATS = 5, 30
LIBRARIES = ("Transformer Engine", "DeepGEMM")
LAYOUTS = {"output": "TN", "gradient of input": "NN"}
KINDS = ("cold", "sustained")
COLUMNS = [(name, kind) for name in LAYOUTS for kind in KINDS]
IN_A_ROW = 200


def main() -> int:
    """Return the exit status."""
    options = options_on_gpu(__doc__, [5120, 8704])
    if options is None:
        return 1
    from vllm.utils.deep_gemm import is_deep_gemm_supported

    if not is_deep_gemm_supported():
        print("vLLM has no DeepGEMM here, or it does not support this GPU", file=sys.stderr)
        return 1
    shapes = linear_shapes(read_architecture(options.model))
    results = []
    for rows, (name, shape) in itertools.product(options.rows, shapes.items()):
        results.append({"rows": rows, "layer": name, "shape": shape, **measure(rows, *shape)})
        if options.output:
            write_report(options.output, {"model": options.model.name, "results": results})
    show(results)
    return 0


def measure(rows: int, outputs: int, inputs: int) -> dict[str, Any]:
    """Return milliseconds of each product by each library, and the largest difference relative to the largest."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    by_deep_gemm = with_deep_gemm(general_gemm, large=0)
    generator = torch.Generator("cuda").manual_seed(1)

    def draw(*shape: int, blocks: int) -> Any:
        values = torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)
        return in_blocks(values, blocks)

    weight, x, gradient = draw(outputs, inputs, blocks=2), draw(rows, inputs, blocks=1), draw(rows, outputs, blocks=1)
    operands = {"output": (weight, x), "gradient of input": (weight, gradient)}
    found: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        results = []
        for library, multiply in zip(LIBRARIES, (general_gemm, by_deep_gemm), strict=True):
            call = functools.partial(
                multiply, *operands[name], layout=layout, out_dtype=torch.bfloat16, use_split_accumulator=True
            )
            results.append(call()[0].float())
            found[f"{name}: {library}, cold"] = milliseconds(call, WARM_UPS, REPEATS)
            found[f"{name}: {library}, sustained"] = sustained(call)
        usual, other = results
        found[f"{name}: apart"] = float((usual - other).abs().max() / usual.abs().max())
    return found


def in_blocks(values: Tensor, dimensions: int) -> Any:
    """Quantize [n, m] and its transpose as Transformer Engine does: by rows' blocks (1), or by squares (2)."""
    import transformer_engine_torch as extension
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    return Float8BlockQuantizer(
        fp8_dtype=extension.DType.kFloat8E4M3, rowwise=True, columnwise=True, amax_epsilon=0.0,
        force_pow_2_scales=False, block_scaling_dim=dimensions,
    )(values)  # fmt: skip


def sustained(call: Callable[[], Any]) -> dict[str, float]:
    """Return milliseconds of one of ``IN_A_ROW`` calls."""

    def many() -> None:
        for _ in range(IN_A_ROW):
            call()

    return {name: value / IN_A_ROW for name, value in milliseconds(many, 1, 3).items()}


def show(results: list[dict[str, Any]]) -> None:
    """Print milliseconds of Transformer Engine and of DeepGEMM."""
    table = Table(
        "rows", "layer", *(f"{name}, {kind}" for name, kind in COLUMNS), title="ms: Transformer Engine, DeepGEMM"
    )
    for each in results:
        medians = ([each[f"{name}: {library}, {kind}"]["median"] for library in LIBRARIES] for name, kind in COLUMNS)
        table.add_row(str(each["rows"]), each["layer"], *(f"{usual:.3f}, {other:.3f}" for usual, other in medians))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
