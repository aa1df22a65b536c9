"""Learning of one task by ours and TRL with the same hyper-parameters: curves by seed, held-out accuracy, minutes.

    python tools/bench/peer_learning.py [--recipe recipes/smollm_grpo.yaml] [--seeds 1 2 3] [--steps 60]

Both start from the recipe's model and take the same prompts in the same order, as many responses to each, the recipe's
reward function and one AdamW step with a constant rate for each batch, in float32 where the model is, else with float32
masters: GRPO, a mean over all tokens, no reference model. What one side alone has by default stays: TRL corrects for
what vLLM's logprobs differ by. The curve is the mean reward of what each samples; in the end transformers, which is
neither, answers the held-out prompts with both models, greedily or at the recipe's evaluation.temperature.

Each run is a process of its own, and a row of the output; the rows of other seeds and sides stay there. The output also
gets a picture.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from launching import run, run_on_ranks
from peer_settings import trl_is_missing, trl_settings, without_folders
from reports import exit_status, missed_by, rows_of, write_report

from rlhf_megatron.evaluation.estimates import bootstrap_interval
from rlhf_megatron.monitor.metrics import read_records
from rlhf_megatron.monitor.run_folder import RunFolder
from rlhf_megatron.recipe import RLRecipe, load_rl
from rlhf_megatron.rollout.vllm.process_environment import has_gpu, prepare_environment
from rlhf_megatron.runtime.command import command
from rlhf_megatron.user_files import run_file

HERE = Path(__file__).resolve().parent
SIDES = ("ours", "trl")
ROWS_AT_ONCE = 100  # of held-out prompts
REWARD = "recipes/rewards/last_number.py"  # where the recipe has no function of its own
# What both sides do alike: the recipe's own where it is not named.
ALIKE: dict[str, Any] = {
    "algorithm.kl_coef": 0.0,
    "algorithm.loss_aggregation": "token_mean",
    "actor.optimizer.schedule": "constant",
    "actor.optimizer.warmup_steps": 0,
    "data.shuffle": False,
    "evaluation.interval": 0,
    "checkpoint.export_at_end": True,
}


@dataclasses.dataclass(frozen=True)
class Task:
    """One recipe's work for a seed, in a folder of its own."""

    recipe: RLRecipe
    seed: int
    folder: Path

    @property
    def run_folder(self) -> RunFolder:
        """That of our run."""
        return RunFolder(self.recipe.run_root, self.recipe.name)

    def settings(self, side: str) -> dict[str, Any]:
        """Return with what a side does it."""
        if side == "ours":
            return self.recipe.model_dump(mode="json")
        settings = trl_settings(self.recipe, "", (), has_gpu())
        settings["arguments"] |= {
            "output_dir": str(self.folder / "trl"),
            "generation_kwargs": {},
            "lr_scheduler_type": "constant",
            "model_init_kwargs": {"dtype": "float32"},
            "logging_strategy": "steps",
            "logging_steps": 1,
            **({"vllm_gpu_memory_utilization": self.recipe.rollout.gpu_memory_utilization} if has_gpu() else {}),
        }
        del settings["prompt_length"]
        return settings | {
            "model": str(self.recipe.model.path),
            "prompts": str(self.recipe.data.train_files[0]),
            "reward": str(self.recipe.reward.function),
            "export": str(self.exported("trl")),
        }

    def exported(self, side: str) -> Path:
        """Return the folder that a side leaves its model in."""
        return self.run_folder.export(self.recipe.steps) if side == "ours" else self.folder / "trl-model"


