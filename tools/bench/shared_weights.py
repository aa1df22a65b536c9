"""Measures rollout weights that are views of the actor's: memory, regathering, and generated tokens per second.

    python tools/bench/shared_weights.py recipes/models/qwen2.5-7b [--gpus 2] [--output FOLDER]

MODEL needs only a config.json: the weights are random. A learning role and an engine of the same tensor parallelism,
once with views and once with copies, each in processes of their own with the same requests; both must generate the same
tokens, before and after the weights were changed. Then the time from the sleeping engine to its first token with new
weights, part by part. FOLDER gets shared.json, copied.json, comparison.json, and timeline.png.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from launching import run_on_ranks
from random_role import random_role, timed
from reports import write_report

from rlhf_megatron.rollout.vllm.process_environment import prepare_environment
from rlhf_megatron.topology.world import join_world

if TYPE_CHECKING:
    from rlhf_megatron.roles.role import Role
    from rlhf_megatron.rollout.vllm.vllm_engine import VllmEngine

WAYS = ("shared", "copied")
TO_FIRST_TOKEN = ("wake weights", "regather", "wake cache", "first token")
LEAST_SPEED = 0.99  # of that with copies, on GPUs


def main() -> int:
    """Measure both ways, one after the other; return 1 where one fails, tokens differ or the speed is too low."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="folder with a config.json")
    parser.add_argument("--gpus", type=int, default=1, help="tensor parallelism of both; default: %(default)s")
    parser.add_argument("--rows", type=int, default=256, help="requests of a generation; default: %(default)s")
    parser.add_argument(
        "--length", type=int, default=256, help="tokens of prompt and response each; default: %(default)s"
    )
    parser.add_argument("--repeats", type=int, default=4, help="timed generations; default: %(default)s")
    parser.add_argument("--kv-cache-gb", type=float, default=16.0, help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("runs/bench_shared_weights"), help="default: %(default)s")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # of the ranks that this starts
    options = parser.parse_args()
    if options.way:
        run_rank(options)
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    for way in WAYS:
        if run_on_ranks(options.gpus, Path(__file__), [*sys.argv[1:], f"--way={way}"]):
            return 1
    shared, copied = (json.loads((options.output / f"{way}.json").read_text(encoding="utf-8")) for way in WAYS)
    comparison = compared(shared, copied)
    (options.output / "comparison.json").write_text(json.dumps(comparison, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(comparison, indent=1))
    draw({way: result["to_first_token"] for way, result in zip(WAYS, (shared, copied), strict=True)}, options.output)
    is_slow = torch.cuda.is_available() and comparison["speed_of_shared"] < LEAST_SPEED
    return int(not comparison["same_tokens"] or is_slow)


def compared(shared: dict[str, Any], copied: dict[str, Any]) -> dict[str, Any]:
    """Compare views with copies: seconds and bytes of both, views first."""
    return {
        "speed_of_shared": shared["tokens_per_second"] / copied["tokens_per_second"],
        "saved_gb": copied["engine_gb"] - shared["engine_gb"],
        "same_tokens": shared["tokens_digests"] == copied["tokens_digests"],
        "weights_were_followed": len(set(shared["tokens_digests"])) > 1,
        **{
            key: [shared[key], copied[key]]
            for key in ("tokens_per_second", "engine_gb", "regather_seconds", "bytes_copied", "bytes_received")
        },
        "to_first_token": [shared["to_first_token"], copied["to_first_token"]],
    }


def draw(parts_of: Mapping[str, Mapping[str, float]], folder: Path) -> None:
    """Draw timeline.png: a bar for each way, its parts one after the other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 2.2))
    colours = dict(zip(TO_FIRST_TOKEN, ("#94a3b8", "#ec4899", "#64748b", "#2563eb"), strict=True))
    for position, parts in enumerate(parts_of.values()):
        left = 0.0
        for part, seconds in parts.items():
            label = part if position == 0 else None
            axes.barh(position, seconds * 1000, left=left, height=0.6, color=colours[part], label=label)
            left += seconds * 1000
    axes.set_yticks(range(len(parts_of)), list(parts_of))
    axes.invert_yaxis()
    axes.set_xlabel("ms from the sleeping engine to its first token with new weights")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="upper center", ncols=len(colours), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.9))
    figure.savefig(folder / "timeline.png", dpi=150)


def run_rank(options: argparse.Namespace) -> None:
    """Do one rank's part; rank 0 writes the report."""
    prepare_environment()
    join_world()
    rank = dist.get_rank()  # an engine that is collected ends torch.distributed for the process
    result = measure(
        str(options.model), options.way, options.rows, options.length, options.repeats, options.kv_cache_gb
    )
    if rank == 0:
        write_report(options.output / f"{options.way}.json", result)


def measure(model: str, way: str, rows: int, length: int, repeats: int, kv_cache_gb: float) -> dict[str, Any]:
    """Measure one way on every rank of one replica; memory in GB of 10^9 bytes, medians of times in seconds."""
    from rlhf_megatron.compat import megatron
    from rlhf_megatron.recipe import RolloutSection
    from rlhf_megatron.regather.execute import Regather
    from rlhf_megatron.regather.plan import plan_regather
    from rlhf_megatron.regather.shard_specs import rollout_shards
    from rlhf_megatron.regather.views import describe_sharing, shareable
    from rlhf_megatron.rollout.vllm.vllm_engine import VllmEngine

    megatron.install()
    torch.manual_seed(1)
    tensor = dist.get_world_size()
    role = random_role(Path(model), rows * length, tensor)
    for name, parameter in role.parameters().items():  # so that sampled tokens depend on every layer
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        elif "embedding" in name or "output_layer" in name:
            parameter.mul_(10.0)
    plan = plan_regather(role.shard_spec(), rollout_shards(role.architecture, tensor, range(tensor)), dist.get_rank())
    views = shareable(plan, role.parameters())
    section = RolloutSection.model_validate(
        {"max_response_length": length, "max_num_seqs": rows, "kv_cache_gb": kv_cache_gb, "layout": {"tensor": tensor}}
    )
    free, dtype = free_memory(), next(iter(role.parameters().values())).dtype
    engine = VllmEngine(
        model, section, str(dtype).removeprefix("torch."), length, 1, shared=views if way == "shared" else None
    )
    taken = free - free_memory()
    regather = Regather(plan, dtype, role.device)
    result = {
        "way": way,
        "gpus": tensor,
        "told": describe_sharing(plan, role.parameters(), engine.parameters()),
        "engine_gb": taken / 1e9,
    }
    seconds, speeds, digests = [], [], []
    for repeat in range(1 + repeats):  # the first is a warm-up
        if repeat == repeats:  # the last is with other weights
            for name, parameter in role.parameters().items():
                parameter.mul_(-0.5 if "linear_fc2" in name or "linear_proj" in name else 1.0)
        seconds.append(refreshed(role, engine, regather, repeat)["regather"])
        began = time.perf_counter()
        digests.append(tokens_digest(engine, role.architecture.vocabulary, rows, length))
        speeds.append(rows * length / (time.perf_counter() - began))
    regather.verify(role.parameters(), engine.parameters())
    timelines = [
        refreshed(role, engine, regather, 1 + repeats + number) | first_token(engine, role.architecture.vocabulary)
        for number in range(repeats)
    ]
    return result | {
        "tokens_per_second": median(speeds[1:]),
        "spread": [min(speeds[1:]), max(speeds[1:])],
        "regather_seconds": median(seconds[1:]),
        "bytes_copied": regather.bytes_copied,
        "bytes_received": regather.bytes_received,
        "tokens_digests": digests[-2:],
        "to_first_token": {part: median(parts[part] for parts in timelines) for part in TO_FIRST_TOKEN},
    }


def refreshed(role: Role, engine: VllmEngine, regather: Any, version: int) -> dict[str, float]:
    """Return seconds of each part of a regathering, from a sleeping engine to one that may generate."""

    def wake_cache() -> None:
        engine.wake_kv_cache()
        engine.weights_updated(version)

    engine.sleep()
    return {
        "wake weights": timed(engine.wake_weights)[0],
        "regather": timed(lambda: regather.run(role.parameters(), engine.parameters()))[0],
        "wake cache": timed(wake_cache)[0],
    }


def first_token(engine: VllmEngine, vocabulary: int) -> dict[str, float]:
    """Return seconds until one prompt of 16 tokens has its first token."""
    from rlhf_megatron.rollout.engine import Request, Sampling

    request = Request(0, [position % (vocabulary - 2) + 2 for position in range(16)], seed=1)
    return {"first token": timed(lambda: engine.generate([request], Sampling(1.0, 1.0, -1, 1, ())))[0]}


def tokens_digest(engine: VllmEngine, vocabulary: int, rows: int, length: int) -> str:
    """Generate ``length`` tokens for each of ``rows`` prompts of as many; a digest of all."""
    from rlhf_megatron.rollout.engine import Request, Sampling

    requests = [
        Request(row, [(row * 7 + position * 13) % (vocabulary - 2) + 2 for position in range(length)], seed=row + 1)
        for row in range(rows)
    ]
    completions = engine.generate(requests, Sampling(1.0, 1.0, -1, length, ()))
    tokens = json.dumps([completion.token_ids for completion in completions])
    return hashlib.sha256(tokens.encode()).hexdigest()


def free_memory() -> int:
    """Return the free bytes of the GPU; 0 where there is none."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


if __name__ == "__main__":
    sys.exit(main())
