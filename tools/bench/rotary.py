"""Rotary embeddings of packed queries and keys, there and back: our kernel and Transformer Engine's; needs a GPU.

    python tools/bench/rotary.py [--tokens 65536] [--output FILE.json]

The floor is torch copying as many numbers that lie side by side. A row of the report is the heads of one model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_clock import milliseconds
from reports import write_report
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rlhf_megatron.kernels.rotary import rotate, rotate_reference

WARM_UPS, REPEATS = 5, 30
OURS, THEIRS = "ours", "Transformer Engine"
MODELS = {"0.5B": (14, 2, 64), "7B": (28, 4, 128), "32B": (40, 8, 128)}  # heads of queries, of keys, numbers of each
SEQUENCE = 1217  # tokens: as long as the rows of the steps' benchmark are on average


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=65_536, help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="write the results there as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU here, and neither kernel runs on a CPU", file=sys.stderr)
        return 1
    results = [measure(model, options.tokens) for model in MODELS]
    show(results)
    if options.output:
        write_report(options.output, {"tokens": options.tokens, "sequence_tokens": SEQUENCE, "results": results})
    return 0


def measure(model: str, tokens: int) -> dict[str, Any]:
    """Return milliseconds of each way and direction, bytes per second, and the largest differences from float64."""
    from megatron.core.extensions.transformer_engine import fused_apply_rotary_pos_emb_thd

    heads, groups, dimension = MODELS[model]
    generator = torch.Generator("cuda").manual_seed(1)
    fused = torch.randn(tokens, heads + 2 * groups, dimension, device="cuda", generator=generator).bfloat16()
    query, key, _ = fused.split([heads, groups, groups], dim=1)
    begins = list(range(0, tokens, SEQUENCE))
    cu_seqlens = torch.tensor([*begins, tokens], dtype=torch.int32, device="cuda")
    angles = torch.outer(torch.arange(SEQUENCE) * 1.0, 1e6 ** -torch.arange(0, 1, 2 / dimension)).cuda()
    frequencies = torch.cat([angles, angles], dim=-1)[:, None, None]
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        OURS: lambda values: rotate(values, cu_seqlens, angles),
        THEIRS: lambda values: fused_apply_rotary_pos_emb_thd(values, cu_seqlens, frequencies, cp_size=1, cp_rank=0),
    }
    exact = [rotate_reference(part[: 2 * SEQUENCE].double(), cu_seqlens[:3], angles) for part in (query, key)]
    forward, backward, differences = {}, {}, {}
    for name, way in ways.items():
        forward[name], backward[name], outputs = times(way, [query, key])
        pairs = zip(outputs, exact, strict=True)
        differences[name] = max((ours[: len(right)] - right).abs().max().item() for ours, right in pairs)
    numbers = torch.empty(query.numel() + key.numel(), dtype=query.dtype, device="cuda")
    copy = torch.empty_like(numbers)
    floor = milliseconds(lambda: copy.copy_(numbers), WARM_UPS, REPEATS)
    moved = 2 * 2 * numbers.numel()
    return {
        "model": model,
        "forward_milliseconds": forward,
        "backward_milliseconds": backward,
        "copying_milliseconds": floor,
        "terabytes_per_second": {
            name: moved / each["median"] / 1e9 for name, each in (forward | {"copying": floor}).items()
        },
        "largest_difference": differences,
    }


def times(
    way: Callable[[Tensor], Tensor], parts: list[Tensor]
) -> tuple[dict[str, float], dict[str, float], list[Tensor]]:
    """Return milliseconds there and back, and what came out."""
    leaves = [part.detach().requires_grad_() for part in parts]
    outputs = [way(leaf) for leaf in leaves]
    upstream = [torch.randn_like(each) for each in outputs]

    def there() -> None:
        for part in parts:
            way(part)

    def back() -> None:
        torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)

    return milliseconds(there, WARM_UPS, REPEATS), milliseconds(back, WARM_UPS, REPEATS), outputs


def show(results: list[dict[str, Any]]) -> None:
    """Print a table on stdout."""
    names = (OURS, THEIRS)
    table = Table("heads of", *(f"{name}: there, back, ms" for name in names), "copying, ms", "TB/s", "beside float64")
    for row in results:
        times = [
            f"{row['forward_milliseconds'][name]['median']:.3f}, {row['backward_milliseconds'][name]['median']:.3f}"
            for name in names
        ]
        speeds = ", ".join(f"{speed:.2f}" for speed in row["terabytes_per_second"].values())
        floor = f"{row['copying_milliseconds']['median']:.3f}"
        table.add_row(row["model"], *times, floor, speeds, f"{row['largest_difference'][OURS]:.1e}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
