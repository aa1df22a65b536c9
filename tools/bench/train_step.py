"""Forward and backward by a role, beside calling Megatron directly for the same rows on the same model.

    python launch/torchrun.py --nproc-per-node 1 tools/bench/train_step.py recipes/models/qwen2.5-7b [--output FILE]

MODEL needs only a config.json: the weights are random. The direct way is Megatron's model, its cross entropy and
backward(), over the same micro-batches: what a training loop without reinforcement learning would do. The role computes
logprobs and entropy besides. Optimizer steps are left out of both: their state would not fit beside a 7B model.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import raw_engines
import torch
from random_role import make_parser, random_batch, random_role, run, timed

from rlhf_megatron.data.rollout_batch import RolloutBatch
from rlhf_megatron.models.flops import peak_flops, training_flops

if TYPE_CHECKING:
    from rlhf_megatron.roles.role import Role

WARM_UPS, REPEATS = 2, 5


def main() -> int:
    """Returns the exit status."""
    parser = make_parser(__doc__ or "", length=2048)
    parser.add_argument("--tokens-per-gpu", type=int, default=4096, help="of a micro-batch; default: %(default)s")
    return run(parser.parse_args(), measure)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both ways in turn, so that both meet the same machine."""
    role = random_role(options.model, options.tokens_per_gpu)
    batch, fields = random_batch(role.architecture.vocabulary, options.rows, options.length)
    micros = raw_engines.micro_batches(role, batch)
    ways: dict[str, Callable[[], None]] = {
        "role": by_role(role, batch, fields),
        "megatron": functools.partial(raw_engines.forward_and_backward, role, micros),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, float] = {}
    for repeat in range(WARM_UPS + REPEATS):
        for name, way in ways.items():
            taken, peak = timed(way)
            if repeat >= WARM_UPS:
                seconds[name].append(taken)
                peaks[name] = peak
    tokens = options.rows * options.length
    operations = training_flops(role.architecture, batch.lengths.tolist(), tokens - options.rows)
    possible = peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    result: dict[str, Any] = {"parameters": sum(p.numel() for p in role.parameters().values()), "tokens": tokens}
    for name, times in seconds.items():
        median = statistics.median(times)
        result[name] = {
            "seconds": median,
            "spread": [min(times), max(times)],
            "tokens_per_second": tokens / median,
            "tflops": operations / median / 1e12,
            "mfu": operations / median / possible if possible else None,
            "peak_memory_gb": peaks[name] / 1e9,
        }
    result["role_over_megatron"] = result["role"]["tokens_per_second"] / result["megatron"]["tokens_per_second"]
    return result


def by_role(role: Role, batch: RolloutBatch, fields: dict[str, torch.Tensor]) -> Callable[[], None]:
    """Forward and backward as in ``Role.update``."""

    def forward_and_backward() -> None:
        assert role.trainer is not None
        role.trainer.chunks[0].zero_grad_buffer()
        role._passes.run(
            batch, fields, role.section.tokens_per_gpu, role._output,
            lambda parts, micro: -(parts[0] * micro.fields["weights"]).sum(), forward_only=False,
        )  # fmt: skip

    return forward_and_backward


if __name__ == "__main__":
    sys.exit(main())
