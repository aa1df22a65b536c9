"""Search for the values of recipe keys by which a run comes out best: Optuna's TPE over whole runs, one after another.

    python tools/tune.py recipes/smollm_grpo.yaml --search actor.optimizer.learning_rate=1e-6..1e-4:log \\
        --search "algorithm.kl_coef=0|0.001|0.01" --trials 20 --nproc-per-node 2 evaluation.interval=10

Each trial is a run of its own, RECIPE's name with -trial-N behind it. A trial whose evaluations are worse than the
median of the others' after as many steps is ended early. The study is kept in RUN_ROOT/NAME-study/, with a picture of
its trials and the best as a recipe: the same command goes on with it, and several at a time share it.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from rlhf_megatron.errors import UserError
from rlhf_megatron.monitor.metrics import read_steps
from rlhf_megatron.monitor.run_folder import RunFolder
from rlhf_megatron.recipe import RecipeError, load_recipe
from rlhf_megatron.recipe.arguments import add_recipe_arguments
from rlhf_megatron.recipe.load import apply_override
from rlhf_megatron.runtime.command import ArgumentParser, command
from rlhf_megatron.shipped import SHIPPED, recipe_file
from rlhf_megatron.untrusted import reason_of, shown

TRAIN = SHIPPED / "launch" / "train.py"
SECONDS_BETWEEN_LOOKS = 2.0
SECONDS_TO_END = 120.0  # a run that is asked to end may be in the middle of a step
FAILURES_IN_A_ROW = 3
MOST = 1e18  # of a bound of a range: beyond it whole numbers have no floats
CONSOLE = Console(stderr=True)


@dataclass(frozen=True)
class Range:
    """A key's values: from ``low`` to ``high``, or one of ``choices``, each as YAML writes it."""

    key: str
    low: float = 0.0
    high: float = 0.0
    logarithmic: bool = False
    whole: bool = False
    choices: tuple[str, ...] = ()

    def suggest(self, trial: Any) -> str:
        """Return the value that Optuna's ``trial`` takes, as the text of an override."""
        if self.choices:
            return str(trial.suggest_categorical(self.key, list(self.choices)))
        if self.whole:
            return str(trial.suggest_int(self.key, int(self.low), int(self.high), log=self.logarithmic))
        return repr(float(f"{trial.suggest_float(self.key, self.low, self.high, log=self.logarithmic):.4g}"))


