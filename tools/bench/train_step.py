"""Forward and backward by a role, beside calling Megatron directly for the same rows on the same model.

    torchrun --nproc-per-node 1 tools/bench/train_step.py recipes/models/qwen2.5-7b [--output FILE.json]

MODEL needs only a config.json: the weights are random. The direct way is Megatron's model, its cross entropy and
backward(), over the same micro-batches: what a training loop without reinforcement learning would do. The role computes
logprobs and entropy besides. Optimizer steps are left out of both: their state would not fit beside a 7B model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from rlhf_megatron.data.batch import RolloutBatch, batch_from_rows
from rlhf_megatron.data.packing import make_micro_batch, plan_micro_batches
from rlhf_megatron.models.architecture import read_architecture
from rlhf_megatron.models.flops import training_flops
from rlhf_megatron.monitor.environment import environment_report
from rlhf_megatron.recipe import OptimizerSection, RoleSection
from rlhf_megatron.rollout.environment import prepare_environment
from rlhf_megatron.topology import megatron_groups
from rlhf_megatron.topology.layout import Layout
from rlhf_megatron.topology.world import join_world

# Dense bfloat16, from the vendor's data sheets.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
WARM_UPS, REPEATS = 2, 5


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row; default: %(default)s")
    parser.add_argument("--tokens-per-gpu", type=int, default=4096, help="of a micro-batch; default: %(default)s")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    prepare_environment()
    join_world()
    megatron_groups.install()
    result = measure(options)
    Console().print_json(json.dumps(result))
    if options.output:
        report = {"command": " ".join(sys.argv), "environment": environment_report(), **result}
        options.output.write_text(json.dumps(report, indent=2, default=str) + "\n")
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both ways in turn, so that both meet the same machine."""
    from rlhf_megatron.roles.role import Role

    architecture = read_architecture(options.model)
    section = RoleSection(tokens_per_gpu=options.tokens_per_gpu)
    role = Role(
        "actor", architecture, Layout(), [0], section, dtype="bfloat16", seed=1,
        optimizer=OptimizerSection(learning_rate=1e-6),
    )  # fmt: skip
    for parameter in role.parameters().values():
        parameter.normal_(std=0.02)
    batch = random_batch(architecture.vocabulary, options.rows, options.length)
    ways = {"role": by_role(role, batch), "megatron": directly(role, batch)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, float] = {}
    for repeat in range(WARM_UPS + REPEATS):
        for name, way in ways.items():
            taken, peak = timed(way)
            if repeat >= WARM_UPS:
                seconds[name].append(taken)
                peaks[name] = peak
    tokens = options.rows * options.length
    operations = training_flops(architecture, batch.lengths.tolist(), tokens - options.rows)
    peak_flops = next((flops for name, flops in PEAK_FLOPS.items() if name in device_name()), None)
    result: dict[str, Any] = {"parameters": sum(p.numel() for p in role.parameters().values()), "tokens": tokens}
    for name, times in seconds.items():
        median = statistics.median(times)
        result[name] = {
            "seconds": median,
            "spread": [min(times), max(times)],
            "tokens_per_second": tokens / median,
            "tflops": operations / median / 1e12,
            "mfu": operations / median / peak_flops if peak_flops else None,
            "peak_memory_gb": peaks[name] / 1e9,
        }
    result["role_over_megatron"] = result["role"]["tokens_per_second"] / result["megatron"]["tokens_per_second"]
    return result


def by_role(role: Any, batch: RolloutBatch) -> Callable[[], None]:
    """Forward and backward as in ``Role.update``."""
    fields = {"weights": torch.full((len(batch.tokens),), 1 / len(batch.tokens))}

    def run() -> None:
        role._chunks[0].zero_grad_buffer()
        role._run(
            batch, fields, role.section.tokens_per_gpu, role._output,
            lambda parts, micro: -(parts[0] * micro.fields["weights"]).sum(), forward_only=False,
        )  # fmt: skip

    return run


def directly(role: Any, batch: RolloutBatch) -> Callable[[], None]:
    """Megatron's model and loss, without a schedule."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    [plan] = plan_micro_batches(batch.lengths.tolist(), role.section.tokens_per_gpu, 1)
    micros = [make_micro_batch(batch, rows, {}, device=role.device) for rows in plan]

    def run() -> None:
        role._chunks[0].zero_grad_buffer()
        for micro in micros:
            packed = PackedSeqParams(
                qkv_format="thd", cu_seqlens_q=micro.cu_seqlens, cu_seqlens_kv=micro.cu_seqlens,
                max_seqlen_q=micro.longest, max_seqlen_kv=micro.longest,
            )  # fmt: skip
            logits = role._chunks[0](micro.tokens[None], micro.positions[None], None, packed_seq_params=packed)
            losses = vocab_parallel_cross_entropy(
                logits.transpose(0, 1).contiguous(), micro.tokens[:, None], tp_group=role.groups.tp
            )
            losses.mean().backward()

    return run


def timed(run: Callable[[], None]) -> tuple[float, float]:
    """(seconds, bytes at the peak)."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    run()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began, float(torch.cuda.max_memory_allocated()) if cuda else 0.0


def device_name() -> str:
    """The GPU's name, or "cpu"."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def random_batch(vocabulary: int, rows: int, length: int) -> RolloutBatch:
    """Rows of random tokens, of which all but the first are sampled."""
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(vocabulary, (length,), generator=generator).tolist() for _ in range(rows)]
    return batch_from_rows([row[:1] for row in tokens], [row[1:] for row in tokens])


if __name__ == "__main__":
    sys.exit(main())
