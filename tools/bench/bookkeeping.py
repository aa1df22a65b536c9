"""Times what every rank does with all tokens of a step beside the engines, by one thread of a CPU.

    python tools/bench/bookkeeping.py [--rows 8192] [--gpus 64] [--repeats 3] [--output FILE.json]

Rows are as long as those of the steps' benchmark. One rank brings its own rows together with nobody's: what the network
takes is not in it. The floor is copying what a step's batch holds once.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from reports import spread, write_report
from rich.console import Console
from rich.table import Table

from rlhf_megatron.algorithms.advantage import estimate_advantages
from rlhf_megatron.algorithms.correction import with_correction
from rlhf_megatron.algorithms.objective import objective_fields
from rlhf_megatron.data.packing import plan_micro_batches
from rlhf_megatron.data.rollout_batch import RolloutBatch, boundaries, on_tokens
from rlhf_megatron.recipe.algorithm import AlgorithmSection, RolloutCorrectionSection
from rlhf_megatron.recipe.rollout import DrawnLengthsSection
from rlhf_megatron.topology.exchange import gather_batches

PROMPT, LONGEST, RESPONSES = 256, 4096, 8
LENGTHS = DrawnLengthsSection(mean=1024, sigma=0.6)
TOKENS_PER_GPU = 16_384


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=8192, help="responses of a step (default: %(default)s)")
    parser.add_argument("--gpus", type=int, default=64, help="that the micro-batches are for (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="the first is left out (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="write the results there as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    batch = random_batch(options.rows)
    results = measure(batch, options.gpus, options.repeats)
    show(results, len(batch.tokens))
    if options.output:
        write_report(options.output, {"rows": batch.rows, "tokens": len(batch.tokens), "seconds": results})
    return 0


def random_batch(rows: int) -> RolloutBatch:
    """Groups of responses with lognormal lengths, out of order, as replicas finish them."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([min(LENGTHS.of_row(row), LONGEST) for row in range(rows)]) + PROMPT
    position = torch.arange(int(lengths.sum())) - on_tokens(boundaries(lengths)[:-1], lengths)
    mask = position >= PROMPT
    row_id = torch.randperm(rows, generator=generator)
    return RolloutBatch(
        tokens=torch.randint(150_000, (len(mask),), generator=generator),
        cu_seqlens=boundaries(lengths),
        response_mask=mask,
        rollout_logprobs=-torch.rand(len(mask), generator=generator) * mask,
        rewards=torch.rand(rows, generator=generator).round(),
        group_id=row_id // RESPONSES,
        row_id=row_id,
        weight_version=torch.ones(rows, dtype=torch.int64),
        truncated=torch.zeros(rows, dtype=torch.bool),
    )


def measure(batch: RolloutBatch, gpus: int, repeats: int) -> dict[str, Any]:
    """Seconds of each part."""
    settings = AlgorithmSection()
    correction = RolloutCorrectionSection(type="tis")
    whole = estimate_advantages(gather_batches(batch), settings)
    corrected = whole.with_fields(old_logprobs=whole.rollout_logprobs)
    lengths = whole.lengths.tolist()
    every_other = list(range(0, whole.rows, 2))
    parts: dict[str, Callable[[], Any]] = {
        "in the order of their ids": lambda: gather_batches(batch),
        "lengths for the metrics": lambda: whole.response_lengths.double().mean(),
        "advantages": lambda: estimate_advantages(whole, settings),
        "weights of the loss": lambda: objective_fields(whole, settings, LONGEST),
        "plan of micro-batches": lambda: plan_micro_batches(lengths, TOKENS_PER_GPU, gpus, attention=1e-5),
        "(minibatches: half of the rows)": lambda: whole.select(every_other),
        "(correction of the mismatch)": lambda: with_correction(corrected, correction),
        "floor: copying once": lambda: [
            field.clone() for field in (batch.tokens, batch.response_mask, batch.rollout_logprobs)
        ],
    }
    return {name: seconds(part, repeats) for name, part in parts.items()}


def seconds(part: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Of each repeat but the first, whose memory is new."""
    taken = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        part()
        taken.append(time.perf_counter() - begin)
    return spread(taken[1:])


def show(results: dict[str, Any], tokens: int) -> None:
    """A table on stdout."""
    table = Table(f"{tokens / 1e6:.1f} million tokens", "seconds", "ms for a million")
    for name, taken in results.items():
        table.add_row(name, f"{taken['median']:.3f}", f"{taken['median'] / tokens * 1e9:.2f}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
