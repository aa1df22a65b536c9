"""Plans weight syncs of 96 to 8,192 GPUs: bytes between hosts and within them, and how long they take at assumed links.

    python tools/bench/regather_scale.py --output docs/results/regather_scale.json

No GPU is used and no byte is sent: times are bytes of the busiest GPU over the bandwidths given, one part after the
other, and say nothing about latency or congestion; those with nothing forwarded are a lower bound. DeepSeek-V3's
rollout weights are learned from vLLM's loader, on its dense layers and one with experts, which the others are like.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from reports import write_report

from rlhf_megatron.models.architecture import Architecture, read_architecture
from rlhf_megatron.models.map_files import remembered_rollout_blocks
from rlhf_megatron.models.weight_map import Block, has_rollout_table, layer_of
from rlhf_megatron.regather.learned_rollout import learn_without_ranks
from rlhf_megatron.regather.plan import plan_regather
from rlhf_megatron.regather.shard_specs import rollout_shards, trainer_shards
from rlhf_megatron.regather.traffic import host_traffic
from rlhf_megatron.rollout.vllm.process_environment import prepare_environment
from rlhf_megatron.topology.layout import Layout

ROOT = Path(__file__).resolve().parents[2]
GPUS_PER_HOST, BYTES = 8, 2
GB = 1e9


class Case(NamedTuple):
    """A model's layouts on so many GPUs; ``rollout``: tensor-parallel GPUs of a replica."""

    model: str
    actor: Layout
    rollout: int
    expert_parallel: bool = False


def _qwen(pipeline: int, data: int, rollout: int) -> Case:
    edges = {"first_stage_layers": 12, "last_stage_layers": 12} if pipeline == 6 else {}
    return Case("qwen2.5-72b", Layout(8, pipeline, data, **edges), rollout)


def _deepseek(pipeline: int, data: int, expert: int, first: int, last: int) -> Case:
    layout = Layout(8, pipeline, data, expert=expert, expert_tensor=1, first_stage_layers=first, last_stage_layers=last)
    return Case("deepseek-v3", layout, 32, expert_parallel=True)


CASES = [
    *(_qwen(6, 2, rollout) for rollout in (8, 4)),
    *(_qwen(4, data, rollout) for data in (32, 256) for rollout in (8, 4)),
    _deepseek(12, 1, 8, 5, 6),
    _deepseek(8, 16, 32, 7, 6),
    _deepseek(8, 128, 32, 7, 6),
]


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--link", type=float, default=50.0, help="GB/s of a GPU to other hosts (default: %(default)s)")
    parser.add_argument("--within", type=float, default=300.0, help="GB/s of a GPU in its host (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="write the results there as JSON")
    options = parser.parse_args()
    rows = [measured(case, options.link, options.within) for case in CASES]
    for row in rows:
        print(row)
    if options.output:
        assumed = {"link_gb_per_sec": options.link, "within_host_gb_per_sec": options.within}
        write_report(options.output, {"assumed": assumed | {"gpus_per_host": GPUS_PER_HOST}, "rows": rows})
    return 0


def measured(case: Case, link: float, within: float) -> dict[str, Any]:
    """Return GB and seconds of one weight sync; seconds that one rank's plan takes here."""
    architecture = read_architecture(ROOT / "recipes" / "models" / case.model)
    world = case.actor.size
    learned = None if has_rollout_table(architecture) else learned_blocks(architecture, case)
    sources = trainer_shards(architecture, case.actor, range(world))
    wanted = rollout_shards(architecture, case.rollout, range(world), case.expert_parallel, learned)
    start = time.process_time()
    plan = plan_regather(sources, wanted, world // 2, GPUS_PER_HOST)
    seconds = time.process_time() - start
    traffic = host_traffic(sources, wanted, GPUS_PER_HOST)
    between, alone = (count * BYTES / GB for count in (traffic.most_between_hosts, max(traffic.unshared.values())))
    inside = BYTES / GB * max([*traffic.to_mates.values(), *traffic.from_mates.values(), 0.0])
    return {
        "model": case.model,
        "gpus": world,
        "actor": {name: getattr(case.actor, name) for name in ("tensor", "pipeline", "data", "expert")},
        "rollout": {"tensor": case.rollout, "expert_parallel": case.expert_parallel},
        "GB of rollout weights of a GPU": round(plan.bytes_kept(BYTES) / GB, 2),
        "GB between hosts": round(traffic.between_hosts * BYTES / GB, 1),
        "GB between hosts, nothing forwarded": round(sum(traffic.unshared.values()) * BYTES / GB, 1),
        "GB between hosts, busiest GPU": round(between, 2),
        "GB within the host, busiest GPU": round(inside, 2),
        "seconds": round(between / link + inside / within, 3),
        "seconds, nothing forwarded": round(max(alone, between) / link, 3),
        "CPU seconds of a rank's plan": round(seconds, 1),
    }


def learned_blocks(architecture: Architecture, case: Case) -> Sequence[Sequence[Block]]:
    """Return each tensor rank's blocks of the whole model, from those of its first layer with experts and what is
    before."""
    prepare_environment()
    folder, alike = ROOT / "recipes" / "models" / case.model, architecture.layer_kinds
    last = next(layer for layer, kind in enumerate(alike) if kind.feed_forward == "experts")
    with tempfile.TemporaryDirectory() as name:
        config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": last + 1}
        (Path(name) / "config.json").write_text(json.dumps(config))
        for _ in learn_without_ranks(
            read_architecture(name), name, case.rollout, case.expert_parallel, "bfloat16", name
        ):
            pass
        learned = remembered_rollout_blocks(name, case.rollout, case.expert_parallel, name)
    assert learned is not None
    return [[each for block in blocks for each in _repeated(block, last, architecture.layers)] for blocks in learned]


def _repeated(block: Block, last: int, layers: int) -> list[Block]:
    if layer_of(block.tensor) != last:
        return [block]
    old = f"layers.{last}."
    return [
        block._replace(
            tensor=block.tensor.replace(old, f"layers.{layer}."),
            parameter=block.parameter.replace(old, f"layers.{layer}."),
        )
        for layer in range(last, layers)
    ]


if __name__ == "__main__":
    sys.exit(main())
