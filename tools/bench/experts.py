"""One linear layer of a rank's experts, forward and backward: ours and Transformer Engine's; needs a GPU.

    python tools/bench/experts.py [--models 30B-A3B ...] [--tokens 8704] [--output FILE.json]

The ceiling is as many multiplications with a single expert: each of the three products a single one of torch's, and the
gradient added to its float32 sum. Tokens fall on experts unevenly, as drawn. ``host``: until all is asked of the GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from reports import spread, write_report
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rlhf_megatron.models.experts import ExpertRows

WARM_UPS, REPEATS = 3, 10
OURS, THEIRS, CEILING = "ours", "Transformer Engine", "one expert"
UNEVEN = 0.3  # the least weight of an expert, of 1.3 at most: a trained router is about as uneven


class Shape(NamedTuple):
    """A matrix of an expert, how many of them a rank has, and the rows for each token of a rank's micro-batch.

    With expert parallelism a rank has fewer experts, and as many rows: those of the other ranks' tokens too.
    """

    experts: int
    columns: int
    rows: int
    chosen: int


SHAPES = {
    "30B-A3B": Shape(128, 2048, 1536, 8),
    "30B-A3B, down": Shape(128, 768, 2048, 8),
    "30B-A3B of EP4": Shape(32, 2048, 1536, 8),
    "Qwen3-Next": Shape(512, 2048, 1024, 10),
    "Qwen3-Next of EP8": Shape(64, 2048, 1024, 10),
    "GLM-4.5-Air": Shape(128, 4096, 2816, 8),
    "gpt-oss-20b": Shape(32, 2880, 5760, 4),
    "DeepSeek-V3 of EP8": Shape(32, 7168, 4096, 8),
}


class Way(NamedTuple):
    """A forward pass, and the sums that its backward pass adds to, in one tensor [experts x rows, columns]."""

    forward: Callable[[Tensor], Tensor]
    gradient: Callable[[], Tensor]


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=8704, help="of a micro-batch; default: %(default)s")
    parser.add_argument("--output", type=Path, help="write the results there as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU here, and Transformer Engine has no products on a CPU", file=sys.stderr)
        return 1
    results = []
    for model in options.models:
        results.append(measure(model, options.tokens))
        torch.cuda.empty_cache()
    show(results)
    if options.output:
        write_report(options.output, {"tokens": options.tokens, "results": results})
    return 0


def measure(model: str, tokens: int) -> dict[str, Any]:
    """Return milliseconds of each way, and how far results of both are from each other relative to the largest."""
    shape = SHAPES[model]
    generator = torch.Generator().manual_seed(1)
    drawn = torch.multinomial(
        torch.rand(shape.experts, generator=generator) + UNEVEN, tokens * shape.chosen, True, generator=generator
    )
    counts = drawn.bincount(minlength=shape.experts).tolist()
    inputs = torch.randn(sum(counts), shape.columns, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(sum(counts), shape.rows, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(shape.experts * shape.rows, shape.columns, device="cuda", dtype=torch.bfloat16) * 0.02
    outputs: dict[str, list[Tensor]] = {}
    times: dict[str, Any] = {}
    for name, make in ((OURS, ours), (THEIRS, transformer_engine), (CEILING, one_expert)):
        way = make(shape, weights, counts)

        def there_and_back(way: Way = way) -> Tensor:
            inputs.grad = None
            output = way.forward(inputs)
            output.backward(upstream)
            return output

        output = there_and_back().detach()
        if name != CEILING:
            assert inputs.grad is not None
            outputs[name] = [output, inputs.grad, way.gradient().clone()]
        times[name] = timed(there_and_back)
        del way
        torch.cuda.empty_cache()
    pairs = zip(outputs[OURS], outputs[THEIRS], strict=True)
    operations = 6 * len(inputs) * shape.rows * shape.columns
    return {
        "model": model,
        **shape._asdict(),
        "tokens_of_an_expert": spread(counts),
        "milliseconds": times,
        "teraflops_per_second": {name: operations / each["gpu"]["median"] / 1e9 for name, each in times.items()},
        "largest_difference": [float((one - other).abs().max() / other.abs().max()) for one, other in pairs],
    }


def ours(shape: Shape, weights: Tensor, counts: Sequence[int]) -> Way:
    """Return the layer of ``models.experts``."""
    sizes = ("expert_model_parallel_size", "expert_tensor_parallel_size", "tensor_model_parallel_size")
    layer = ExpertRows(
        shape.experts,
        shape.columns,
        shape.rows,
        config=SimpleNamespace(use_cpu_initialization=False, params_dtype=torch.bfloat16, **dict.fromkeys(sizes, 1)),
        init_method=torch.nn.init.zeros_,
        bias=False,
        skip_bias_add=False,
        is_expert=True,
        tp_comm_buffer_name=None,
        pg_collection=SimpleNamespace(expt_tp=SimpleNamespace(size=lambda: 1)),
    )
    layer.fuse_wgrad_accumulation = True
    parameters: list[Any] = layer.weights()
    for parameter, own in zip(parameters, weights.split([len(each) for each in parameters]), strict=True):
        parameter.data.copy_(own)
    _add_sums(parameters)
    return Way(lambda inputs: layer(inputs, counts)[0], lambda: torch.cat([each.main_grad for each in parameters]))


def transformer_engine(shape: Shape, weights: Tensor, counts: Sequence[int]) -> Way:
    """Return its GroupedLinear, as Megatron has it; forward and its inputs' gradient in one CUTLASS kernel where it
    can."""
    os.environ.setdefault("NVTE_USE_CUTLASS_GROUPED_GEMM", "1")
    import transformer_engine.pytorch as te

    layer = te.GroupedLinear(
        shape.experts, shape.columns, shape.rows, bias=False, params_dtype=torch.bfloat16, device="cuda",
        fuse_wgrad_accumulation=True,
    )  # fmt: skip
    parameters: list[Any] = [getattr(layer, f"weight{expert}") for expert in range(shape.experts)]
    for parameter, own in zip(parameters, weights.split(shape.rows), strict=True):
        parameter.data.copy_(own)
    _add_sums(parameters)
    split = list(counts)
    return Way(lambda inputs: layer(inputs, split), lambda: torch.cat([each.main_grad for each in parameters]))


def one_expert(shape: Shape, weights: Tensor, _: Sequence[int]) -> Way:
    """Multiply all tokens by the first matrix."""
    total = torch.zeros(shape.rows, shape.columns, device="cuda")
    matrix = weights[: shape.rows]

    class Product(torch.autograd.Function):
        """Product whose backward pass adds the matrix' gradient to its sum, as the others do."""

        @staticmethod
        def forward(ctx: Any, inputs: Tensor) -> Tensor:
            ctx.save_for_backward(inputs)
            return inputs @ matrix.T

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            [inputs] = ctx.saved_tensors
            total.add_(gradient.T @ inputs)
            return gradient @ matrix

    return Way(Product.apply, lambda: total)  # type: ignore[arg-type]