def parse_range(text: str) -> Range:
    """Return KEY=LOW..HIGH, KEY=LOW..HIGH:log or KEY=A|B|C; raises RecipeError for anything else."""
    key, separator, values = text.partition("=")
    number = r"[-+]?[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?"
    match = re.fullmatch(rf"({number})\.\.({number})(:log)?", values)
    if match and key:
        low, high, logarithmic = float(match[1]), float(match[2]), bool(match[3])
        if low < high <= MOST and low >= -MOST and (low > 0 or not logarithmic):
            whole = all(re.fullmatch(r"[-+]?[0-9]+", part) for part in match.group(1, 2))
            return Range(key, low, high, logarithmic, whole)
    elif separator and key and len(choices := tuple(values.split("|"))) > 1:
        return Range(key, choices=choices)
    raise RecipeError(
        f"--search {text!r}: write KEY=LOW..HIGH, KEY=LOW..HIGH:log (above 0) or KEY=A|B|C, with LOW below HIGH"
    )


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 done, 1 where runs keep failing, 2 for input that is not right."""
    return tune(build_parser().parse_intermixed_args(arguments))


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of the tool."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_recipe_arguments(parser, overrides="the same in all trials")
    parser.add_argument(
        "--search", action="append", default=[], metavar="KEY=RANGE", help="LOW..HIGH, LOW..HIGH:log, A|B|C"
    )
    parser.add_argument("--metric", default="eval/*/accuracy", help="what is compared, or a pattern (%(default)s)")
    parser.add_argument("--mode", choices=("max", "min"), default="max", help="what is better (%(default)s)")
    parser.add_argument("--last", type=int, default=1, help="the mean of so many last values counts (%(default)s)")
    parser.add_argument("--trials", type=int, default=20, help="of the whole study (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the search (%(default)s)")
    parser.add_argument("--no-pruning", action="store_true", help="let every trial take all its steps")
    parser.add_argument(
        "--nproc-per-node", type=int, default=1, help="processes of a run on this machine (%(default)s)"
    )
    parser.add_argument("--launch", help='in the place of torchrun, such as "srun ... torchrun ..."')
    return parser


def tune(options: argparse.Namespace) -> int:
    """Run trials until the study has as many as asked for; raises UserError for input that is not right."""
    for name in ("last", "trials", "nproc_per_node"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')}={getattr(options, name)}: must be 1 or more")
    if not 0 <= options.seed < 2**32:
        raise UserError(f"--seed={shown(options.seed, 40)}: must be from 0 to 2^32 - 1")
    check_launcher(options.launch)
    optuna = import_optuna()
    ranges = [parse_range(text) for text in options.search]
    keys = [each.key for each in ranges]
    twice = next((key for key in keys if keys.count(key) > 1 or key in ("name", "run_root")), None)
    if twice:
        raise RecipeError(
            f"--search {shown(twice)}: name each key once, and neither name nor run_root, which tell trials"
        )
    if not ranges:
        raise RecipeError("--search: name a key to search over, such as actor.optimizer.learning_rate=1e-6..1e-4:log")
    recipe = load_recipe(options.recipe, options.overrides)
    for each in ranges:  # a key that no recipe has is reported before anything runs
        load_recipe(options.recipe, [*options.overrides, f"{each.key}={(each.choices or (f'{each.low:g}',))[0]}"])
    folder = Path(recipe.run_root) / f"{recipe.name}-study"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run_root: {folder} cannot be written ({reason_of(error)}); choose another") from error
    study = open_study(options, recipe.name, folder, optuna)
    failures = 0
    while len(finished(study, optuna)) < options.trials:
        trial = study.ask()
        try:
            problem = run_trial(options, study, trial, ranges, optuna)
        except BaseException:
            study.tell(trial, state=optuna.trial.TrialState.FAIL, skip_if_finished=True)
            raise
        failures = failures + 1 if problem else 0
        if problem:
            CONSOLE.print(f"trial {trial.number} failed: {problem}", markup=False, highlight=False, soft_wrap=True)
        write_results(options, study, optuna, folder)
        if failures == FAILURES_IN_A_ROW:
            print(f"error: {failures} trials in a row failed; the last: {problem}", file=sys.stderr)
            return 1
    Console().print(table(study, ranges, options.metric))
    print(f"best: {folder / 'best.yaml'}\npicture: {folder / 'trials.png'}")
    return 0


def check_launcher(text: str | None) -> None:
    """Raise UserError where ``text`` is no command that this machine has."""
    try:
        words = shlex.split(text) if text is not None else [sys.executable]
    except ValueError as error:
        raise UserError(f"--launch {shown(text)}: {error}; quote it as in a shell") from error
    if not words or shutil.which(words[0]) is None:
        raise UserError(f"--launch {shown(text)}: there is no such program; name one, such as srun")


def open_study(options: argparse.Namespace, name: str, folder: Path, optuna: ModuleType) -> Any:
    """Return the study in ``folder``, new or gone on with; raises UserError where its log cannot be read."""
    log = folder / "study.log"
    try:
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(log)))
        return optuna.create_study(
            study_name=name,
            storage=storage,
            sampler=optuna.samplers.TPESampler(seed=options.seed, multivariate=True),
            pruner=optuna.pruners.NopPruner()
            if options.no_pruning
            else optuna.pruners.MedianPruner(n_startup_trials=3),
            direction="maximize" if options.mode == "max" else "minimize",
            load_if_exists=True,
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{log}: cannot be gone on with ({reason_of(error)}); move it away to begin anew") from error


def import_optuna() -> ModuleType:
    """Return Optuna, which says no more than errors; raises RecipeError where it is not installed."""
    try:
        import optuna
        import optuna.storages.journal
    except ImportError as error:
        raise RecipeError(f"optuna cannot be imported ({error}); pip install optuna") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    module: ModuleType = optuna
    return module


def finished(study: Any, optuna: ModuleType) -> list[Any]:
    """Return the trials that have a value, or were ended early."""
    states = optuna.trial.TrialState
    trials: list[Any] = study.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED))
    return trials


def run_trial(
    options: argparse.Namespace, study: Any, trial: Any, ranges: Sequence[Range], optuna: ModuleType
) -> str | None:
    """Run one trial and tell the study; return why it failed, if it did."""
    states = optuna.trial.TrialState
    try:
        chosen = [f"{each.key}={each.suggest(trial)}" for each in ranges]
    except ValueError as error:
        raise UserError(
            f"--search: the study has other ranges ({reason_of(error)}); give the run another name"
        ) from error
    try:
        recipe = load_recipe(options.recipe, [*options.overrides, *chosen])
        recipe = load_recipe(options.recipe, [*options.overrides, *chosen, f"name={recipe.name}-trial-{trial.number}"])
    except RecipeError as error:
        study.tell(trial, state=states.FAIL)
        return str(error)
    trial.set_user_attr("overrides", chosen)
    CONSOLE.print(f"trial {trial.number}: {' '.join(chosen)}", markup=False, highlight=False, soft_wrap=True)
    run = RunFolder(recipe.run_root, recipe.name)
    try:
        run.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run_root: {run.path} cannot be written ({reason_of(error)}); choose another") from error
    launcher = shlex.split(options.launch) if options.launch else torchrun(options.nproc_per_node)
    command = [*launcher, str(TRAIN), options.recipe, *options.overrides, *chosen, f"name={recipe.name}"]
    with (run.path / "tune.log").open("wb") as log, ended(command, log) as process:
        while process.poll() is None:
            time.sleep(SECONDS_BETWEEN_LOOKS)
            for step, value in values_of(run, options.metric).items():
                if step and step not in trial.storage.get_trial(trial._trial_id).intermediate_values:
                    trial.report(value, step)
            if trial.should_prune():
                study.tell(trial, state=states.PRUNED)
                return None
    values = list(values_of(run, options.metric).values())
    if process.returncode or not values:
        study.tell(trial, state=states.FAIL)
        return why(run, process.returncode, options.metric)
    study.tell(trial, fmean(values[-options.last :]))
    return None


def torchrun(processes: int) -> list[str]:
    """Return the command that starts so many processes here, by the Python that runs this."""
    return [sys.executable, str(TRAIN.with_name("torchrun.py")), "--standalone", "--nproc-per-node", str(processes)]


@contextlib.contextmanager
def ended(command: Sequence[str], log: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Give a process group that does not outlive the block: asked to end, and made to where it takes too long."""
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def values_of(run: RunFolder, metric: str) -> dict[int, float]:
    """Return step -> mean of what fits ``metric``, of the steps that have a finite one."""
    if not run.metrics.is_file():
        return {}
    by_step = {
        step: [value for name, value in metrics.items() if value is not None and fnmatchcase(name, metric)]
        for step, metrics in read_steps(run.metrics).items()
    }
    return {step: fmean(values) for step, values in by_step.items() if values}