@command
def main() -> int:
    """Train one after the other; return 1 where one failed, 2 where one cannot run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    recipe = "recipes/smollm_grpo.yaml" if torch.cuda.is_available() else "recipes/tiny_grpo.yaml"
    parser.add_argument("--recipe", type=Path, default=Path(recipe), help="default: %(default)s")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of the recipe, for both sides")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=60, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=1800.0, help="of one run; default: %(default)s")
    parser.add_argument("--work", type=Path, default=Path("runs/bench_learning"), help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("docs/results/peer_learning.json"))
    options = parser.parse_args()
    if "trl" in options.sides and (missing := trl_is_missing()):
        print(missing, file=sys.stderr)
        return 2
    environment = dict(os.environ)  # TRL gets none of what our engine sets
    prepare_environment()
    tasks = [task_of(options, seed) for seed in options.seeds]  # what is wrong with the recipe is said at once
    before = held_out(Path(tasks[0].recipe.model.path), tasks[0].recipe, tasks[0].seed)
    rows = []
    for task in tasks:
        for side in options.sides:
            rows.append(one_run(task, side, options.seconds, environment))
            print(json.dumps({key: rows[-1].get(key) for key in ("side", "seed", "held_out", "failed")}), flush=True)
            everything = rows_beside(rows_of(options.output), rows[-1])
            write_report(options.output, {"before": before, "rows": everything, "sides": summary(everything, before)})
            draw(everything, options.output.with_suffix(".png"))
    return exit_status(missed_by(rows, lambda row: f"{row['side']}, seed {row['seed']}", lambda _: []))


def task_of(options: argparse.Namespace, seed: int) -> Task:
    """Write the prompts of a seed, in an order of its own, into a folder, and return the recipe with them."""
    folder = (options.work / f"seed-{seed}").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    given = load_rl(options.recipe, options.set)
    rows = [row for file in given.data.train_files for row in pyarrow.parquet.read_table(file).to_pylist()]
    random.Random(seed).shuffle(rows)
    wanted = options.steps * given.batch.prompts_per_step
    prompts = (rows * math.ceil(wanted / len(rows)))[:wanted]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(prompts), folder / "prompts.parquet")
    absolute = {
        "run_root": str(folder / "runs"),
        "model.path": str(Path(given.model.path).resolve()),
        "data.train_files": [str(folder / "prompts.parquet")],
        "data.validation_files": [str(Path(file).resolve()) for file in given.data.validation_files],
        "reward.function": str(Path(given.reward.function or REWARD).resolve()),
    }
    alike = {
        "name": "ours",
        "seed": seed,
        "steps": options.steps,
        "batch.minibatch_prompts": given.batch.prompts_per_step,
        "actor.layout.tensor": 1,
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in (ALIKE | absolute | alike).items()]
    return Task(load_rl(options.recipe, [*options.set, *overrides]), seed, folder)


def one_run(task: Task, side: str, seconds: float, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the row of a side and a seed."""
    row: dict[str, Any] = {"side": side, "seed": task.seed}
    settings, output, started = task.settings(side), task.folder / f"{side}.json", time.time()
    path = task.folder / f"{side}.settings.json"
    path.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML, too
    if side == "ours":
        failed = run_on_ranks(1, HERE / "peer_ours.py", [str(path), str(output)], seconds, task.folder)
    else:
        arguments = [str(HERE / "peer_trl.py"), str(path), str(output)]
        failed = run("trl", arguments, seconds, task.folder, environment)
    row["settings"] = without_folders(settings, str(task.folder), str(HERE.parents[1]))
    if failed:
        return row | {"failed": failed}
    result = json.loads(output.read_text(encoding="utf-8"))
    rewards = result["rewards"] if side == "trl" else rewards_of(task)
    return row | {
        "rewards": rewards,
        "step_seconds": result["seconds"],
        "start_seconds": result["first_step_ended"] - started - result["seconds"][0],
        "held_out": held_out(task.exported(side), task.recipe, task.seed),
    }


def rewards_of(task: Task) -> list[float]:
    """Return the mean reward of each step of our run."""
    records = read_records(task.run_folder.metrics)
    return [record["reward/mean"] for record in records if "reward/mean" in record]


