"""Whole GRPO steps with random weights and lengths known in advance, beside the raw engines on the same tokens.

    python tools/bench/step.py [--models 0.5B 7B] [--gpus 1] [--output docs/results/step.json] [--plot]

The shapes are those of ``step_shapes.yaml``: prompts of random tokens, responses of lognormal lengths that are the same
in every step; where responses go on after an update each prompt has its own, or the same would be left each time. The
steps are those of the training loop (``step_measure.py``); times, speeds and memory are what it logs, without the first
step, or the first few until as many responses are in flight as will be. In the same run, with the same engine and
model, vLLM alone generates as many tokens for as many prompts, and Megatron alone runs forward, and forward and
backward, over them (``raw_engines.py``). The efficiency is the sum of these, without the forward pass where the step
has none, over the time of a step; of a phase in which the raw engine was slower it counts ours, so a slow raw engine
flatters nobody. The overhead is what of a step is none of generate, logprobs, update and regather. Rows of other shapes
in the output stay there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
import yaml
from launching import run_on_ranks
from reports import exit_status, missed_by, model_and_gpus, rows_of, rows_with, spread, write_report

from rlhf_megatron.data.tokenizer_loading import load_tokenizer
from rlhf_megatron.monitor.metrics import read_records
from rlhf_megatron.planning.memory import estimate
from rlhf_megatron.planning.model_folders import planned_architectures
from rlhf_megatron.recipe import RLRecipe, load_rl, role_ranks, rollout_ranks
from rlhf_megatron.rollout.vllm.process_environment import prepare_environment

HERE = Path(__file__).resolve().parent
ENGINE_PHASES = ("generate", "logprobs", "update", "regather")
RAW_PHASES = {"generate": "generate", "forward": "logprobs", "forward and backward": "update"}
COLOURS = {
    "generate": "#2563eb", "score": "#f59e0b", "sleep": "#a16207", "logprobs": "#10b981", "update": "#ec4899",
    "regather": "#8b5cf6", "other": "#94a3b8", "forward": "#10b981", "forward and backward": "#ec4899",
}  # fmt: skip
SECONDS_FOR_ONE_SHAPE = 1500.0
STALENESS = "token_staleness_mean"
IN_FLIGHT = tuple(f"rollout/{each}" for each in ("in_flight_mean", "staleness_mean", "staleness_max", STALENESS))
ACCEPTANCE = "rollout/speculation_acceptance_length"
BESIDE_TIMES = (
    "perf/mfu_training", "perf/gpu_utilization", "perf/gpu_power_watts", "memory/gpu_retries", "train/mismatch_kl",
    ACCEPTANCE, *IN_FLIGHT,
)  # fmt: skip
IN_FLIGHT_WANTED, SECONDS_WANTED, STALENESS_WANTED = 200, 36.0, 1.0  # of 7B-resume
SPECULATIVE_SHARE = {1.0: 1.02, 2.0: 0.75}  # of the time without drafts, by tokens of a step
TOKENS_PER_SECOND = {"7B": 4500.0}  # on one GPU of the kind that the shapes are for


def main() -> int:
    """Measure one shape after the other; return 1 where one failed or missed a target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    shapes = yaml.safe_load((HERE / "step_shapes.yaml").read_text(encoding="utf-8"))
    here = torch.cuda.device_count()
    names = list(dict.fromkeys(shape["model"] for shape in shapes))
    real = [name for name in names if not name.startswith("toy")]
    parser.add_argument("--models", nargs="+", choices=names, default=real if here else ["toy"])
    parser.add_argument("--gpus", type=int, nargs="+", help="numbers of ranks; default: all that there are GPUs for")
    parser.add_argument(
        "--steps", type=int, default=4, help="of a run; of several the first does not count; default: %(default)s"
    )
    parser.add_argument("--repeats", type=int, default=2, help="of the raw engines, or 0; default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("docs/results/step.json"), help="default: %(default)s")
    parser.add_argument("--plot", action="store_true", help="draw the rows beside the output")
    parser.add_argument("--work", type=Path, default=Path("runs/bench_step"), help="for runs; default: %(default)s")
    parser.add_argument(
        "--informative", type=float, metavar="SHARE", help="share of the groups with an advantage; default: all"
    )
    parser.add_argument(
        "--speculative", type=float, metavar="LENGTH", help="tokens of a step and sequence, as if drafts were right"
    )
    parser.add_argument("--max-running", type=int, help="sequences up to which there are drafts; default: any number")
    options = parser.parse_args()
    prepare_environment()
    wanted = options.gpus or [shape["gpus"] for shape in shapes if shape["gpus"] <= (here or 2)]
    rows = []
    for shape in shapes:
        if shape["model"] in options.models and shape["gpus"] in wanted:
            drafted = speculating(shape, options.speculative, options.max_running)
            rows.append(measured(drafted, options.work, options.steps, options.repeats, options.informative))
            print(json.dumps(rows[-1]), flush=True)
            write(options.output, rows[-1])
    status = exit_status(misses(rows, rows_of(options.output)))
    if options.plot:
        draw(json.loads(options.output.read_text(encoding="utf-8")), options.output.with_suffix(".png"))
    return status


def speculating(shape: Mapping[str, Any], length: float | None, max_running: int | None) -> Mapping[str, Any]:
    """Return the shape with drafts of which a step accepts so many that it gives ``length`` tokens of a sequence."""
    if length is None:
        return shape
    drafts = {"synthetic_acceptance_length": length, "max_running": max_running or 2**16}
    rollout = {**shape["recipe"].get("rollout", {}), "speculative": drafts}
    limit = f" up to {max_running} running" if max_running else ""
    name = f"{shape['model']}, {length:g} tokens a step{limit}"
    return {**shape, "label": name, "speculative": length, "recipe": {**shape["recipe"], "rollout": rollout}}


def measured(
    shape: Mapping[str, Any], work: Path, steps: int, repeats: int, informative: float | None = None
) -> dict[str, Any]:
    """Return the row of one shape, from a run of its own; ``informative``: the share of the groups with an
    advantage."""
    folder = folder_with_model(work / f"{shape['model']}-{shape['gpus']}")
    warm_up = shape.get("warm_up", 1)
    recipe = prepare(shape, folder, steps + warm_up - 1, informative)
    row = {"model": shape.get("label", shape["model"]), "gpus": shape["gpus"], "recipe": shape["recipe"]}
    with contextlib.chdir(folder):  # what the recipe's paths are relative to
        row["planned_memory_gb"] = estimate(recipe, planned_architectures(recipe), shape["gpus"]).phases
    if "speculative" in shape:
        row["speculative"] = shape["speculative"]
    if informative is not None:
        row |= {"model": f"{shape['model']}, {informative:.0%} informative", "informative": informative}
    arguments = ["recipe.yaml", str(repeats), "raw.json"]
    failed = run_on_ranks(shape["gpus"], HERE / "step_measure.py", arguments, SECONDS_FOR_ONE_SHAPE, folder)
    records = folder / "runs" / recipe.name / "metrics.jsonl"
    if failed:  # what steps there are may have taken minutes
        return row | {"failed": failed, "records": read_records(records) if records.exists() else []}
    raw = json.loads((folder / "raw.json").read_text(encoding="utf-8"))
    metrics = read_records(records)
    apart = set(rollout_ranks(recipe, shape["gpus"])).isdisjoint(role_ranks(recipe, "actor", shape["gpus"]))
    return row | summary(metrics, raw, recipe.old_logprobs == "recompute", warm_up, apart)


def folder_with_model(folder: Path) -> Path:
    """Return the folder's absolute path, with nothing but a tiny model in it."""
    folder = folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    make_model = [sys.executable, "-P", str(HERE.parent / "make_tiny_model.py"), f"--output={folder / 'model'}"]
    subprocess.run(make_model, check=True, stdout=subprocess.DEVNULL)
    return folder


def prepare(shape: Mapping[str, Any], folder: Path, steps: int, informative: float | None = None) -> RLRecipe:
    """Write prompts and recipe into a ``folder`` with a tiny model, which gets the shape; return the recipe."""
    if "config" in shape:
        (folder / "model" / "config.json").write_text(json.dumps(model_config(shape)), encoding="utf-8")
    values = {
        "defaults": [str(HERE / "step_recipe.yaml")],
        **shape["recipe"],
        "steps": steps,
        "monitor": {"timeline": {"steps": [0, steps]}},
    }
    if informative is not None:
        function = f"{HERE / 'step_reward.py'}:compute_score"
        values["reward"] = {"rule": "data_source", "length_high": None, "function": function}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    recipe = load_rl(folder / "recipe.yaml")
    write_prompts(recipe, folder / "model", folder / "prompts.parquet", 1.0 if informative is None else informative)
    return recipe


def model_config(shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a shape's model: as many layers as it says, and with its other changes."""
    path = HERE.parent.parent / shape["config"] / "config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": shape.get("layers", config["num_hidden_layers"])} | shape.get("changed", {})
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
    return config


def write_prompts(recipe: RLRecipe, model: Path, path: Path, informative: float = 1.0) -> None:
    """Write prompts for all steps and one more, each of exactly the recipe's longest length: random digits, a token
    each.

    Of every step's prompts the share ``informative``, spread evenly, is not of data source "uniform".
    """
    tokenizer, draw = load_tokenizer(model), random.Random(recipe.seed)
    around = len(tokenizer.encode_chat([{"role": "user", "content": "0"}])) - 1
    digits = recipe.data.max_prompt_length - around
    rows = [
        {
            "data_source": "random" if int((row + 1) * informative) > int(row * informative) else "uniform",
            "prompt": [{"role": "user", "content": "".join(draw.choices("0123456789", k=digits))}],
            "reward_model": {"style": "rule", "ground_truth": ""},
        }
        for row in range(recipe.batch.prompts_per_step * (recipe.steps + 1 + recipe.rollout.updates_in_flight))
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def summary(
    metrics: Sequence[Mapping[str, float]],
    raw: Mapping[str, Sequence[float]],
    forward: bool,
    warm_up: int = 1,
    apart: bool = False,
) -> dict[str, Any]:
    """Return the figures of a row, from a run's records and the seconds of the raw engines.

    ``forward``: whether a step has a forward pass of its own, for logprobs from before its updates. ``warm_up``: steps
    that do not count, but of a run of one step that one does. ``apart``: whether others generate than train, at the
    same time: the longer of both is the ceiling, and steps in which nobody generates, the last ones, do not count.
    """
    steps = [of_step for of_step in metrics if "train/step_time_ms" in of_step]
    counted = [of_step for of_step in steps if "time/generate" in of_step][warm_up:] or steps[-1:]
    phases = [name.removeprefix("time/") for name in counted[0] if name.startswith("time/")]
    seconds = [of_step["train/step_time_ms"] / 1000 for of_step in counted]
    in_engines = [
        together({phase: of_step.get(f"time/{phase}", 0.0) for phase in ENGINE_PHASES}, apart) for of_step in counted
    ]
    needed = [part for part in raw if part != "forward" or forward]  # nothing where the raw engines did not run
    phase_seconds = {phase: spread([of_step[f"time/{phase}"] for of_step in counted]) for phase in phases}
    faster = {
        phase: min(statistics.median(raw[part]), phase_seconds[phase]["median"])
        for part in needed
        if (phase := RAW_PHASES[part])
    }
    start = {name.removeprefix("start/"): value for name, value in metrics[0].items() if name.startswith("start/")}
    result: dict[str, Any] = {
        "step_seconds": spread(seconds),
        "phase_seconds": phase_seconds,
        "tokens_per_gpu_per_second": spread([of_step["perf/tokens_per_gpu_per_sec"] for of_step in counted]),
        "generated_tokens_per_second": spread([of_step["rollout/throughput_tokens_per_sec"] for of_step in counted]),
        "raw_seconds": {part: spread(times) for part, times in raw.items()},
        "raw_needed": needed,
        "overhead": statistics.median(1 - within / step for within, step in zip(in_engines, seconds, strict=True)),
        "imbalance": spread([of_step["train/imbalance"] for of_step in counted]),
        "peak_memory_gb": {phase: max(of_step[f"memory/{phase}_gb"] for of_step in counted) for phase in phases},
        "start_seconds": start,
        # Without Python, imports, joining the others, and vLLM's own start.
        "start_own_seconds": start["total"] - start["launch"] - start["engine"],
    }
    if needed:
        result["efficiency"] = together(faster, apart) / statistics.median(seconds)
    for name in BESIDE_TIMES:
        if all(name in of_step for of_step in counted):
            result[name.split("/")[1]] = spread([of_step[name] for of_step in counted])
    return result


def together(seconds: Mapping[str, float], apart: bool) -> float:
    """Return how long phases take one after the other or, `apart`, generation beside the others."""
    generation = seconds["generate"]
    others = sum(seconds.values()) - generation
    return max(generation, others) if apart else generation + others


def write(output: Path, row: Mapping[str, Any]) -> None:
    """Put a row into the output in place of an earlier one of its shape."""
    settings = yaml.safe_load((HERE / "step_recipe.yaml").read_text(encoding="utf-8"))
    write_report(output, {"settings": settings, "rows": rows_with(output, row)})


def misses(rows: Sequence[Mapping[str, Any]], all_rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return missed targets, in words; the toy has none but to run.

    ``all_rows``: those of one GPU among them are what more GPUs are held against.
    """
    alone = {row["model"]: speed(row) for row in all_rows if row["gpus"] == 1 and "failed" not in row}

    def texts(row: Mapping[str, Any]) -> Iterator[str]:
        model, tokens_per_second = row["model"], speed(row)
        if model.startswith("toy"):
            return
        if row.get("efficiency", 1.0) < 0.85:
            yield f"{row['efficiency']:.0%} of the raw engines' speed, below 85%"
        if row["overhead"] > 0.05:
            yield f"{row['overhead']:.1%} of the step is neither engine nor model, above 5%"
        if row["start_own_seconds"] > 10:
            yield f"{row['start_own_seconds']:.1f} s of our own before the first step, above 10 s"
        if "mfu_training" in row and row["mfu_training"]["median"] < 0.45:
            yield f"{row['mfu_training']['median']:.0%} MFU of the update, below 45%"
        if model == "7B-resume":
            in_flight, stale = row["in_flight_mean"]["median"], row[STALENESS]["median"]
            if in_flight < IN_FLIGHT_WANTED:
                yield f"{in_flight:.0f} responses in flight, below {IN_FLIGHT_WANTED}"
            if row["step_seconds"]["median"] > SECONDS_WANTED:
                yield f"{row['step_seconds']['median']:.1f} s a step, above {SECONDS_WANTED:g} s"
            if stale > STALENESS_WANTED:
                yield f"tokens {stale:.2f} updates old in the mean, above {STALENESS_WANTED:g}"
        wanted = wanted_generation(row, all_rows)
        if wanted is not None and (measured := row["phase_seconds"]["generate"]["median"]) > wanted:
            yield f"{measured:.1f} s to generate, above {wanted:.1f} s"
        if row["gpus"] == 1 and tokens_per_second < TOKENS_PER_SECOND.get(model, 0.0):
            yield f"{tokens_per_second:,.0f} tokens/s, below {TOKENS_PER_SECOND[model]:,.0f}"
        if row["gpus"] > 1 and tokens_per_second < 0.92 * alone.get(model, 0.0):
            yield f"{tokens_per_second / alone[model]:.0%} of the speed of one GPU for each, below 92%"

    return missed_by(rows, model_and_gpus, texts)


def wanted_generation(row: Mapping[str, Any], all_rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the seconds that a row with drafts may generate for, by its shape's row without, where there is one."""
    share = SPECULATIVE_SHARE.get(row.get("speculative", 0.0), 0.0)
    plain = row["model"].partition(",")[0], row["gpus"]
    for other in all_rows if share else ():
        if (other["model"], other["gpus"]) == plain and "failed" not in other:
            return share * float(other["phase_seconds"]["generate"]["median"])
    return None


def speed(row: Mapping[str, Any]) -> float:
    """Return tokens per second and GPU."""
    return float(row["tokens_per_gpu_per_second"]["median"])


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Draw two bars for each shape: the phases of a step as shares of it, and below what the raw engines need. Beside
    these the efficiency, of the faster in each phase."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in record["rows"] if "failed" not in row]
    height = 1.6 + 0.8 * max(1, len(rows))  # inches
    figure, axes = pyplot.subplots(figsize=(9, height))
    for position, row in enumerate(rows):
        step = row["step_seconds"]["median"]
        phases = {phase: times["median"] for phase, times in row["phase_seconds"].items() if phase in COLOURS}
        phases["other"] = max(0.0, step - sum(phases.values()))
        raw = {part: row["raw_seconds"][part]["median"] for part in row["raw_needed"]}
        for offset, parts in ((-0.2, phases), (0.2, raw)):
            left = 0.0
            for part, seconds in parts.items():
                axes.barh(position + offset, seconds / step, left=left, height=0.36, color=COLOURS[part])
                left += seconds / step
        axes.text(1.01, position - 0.2, f"{step:.3g} s", va="center", fontsize=8)
        if raw:
            axes.text(left + 0.01, position + 0.2, f"fastest: {row['efficiency']:.0%}", va="center", fontsize=8)
    names = [f"{row['model']}, {row['gpus']} GPU{'s' * (row['gpus'] > 1)}" for row in rows]
    if "no GPU" in record["hardware"]:
        names = [f"{row['model']}, {row['gpus']} CPU rank{'s' * (row['gpus'] > 1)}" for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set_xlabel("share of a step")
    axes.set_title(record["hardware"], fontsize=9)
    legend = [part for part in COLOURS if not part.startswith("forward")]
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[part]) for part in legend]
    figure.legend(handles, legend, loc="lower center", ncols=len(legend), fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(rect=(0, 0.3 / height, 1, 1))
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