def why(run: RunFolder, status: int, metric: str) -> str:
    """Return the reason why a run has no value, in one line."""
    log = run.path / "tune.log"
    said = [line.strip() for line in log.read_text(errors="replace").splitlines() if "error: " in line]
    if status and said:
        return f"{said[0][said[0].index('error: ') + 7 :]} (all of it: {log})"
    return f"status {status}, see {log}" if status else f"no metric {metric} in {run.metrics}; see docs/monitoring.md"


def write_results(options: argparse.Namespace, study: Any, optuna: ModuleType, folder: Path) -> None:
    """Write the best trial as a recipe, and all as a picture; nothing where no trial has a value."""
    complete = [trial for trial in finished(study, optuna) if trial.state == optuna.trial.TrialState.COMPLETE]
    if not complete:
        return
    best = study.best_trial
    values: dict[str, Any] = {}
    for override in [*options.overrides, *best.user_attrs["overrides"]]:
        apply_override(values, override)
    where = os.path.relpath(recipe_file(options.recipe).resolve(), folder.resolve())
    text = yaml.safe_dump({"defaults": [where], **values}, sort_keys=False, allow_unicode=True)
    remark = (
        f"# The best of {len(complete)} whole trials: {options.metric} = {best.value:.6g} in trial {best.number}.\n"
    )
    (folder / "best.yaml").write_text(remark + text, encoding="utf-8")
    draw(complete, options.metric, folder / "trials.png")


def draw(trials: Sequence[Any], metric: str, output: Path) -> None:
    """Draw one panel for each key: its values and what came of them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    keys = list(trials[0].distributions)
    figure = Figure(figsize=(4.6 * len(keys), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for column, key in enumerate(keys):
        axes = figure.add_subplot(1, len(keys), column + 1)
        axes.scatter([trial.params[key] for trial in trials], [trial.value for trial in trials], color="#2563eb")
        if getattr(trials[0].distributions[key], "log", False):
            axes.set_xscale("log")
        axes.set_title(key, fontsize=10)
        axes.set_ylabel(metric if not column else "")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(output, dpi=144, facecolor="white")


def table(study: Any, ranges: Sequence[Range], metric: str) -> Table:
    """Return the trials, the best first; those without a value last."""
    shown = Table(box=None, header_style="bold")
    shown.add_column("trial", justify="right")
    shown.add_column(metric, justify="right")
    for each in ranges:
        shown.add_column(each.key)
    sign = -1.0 if study.direction.name == "MAXIMIZE" else 1.0
    trials = sorted(study.trials, key=lambda trial: (trial.value is None, sign * (trial.value or 0.0), trial.number))
    for trial in trials:
        value = f"{trial.value:.4g}" if trial.value is not None and math.isfinite(trial.value) else ""
        state = "" if trial.state.name == "COMPLETE" else trial.state.name.lower()
        cells = [_shown(trial.params, each.key) for each in ranges]
        shown.add_row(str(trial.number), f"{value} {state}".strip(), *cells)
    return shown


def _shown(params: Mapping[str, Any], key: str) -> str:
    value = params.get(key, "")
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