def _add_sums(parameters: Sequence[Any]) -> None:
    """Give weights what Megatron's gradient buffers do: sums of gradients one behind the other."""
    sums = torch.zeros(sum(each.numel() for each in parameters), device="cuda")
    for parameter, own in zip(parameters, sums.split([each.numel() for each in parameters]), strict=True):
        parameter.main_grad = own.view(parameter.shape)
        parameter.grad_added_to_main_grad = parameter.overwrite_main_grad = False
        parameter.register_post_accumulate_grad_hook(_drop_gradient)


def _drop_gradient(parameter: Tensor) -> None:
    """Do as Megatron's hook does."""
    parameter.grad = None


def timed(action: Callable[[], Any]) -> dict[str, dict[str, float]]:
    """Return milliseconds until all is done on the GPU, and until the host has asked for it."""
    gpu, host = [], []
    for number in range(WARM_UPS + REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        action()
        asked = time.perf_counter()
        torch.cuda.synchronize()
        if number >= WARM_UPS:
            gpu.append(1e3 * (time.perf_counter() - began))
            host.append(1e3 * (asked - began))
    return {"gpu": spread(gpu), "host": spread(host)}


def show(results: Sequence[dict[str, Any]]) -> None:
    """Print a table on stdout."""
    names = (OURS, THEIRS, CEILING)
    table = Table("experts of", *(f"{name}: ms (host)" for name in names), "TFLOP/s", "difference")
    for row in results:
        times = [
            f"{row['milliseconds'][name]['gpu']['median']:.2f} ({row['milliseconds'][name]['host']['median']:.2f})"
            for name in names
        ]
        speeds = ", ".join(f"{speed:.0f}" for speed in row["teraflops_per_second"].values())
        table.add_row(row["model"], *times, speeds, ", ".join(f"{each:.1e}" for each in row["largest_difference"]))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
