"""Learning curves of algorithms on one task, from the same recipe and model: a table (JSON), a picture, all metrics.

    python tools/bench/learning_curves.py --recipe recipes/smollm_grpo.yaml --algorithms grpo,ppo --seeds 1,2 \\
        --output docs/results/algorithms

Each run is ``torchrun launch/train.py`` with the recipe, the algorithm's overlays and the values below. With
--parallel, so many runs share the machine: curves are the same then, times are not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml
from reports import write_report

from rlhf_megatron.monitor.metrics import read_records

ROOT = Path(__file__).resolve().parents[2]
OVERLAYS = ROOT / "recipes" / "overlays"


@dataclass(frozen=True)
class Algorithm:
    """Overlays by name, and what is laid over them."""

    label: str
    overlays: tuple[str, ...] = ()
    values: tuple[tuple[str, Any], ...] = ()


# DAPO's overlay brings the paper's data and sizes; here it is its algorithm alone.
ALGORITHMS = {
    "grpo": Algorithm("GRPO"),
    "dapo": Algorithm(
        "DAPO",
        values=(
            ("algorithm.kl_coef", 0.0),
            ("algorithm.loss_aggregation", "token_mean"),
            ("algorithm.filter_groups", {"enable": True, "max_num_gen_batches": 3}),
            ("algorithm.overlong_buffer", {"enable": True, "len": 12}),
        ),
    ),
    "dr_grpo": Algorithm("Dr.GRPO", ("dr_grpo",)),
    "rloo": Algorithm("RLOO", ("rloo",)),
    "reinforce_plus_plus": Algorithm("REINFORCE++", ("reinforce_plus_plus",)),
    "remax": Algorithm("ReMax", ("remax",)),
    "gspo": Algorithm("GSPO", ("gspo",)),
    "cispo": Algorithm("CISPO", ("cispo",)),
    "ppo": Algorithm("PPO", ("ppo",)),
}


def main() -> int:
    """Return the exit status: 0, or 1 where a run failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--gpus", type=int, default=1, help="processes of each run")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time")
    parser.add_argument("--devices", type=int, default=0, help="spread single-GPU runs over so many GPUs")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds of one run")
    parser.add_argument("--output", type=Path, required=True, help="OUTPUT.json, OUTPUT.png and OUTPUT/*.jsonl")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="for all runs")
    options = parser.parse_intermixed_args()
    runs = [(name, seed) for seed in options.seeds.split(",") for name in options.algorithms.split(",")]
    options.output.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.parallel) as pool:
        statuses = list(pool.map(lambda item: train(item[1][0], item[1][1], item[0], options), enumerate(runs)))
    summarize(options.output, list(ALGORITHMS))
    return int(any(statuses))


def train(name: str, seed: str, index: int, options: argparse.Namespace) -> int:
    """Make one run, the one at ``index`` in the list; its metrics are copied into the output folder however it
    ended."""
    algorithm, run = ALGORITHMS[name], f"curve_{name}_{seed}"
    folder = options.output
    recipe = folder / f"{run}.yaml"
    bases = [options.recipe, *(OVERLAYS / f"{overlay}.yaml" for overlay in algorithm.overlays)]
    values = [f"{key}={json.dumps(value)}" for key, value in algorithm.values]
    recipe.write_text(
        yaml.safe_dump({"defaults": [os.path.relpath(base, folder) for base in bases], "name": run, "seed": int(seed)})
    )
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={options.gpus}",
        "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0",
        str(ROOT / "launch" / "train.py"), str(recipe), "monitor.console=false", *values, *options.overrides,
    ]  # fmt: skip
    variables = dict(os.environ)
    if options.devices:
        variables["CUDA_VISIBLE_DEVICES"] = str(index % options.devices)
    with (folder / f"{run}.log").open("wb") as log:
        try:
            status = subprocess.run(command, stdout=log, stderr=log, env=variables, timeout=options.timeout).returncode
        except subprocess.TimeoutExpired:
            status = 124
    recipe.unlink()
    left = Path("runs") / run
    if (left / "metrics.jsonl").exists():
        (folder / f"{run}.jsonl").write_bytes((left / "metrics.jsonl").read_bytes())
    print(f"{algorithm.label}, seed {seed}: {'done' if status == 0 else f'status {status}'}", flush=True)
    return status


def summarize(folder: Path, order: Sequence[str]) -> None:
    """Write FOLDER.json and FOLDER.png from the metrics in ``folder``."""
    curves: dict[str, dict[str, dict[int, float]]] = {}
    seconds: dict[str, list[float]] = {}
    for name in order:
        for file in sorted(folder.glob(f"curve_{name}_[0-9]*.jsonl")):
            records = read_records(file)
            curve = {record["step"]: value for record in records if (value := accuracy(record)) is not None}
            if curve:
                curves.setdefault(name, {})[file.stem.rsplit("_", 1)[1]] = curve
                times = [record["train/step_time_ms"] / 1e3 for record in records if "train/step_time_ms" in record]
                seconds.setdefault(name, []).append(median(times) if times else 0.0)
    table: dict[str, Any] = {
        ALGORITHMS[name].label: {
            "seeds": {
                seed: {"first": curve[min(curve)], "last": curve[max(curve)], "steps": max(curve), "curve": curve}
                for seed, curve in of_seed.items()
            },
            "first": fmean(curve[min(curve)] for curve in of_seed.values()),
            "last": fmean(curve[max(curve)] for curve in of_seed.values()),
            "seconds_per_step": fmean(seconds[name]),
        }
        for name, of_seed in curves.items()
    }
    write_report(folder.with_suffix(".json"), {"algorithms": table})
    draw(table, folder.with_suffix(".png"))
    for label, row in table.items():
        print(f"{label:14} {row['first']:.3f} -> {row['last']:.3f}  ({len(row['seeds'])} seeds)")


def accuracy(record: Mapping[str, float]) -> float | None:
    """Return the mean held-out accuracy of a record over its data sources, or None."""
    values = [value for name, value in record.items() if name.startswith("eval/") and name.endswith("/accuracy")]
    return fmean(values) if values else None


def draw(table: Mapping[str, Any], picture: Path) -> None:
    """Draw the mean over seeds of each algorithm's held-out accuracy, and the span of its seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plot

    figure, axes = plot.subplots(figsize=(9, 5.5), dpi=150)
    for label, row in table.items():
        curves = [curve["curve"] for curve in row["seeds"].values()]
        steps = sorted(set.intersection(*(set(curve) for curve in curves)))
        low, high = ([pick(curve[step] for curve in curves) for step in steps] for pick in (min, max))
        middle = [fmean(curve[step] for curve in curves) for step in steps]
        [line] = axes.plot(steps, middle, label=f"{label} {middle[0]:.2f} → {middle[-1]:.2f}", linewidth=1.8)
        if len(curves) > 1:
            axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set_xlabel("step")
    axes.set_ylabel("held-out accuracy")
    axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=0))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(picture)
    plot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
