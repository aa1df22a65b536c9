"""Logprobs and entropy without logits, beside the plain way: seconds and extra memory, forward and backward.

    python tools/bench/logprobs.py [--tokens 4096,16384] [--vocabulary 152064] [--hidden 3584] [--output FILE.json]

The plain way makes all logits, widens them to float32 and leaves the rest to torch's autograd. The floor is the matrix
products alone: one forward and two backward; without logits there is one more, which makes them again.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from reports import write_report
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rlhf_megatron.kernels.linear_logprob import linear_logprobs

WARM_UPS, REPEATS = 3, 10


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return (logprobs, entropy), [T] each, by torch."""
    log_probability = (hidden @ weight.T).float().log_softmax(-1)
    entropy = -(log_probability.exp() * log_probability).sum(-1)
    return log_probability.gather(-1, targets[:, None])[:, 0], entropy


def products(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    """Do the matrix products that the plain way cannot do without."""
    logits = hidden @ weight.T
    torch.mm(logits, weight)
    torch.mm(logits.T, hidden)


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", default="4096,16384", help="default: %(default)s")
    parser.add_argument("--vocabulary", type=int, default=152_064, help="default: %(default)s")
    parser.add_argument("--hidden", type=int, default=3584, help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="write the results there as JSON")
    options = parser.parse_args()
    results = []
    for tokens in (int(number) for number in options.tokens.split(",")):
        results += measure(tokens, options.vocabulary, options.hidden)
    show(results)
    if options.output:
        write_report(options.output, {"results": results})
    return 0


def measure(tokens: int, vocabulary: int, hidden_size: int) -> list[dict[str, Any]]:
    """Return one row per way."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(1)
    hidden = torch.randn(tokens, hidden_size, device=device, dtype=dtype, generator=generator)
    weight = torch.randn(vocabulary, hidden_size, device=device, dtype=dtype, generator=generator) * hidden_size**-0.5
    targets = torch.randint(vocabulary, (tokens,), device=device, generator=generator)
    ways: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
        "plain": plain,
        "without logits": lambda h, w, t: linear_logprobs(h, w, t, None, vocabulary),
        "logits kept": lambda h, w, t: linear_logprobs(h, w, t, None, vocabulary, kept_bytes=1 << 40),
        "matrix products alone": products,
    }
    rows = []
    for name, way in ways.items():
        for learns in (False, True):
            try:
                rows.append(
                    {"tokens": tokens, "way": name, "backward": learns, **one(way, hidden, weight, targets, learns)}
                )
            except torch.OutOfMemoryError:
                rows.append({"tokens": tokens, "way": name, "backward": learns, "out_of_memory": True})
    return rows


def one(way: Callable[..., Any], hidden: Tensor, weight: Tensor, targets: Tensor, learns: bool) -> dict[str, float]:
    """Return median seconds with their spread, and bytes beyond inputs and gradients at the peak."""
    hidden, weight = (leaf.detach().requires_grad_(learns and way is not products) for leaf in (hidden, weight))
    cuda = hidden.is_cuda
    seconds, extra = [], 0
    for repeat in range(WARM_UPS + REPEATS):
        hidden.grad = weight.grad = None
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        began = time.perf_counter()
        outputs = way(hidden, weight, targets)
        if learns and outputs is not None:
            (outputs[0].mean() + 0.01 * outputs[1].mean()).backward()
        if cuda:
            torch.cuda.synchronize()
            extra = torch.cuda.max_memory_allocated() - before
        if repeat >= WARM_UPS:
            seconds.append(time.perf_counter() - began)
        del outputs
    kept = sum(leaf.grad.nbytes for leaf in (hidden, weight) if leaf.grad is not None)
    low, high = min(seconds), max(seconds)
    return {"median_s": statistics.median(seconds), "min_s": low, "max_s": high, "extra_bytes": extra - kept}


def show(results: list[dict[str, Any]]) -> None:
    """Print a table on stdout."""
    table = Table("tokens", "way", "pass", "ms", "extra GB")
    for row in results:
        cells = ("out of memory", "-")
        if "median_s" in row:
            cells = (f"{row['median_s'] * 1e3:.1f}", f"{row['extra_bytes'] / 1e9:.2f}")
        table.add_row(f"{row['tokens']:,}", row["way"], "both" if row["backward"] else "forward", *cells)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