def held_out(model: Path, recipe: RLRecipe, seed: int) -> dict[str, float]:
    """Return the accuracy of a model in ``model`` on the recipe's held-out prompts by transformers, and its 95%
    interval."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    files = [pyarrow.parquet.read_table(file) for file in recipe.data.validation_files]
    rows = [row for file in files for row in file.to_pylist()]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(recipe.model.path, padding_side="left")
    network = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, recipe.model.dtype)).to(device).eval()
    module = run_file(Path(str(recipe.reward.function)), "reward")
    assert module is not None
    temperature = recipe.evaluation.temperature
    greedily: dict[str, Any] = {"do_sample": False}
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else greedily
    torch.manual_seed(seed)
    scores: list[float] = []
    for first in range(0, len(rows), ROWS_AT_ONCE):
        part = rows[first : first + ROWS_AT_ONCE]
        asked = tokenizer.apply_chat_template(
            [row["prompt"] for row in part],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        ).to(device)
        with torch.no_grad():
            answers = network.generate(**asked, max_new_tokens=recipe.rollout.max_response_length, **drawn)
        texts = tokenizer.batch_decode(answers[:, asked["input_ids"].size(1) :], skip_special_tokens=True)
        scores += [
            module.compute_score(row["data_source"], text, row["reward_model"]["ground_truth"], {})
            for row, text in zip(part, texts, strict=True)
        ]
    low, high = bootstrap_interval(scores, seed)
    return {"accuracy": statistics.fmean(scores), "low": low, "high": high, "prompts": len(scores)}


def rows_beside(rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return rows with one in place of that of its side and seed."""
    others = [old for old in rows if (old["side"], old["seed"]) != (row["side"], row["seed"])]
    return sorted([*others, row], key=lambda each: (each["side"], each["seed"]))


def finished(rows: Sequence[Mapping[str, Any]], side: str) -> list[Mapping[str, Any]]:
    """Return the rows of a side's runs that did not fail."""
    return [row for row in rows if row["side"] == side and "failed" not in row]


def summary(rows: Sequence[Mapping[str, Any]], before: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return of each side over its seeds: held-out accuracy, minutes on the GPU, and the points gained in one of
    them."""
    sides = {}
    for side in SIDES:
        runs = finished(rows, side)
        if not runs:
            continue
        accuracies = [row["held_out"]["accuracy"] for row in runs]
        minutes = [(row["start_seconds"] + sum(row["step_seconds"])) / 60 for row in runs]
        gained = [
            100 * (accuracy - before["accuracy"]) / each for accuracy, each in zip(accuracies, minutes, strict=True)
        ]
        sides[side] = {
            "seeds": len(runs),
            "accuracy": statistics.fmean(accuracies),
            "accuracy_min": min(accuracies),
            "accuracy_max": max(accuracies),
            "minutes": statistics.fmean(minutes),
            "minutes_of_steps": statistics.fmean(sum(row["step_seconds"]) / 60 for row in runs),
            "points_per_minute": statistics.fmean(gained),
        }
    return sides


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the mean reward of each step, a band over seeds, and beside it the same by minutes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_step, by_time) = pyplot.subplots(1, 2, figsize=(10, 3.4), sharey=True)
    for side, colour in zip(SIDES, ("#2563eb", "#f59e0b"), strict=True):
        runs = finished(rows, side)
        if not runs:
            continue
        length = min(len(row["rewards"]) for row in runs)
        columns = list(zip(*(row["rewards"][:length] for row in runs), strict=True))
        means, steps = [statistics.fmean(column) for column in columns], range(1, length + 1)
        label = f"{side}, {len(runs)} seeds"
        by_step.plot(steps, means, color=colour, label=label)
        by_step.fill_between(steps, [min(c) for c in columns], [max(c) for c in columns], color=colour, alpha=0.2)
        for row in runs:
            seconds, minutes = row["start_seconds"], []
            for each in row["step_seconds"][:length]:
                seconds += each
                minutes.append(seconds / 60)
            by_time.plot(minutes, row["rewards"][: len(minutes)], color=colour, alpha=0.7)
    by_step.set(xlabel="step", ylabel="mean reward")
    by_time.set(xlabel="minutes from the start of the process")
    by_step.legend(frameon=False)
    for axes in (by_step, by_time):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
