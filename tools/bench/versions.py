"""Versions of this code beside each other, in turns, on one machine: steps of a shape of ``step.py``, other benchmarks.

    git archive --prefix=before/ REVISION | tar xf - -C /tmp
    python tools/bench/versions.py before=/tmp/before after=. [--models 7B-80GB] [--rounds 2] [--output versions.json]
    python tools/bench/versions.py before=/tmp/before after=. --scripts "tools/bench/regather.py --gpus 1"

Each version makes the shape by its own ``step_shapes.yaml`` and trains by its own ``launch/train.py``; lengths of
responses are drawn as ``step.py`` says. Of each run the first step does not count. The output has the seconds of every
step that counts and of its phases, by model and version, and the recipes; of a script, which is a benchmark as Python
takes it (where it needs ranks, behind ``launch/torchrun.py --standalone --nproc-per-node 1``), every number of its
report, or of each in the folder that it writes.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from launching import run
from reports import spread, write_report

from rlhf_megatron.monitor.metrics import read_records

# Runs with the tree's own modules: argv is the model, the number of steps and the folder.
PREPARE = """
import sys, yaml
from pathlib import Path
sys.path.insert(0, "tools/bench")
import step
step.prepare_environment()
name, steps, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
shapes = yaml.safe_load(Path("tools/bench/step_shapes.yaml").read_text(encoding="utf-8"))
shape = next(shape for shape in shapes if shape["model"] == name and shape["gpus"] == 1)
step.prepare(shape, step.folder_with_model(folder), steps)
"""


def main() -> int:
    """Run every version once a round; return 1 where a run failed or the last version is slower than another."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trees", nargs="+", metavar="NAME=FOLDER", help="a version of the repository")
    parser.add_argument("--models", nargs="+", help="default: 7B-80GB, on a CPU the toy; none with --scripts")
    parser.add_argument("--scripts", nargs="+", default=[], metavar="COMMAND", help="without --output")
    parser.add_argument("--rounds", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=3, help="that count, of a run (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=600.0, help="limit of one run (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("runs/bench_versions"), help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("docs/results/versions.json"))
    options = parser.parse_args()
    trees = {name: Path(folder).resolve() for name, folder in (tree.split("=", 1) for tree in options.trees)}
    failed, rows, scripts = False, [], []
    default = [] if options.scripts else ["7B-80GB" if torch.cuda.is_available() else "toy"]
    for model in options.models or default:
        row: dict[str, Any] = {"model": model, "steps": options.steps, "runs": {name: [] for name in trees}}
        rows.append(row)
        for number in range(options.rounds):
            for name, tree in trees.items():
                folder = (options.work / f"{model}-{name}-{number}").resolve()
                reason, result = one_run(tree, model, options.steps, folder, options.seconds)
                failed |= bool(reason)
                row["runs"][name].append(result or {"failed": reason})
                print(json.dumps({"model": model, "version": name, **(result or {"failed": reason})}), flush=True)
                row["step_seconds"] = {name: summary(runs) for name, runs in row["runs"].items() if summary(runs)}
                write_report(options.output, {"rows": rows})
    for command in options.scripts:
        reports: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
        scripts.append({"script": command, "figures": {}})
        for _ in range(options.rounds):
            for name, tree in trees.items():
                reason, figures = figures_of(tree, command, options.work.resolve(), options.seconds)
                failed |= bool(reason)
                reports[name].append({"failed": reason} if reason else figures)
                print(json.dumps({"script": command, "version": name, **reports[name][-1]}), flush=True)
                scripts[-1]["figures"] = beside(reports)
                write_report(options.output, {"rows": rows, "scripts": scripts})
    return int(failed or any(slower(row["step_seconds"]) for row in rows))


def one_run(tree: Path, model: str, steps: int, folder: Path, seconds: float) -> tuple[str, dict[str, Any] | None]:
    """Return why a run of the version in ``tree`` failed, and else its seconds by step and phase."""
    environment = with_package(tree, folder.parent)
    prepare = [sys.executable, "-P", "-c", PREPARE, model, str(steps), str(folder)]
    subprocess.run(prepare, cwd=tree, env=environment, check=True)
    torchrun = ["-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    train = [*torchrun, str(tree / "launch" / "train.py"), "recipe.yaml"]
    if reason := run("training", train, seconds, folder, environment):
        return reason, None
    (metrics,) = folder.glob("runs/*/metrics.jsonl")
    counted = [record for record in read_records(metrics) if "train/step_time_ms" in record][1:]
    phases = sorted({name for record in counted for name in record if name.startswith("time/")})
    return "", {
        "step_seconds": [record["train/step_time_ms"] / 1000 for record in counted],
        "phase_seconds": {name: [record.get(name, 0.0) for record in counted] for name in phases},
        "tokens_per_gpu_per_second": [record["perf/tokens_per_gpu_per_sec"] for record in counted],
        "recipe": (folder / "recipe.yaml").read_text(encoding="utf-8").replace(f"{tree}/", ""),
    }


def figures_of(tree: Path, command: str, work: Path, seconds: float) -> tuple[str, dict[str, float]]:
    """Return why a benchmark by the version in ``tree`` failed, and the numbers of its report, by their paths in it."""
    shutil.rmtree(work / tree.name, ignore_errors=True)  # some keep the rows of an earlier run
    output = work / tree.name / "report.json"  # some make a folder of it
    output.parent.mkdir(parents=True)
    line = [*shlex.split(command), "--output", str(output)]
    reason = run("the benchmark", line, seconds, tree, with_package(tree, work))
    return reason, dict(numbers_of(report_at(output)))


def report_at(path: Path) -> Any:
    """Return the JSON value in a file, or those of a folder's files by their names; empty where there is none."""
    if path.is_dir():
        return {file.stem: report_at(file) for file in sorted(path.glob("*.json"))}
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def numbers_of(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield each number in a JSON value with its path; a row of a list is named by the texts in it and its place."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from numbers_of(each, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            texts = [text for text in each.values() if isinstance(text, str)] if isinstance(each, Mapping) else []
            yield from numbers_of(each, f"{path}[{' '.join([str(index), *texts])}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


def beside(reports: Mapping[str, list[dict[str, Any]]]) -> dict[str, dict[str, list[Any]]]:
    """Return each figure's values by version, one a round; runs that failed give their reasons alone."""
    names = dict.fromkeys(name for each in reports.values() for figures in each for name in figures)
    return {
        name: {version: [figures[name] for figures in each if name in figures] for version, each in reports.items()}
        for name in names
    }


def with_package(tree: Path, folder: Path) -> dict[str, str]:
    """Return the environment in which Python finds the package of ``tree``, whose kernels are a package inside it."""
    packages = folder / f"package of {tree.name}"
    shutil.rmtree(packages, ignore_errors=True)
    package = packages / "rlhf_megatron"
    package.mkdir(parents=True)
    for entry in (tree / "rlhf_megatron").iterdir():
        if entry.name != "kernels":
            (package / entry.name).symlink_to(entry)
    (package / "kernels").symlink_to(tree / "kernels")
    path = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": f"{packages}:{path}" if path else str(packages)}


def summary(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Return median and spread of all counted steps of a version."""
    seconds = [second for result in runs for second in result.get("step_seconds", [])]
    return spread(seconds) if seconds else {}


def slower(seconds: dict[str, dict[str, float]]) -> bool:
    """Tell whether the last version's median lies above the longest step of another."""
    *earlier, last = seconds.values()
    return any(last["median"] > each["max"] for each in earlier)


if __name__ == "__main__":
    sys.exit(main())
