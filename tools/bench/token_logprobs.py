"""The logprob of each row's sampled token from logits in float32: our kernel, vLLM's and torch's; needs a GPU.

    python tools/bench/token_logprobs.py [--rows 1 16 64 256] [--vocabulary 151936] [--output FILE.json]

The floor is torch reading each row once, for its largest number. A row of the report is one number of rows.
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

from rlhf_megatron.kernels.token_logprob import token_logprobs, token_logprobs_reference
from rlhf_megatron.rollout.vllm.process_environment import prepare_environment

WARM_UPS, REPEATS = 5, 50
OURS, VLLM, TORCH, FLOOR = "ours", "vLLM", "torch", "reading once"


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256], help="default: %(default)s")
    parser.add_argument("--vocabulary", type=int, default=151_936, help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="write the results there as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU here, and vLLM's kernel runs on no CPU", file=sys.stderr)
        return 1
    prepare_environment()
    results = [measure(rows, options.vocabulary) for rows in options.rows]
    show(results)
    if options.output:
        write_report(options.output, {"results": results})
    return 0


def measure(rows: int, vocabulary: int) -> dict[str, Any]:
    """Return milliseconds of each way, and the largest difference between ours and vLLM's."""
    from vllm.v1.worker.gpu.sample import logprob

    generator = torch.Generator("cuda").manual_seed(1)
    logits = torch.randn(rows, vocabulary, device="cuda", generator=generator) * 4
    tokens = torch.randint(vocabulary, (rows,), device="cuda", generator=generator)
    ways: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: token_logprobs(logits, tokens),
        VLLM: lambda: logprob.compute_token_logprobs(logits, tokens[:, None])[:, 0],
        TORCH: lambda: token_logprobs_reference(logits, tokens),
        FLOOR: lambda: logits.amax(-1),
    }
    times = {name: milliseconds(way, WARM_UPS, REPEATS) for name, way in ways.items()}
    difference = (ways[OURS]() - ways[VLLM]()).abs().max().item()
    return {"rows": rows, "vocabulary": vocabulary, "milliseconds": times, "largest_difference": difference}


def show(results: list[dict[str, Any]]) -> None:
    """Print a table on stdout."""
    table = Table("rows", *(f"{name}, ms" for name in (OURS, VLLM, TORCH, FLOOR)), "ours beside vLLM's")
    for row in results:
        times = [f"{row['milliseconds'][name]['median']:.3f}" for name in (OURS, VLLM, TORCH, FLOOR)]
        table.add_row(str(row["rows"]), *times, f"{row['largest_difference']:.1e}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
