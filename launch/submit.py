"""Submits a recipe as a Slurm job: launch/submit.py RECIPE [key.path=value ...] [--nodes N] [--array FILE] [--print]"""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

import jinja2
import yaml

from rlhf_megatron.monitor.environment_report import redact_argument
from rlhf_megatron.monitor.run_folder import RunFolder
from rlhf_megatron.recipe import Recipe, RecipeError, UserError, check_world, load_recipe
from rlhf_megatron.recipe.arguments import add_recipe_arguments
from rlhf_megatron.recipe.load import frozen_yaml
from rlhf_megatron.recipe.slurm import SlurmSection
from rlhf_megatron.redaction import redact
from rlhf_megatron.runtime.command import ArgumentParser, command, number_of_gpus
from rlhf_megatron.untrusted import read_text, reason_of, shown

LAUNCH = Path(__file__).resolve().parent
# Between the signal and the end of the job, what is left for requeueing a run that has not ended.
SECONDS_TO_REQUEUE = 30
MOST_BYTES_OF_ARRAY = 2**20
MOST_LINES_OF_ARRAY = 4000  # Slurm takes 1,001 where nobody has raised its MaxArraySize
# What the script is made of beside its tasks. It is one for all runs of an array, so none can have values of its own.
JOB_KEYS = (
    "cluster.gpus_per_node",
    "retry.launcher",
    "retry.max_retries",
    "retry.hang_seconds",
    *(f"slurm.{name}" for name in SlurmSection.model_fields),
)


@dataclasses.dataclass(frozen=True)
class Task:
    """One run of a job: a job that is no array has one."""

    run: str  # its folder
    overrides: list[str]  # of the job's recipe


@command
def main() -> int:
    """Return the exit status: 0 submitted or shown, 2 for input that is not right, or sbatch's own."""
    parser = ArgumentParser(description=__doc__)
    add_recipe_arguments(parser, "; its section slurm describes the job")
    parser.add_argument("--nodes", type=int, help="instead of the recipe's slurm.nodes")
    parser.add_argument(
        "--array",
        metavar="FILE",
        help="a sweep: a text file with the overrides of one run in each line, quoted as in a shell",
    )
    parser.add_argument("--print", action="store_true", help="show the script; needs no Slurm")
    arguments = parser.parse_intermixed_args()
    overrides = [*arguments.overrides, *([f"slurm.nodes={arguments.nodes}"] if arguments.nodes is not None else [])]
    recipe = load_recipe(arguments.recipe, overrides)
    tasks = tasks_of(arguments.recipe, overrides, recipe, arguments.array)
    frozen = frozen_recipe(arguments.recipe)
    script = job_script(arguments.recipe, frozen, recipe, tasks, is_array=arguments.array is not None)
    if arguments.print:
        print(script, end="")
        return 0
    return submit(script, recipe, tasks)


def tasks_of(path: str, overrides: Sequence[str], recipe: Recipe, array: str | None) -> list[Task]:
    """Return the runs of the job, each checked as launch/train.py would; in an array a run without a name of its own
    gets NAME-K. Raises UserError for what cannot run, a run that asks for another job, or a file that cannot be
    read."""
    if array is None:
        return [_task(list(overrides), recipe, path)]
    try:
        lines = read_text(array, UserError, MOST_BYTES_OF_ARRAY).removeprefix("\ufeff").splitlines()
    except UserError as error:
        reason = str(error).removeprefix(f"{shown(array)}: ").removeprefix("cannot be read ")
        reason = reason[1:-1] if reason.startswith("(") else reason
        line = f"--array {shown(array)}: cannot be read ({reason}); write one line of overrides per run"
        raise UserError(line) from error
    if len(lines) > MOST_LINES_OF_ARRAY:
        raise UserError(f"--array {shown(array)}: has {len(lines):,} lines; at most {MOST_LINES_OF_ARRAY:,} are a job")
    tasks: list[Task] = []
    for number, line in enumerate(lines, start=1):
        where = f"{array}, line {number}"
        try:
            own = shlex.split(line, comments=True)
        except ValueError as error:
            raise UserError(f"{where}: {error}; quote it as in a shell") from error
        if own:
            named = [] if any(text.startswith("name=") for text in own) else [f"name={recipe.name}-{len(tasks)}"]
            all_overrides = [*overrides, *own, *named]
            try:
                of_run = load_recipe(path, all_overrides)
            except RecipeError as error:
                raise RecipeError(f"{error} ({shown(where)})") from error
            _check_same_job(recipe, of_run, where)
            tasks.append(_task(all_overrides, of_run, where))
    if not tasks:
        raise UserError(f"--array {array}: has no line with overrides; write one per run")
    runs = [task.run for task in tasks]
    twice = next((run for run in runs if runs.count(run) > 1), None)
    if twice:
        raise UserError(f"--array {array}: two runs would write {twice}; give each a name of its own")
    return tasks


def _check_same_job(recipe: Recipe, of_run: Recipe, where: str) -> None:
    changed = [key for key in JOB_KEYS if attrgetter(key)(of_run) != attrgetter(key)(recipe)]
    if changed:
        raise UserError(
            f"{where}: {', '.join(changed)}: the runs of an array share one job; give it on the command line for all, "
            "or submit separate jobs"
        )


def _check_no_secret(overrides: Sequence[str], where: str) -> None:
    for override in overrides:
        if redact_argument(override) != override:
            raise UserError(
                f"{where}: override of {override.partition('=')[0]}: it holds what looks like a secret, and the job's "
                "script would keep it; write it into a recipe that only you can read, and submit that"
            )


def _task(overrides: list[str], recipe: Recipe, where: str) -> Task:
    _check_no_secret(overrides, where)
    gpus = number_of_gpus("slurm.nodes x cluster.gpus_per_node", str(recipe.slurm.nodes * recipe.cluster.gpus_per_node))
    check_world(recipe, gpus)
    return Task(str(RunFolder(recipe.run_root, recipe.name).path), overrides)


def frozen_recipe(path: str) -> str | None:
    """Return the recipe as its file stands now, for the script to carry; None, with a warning, where it holds a
    secret."""
    text = frozen_yaml(path)
    values = yaml.safe_load(text)
    if redact(values) == values:
        return text
    print(
        f"warning: {shown(path)}: holds what looks like a secret, which the job's script would keep; the job reads "
        "the file whenever it starts, so leave it as it is until the job has ended",
        file=sys.stderr,
    )
    return None


def job_script(path: str, frozen: str | None, recipe: Recipe, tasks: Sequence[Task], is_array: bool) -> str:
    """Return the text for sbatch. Raises UserError where a value has a character that no script can carry.

    ``frozen``: the text of the recipe at ``path``; None where the job is to read that.
    """
    slurm = recipe.slurm
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(LAUNCH / "slurm"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # nothing here is HTML; every value goes through quoted
    )
    environment.filters["quoted"] = quoted
    return environment.get_template("job.sbatch.j2").render(
        recipe=_printable(path),
        frozen=frozen,
        options=sbatch_options(recipe, len(tasks) if is_array else None),
        tasks=tasks,
        rendezvous_host=slurm.rendezvous_host,
        srun=_srun_options(recipe),
        node=[
            "bash",
            str(LAUNCH / "slurm" / "node.sh"),
            str(recipe.cluster.gpus_per_node),
            str(recipe.retry.max_retries),
            recipe.retry.launcher,
            f"{recipe.retry.hang_seconds:g}",
        ],
        program=[slurm.network or "", slurm.setup_script or "", python_of(recipe), str(LAUNCH / "train.py")],
        requeue=slurm.requeue,
        patience=slurm.signal_seconds - SECONDS_TO_REQUEUE,
    )


def sbatch_options(recipe: Recipe, tasks: int | None) -> list[str]:
    """Return the options of sbatch in the script, the recipe's own last; ``tasks`` is the size of an array."""
    slurm = recipe.slurm
    minutes = max(1, round(slurm.time_limit_hours * 60))
    logs = RunFolder(recipe.run_root, recipe.name).path / "logs"
    options = {
        "job-name": recipe.name,
        "account": slurm.account,
        "partition": slurm.partition,
        "time": f"{minutes // 60}:{minutes % 60:02d}:00",
        "nodes": slurm.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": recipe.cluster.gpus_per_node if slurm.request_gpus else None,
        "chdir": Path.cwd(),
        # A per cent sign would begin one of Slurm's own names.
        "output": str(logs).replace("%", "%%") + ("/slurm-%j.log" if tasks is None else "/slurm-%A_%a.log"),
        "open-mode": "append",
        "signal": f"B:USR1@{slurm.signal_seconds}",
        "array": None if tasks is None else f"0-{tasks - 1}",
    }
    given = [f"--{name}={value}" for name, value in options.items() if value is not None]
    return [*given, "--requeue" if slurm.requeue else "--no-requeue", *slurm.options]


def _srun_options(recipe: Recipe) -> list[str]:
    slurm, here = recipe.slurm, Path.cwd()
    options = [f"--nodes={slurm.nodes}", f"--ntasks={slurm.nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    if slurm.container:
        mounts = [*(f"{folder}:{folder}" for folder in (here, LAUNCH.parent)), *slurm.container_mounts]
        options += [f"--container-image={slurm.container}", f"--container-mounts={','.join(mounts)}"]
        options += [f"--container-workdir={here}"]
    return options


def python_of(recipe: Recipe) -> str:
    """Return the Python that runs on the nodes."""
    if recipe.slurm.container:
        return "python3"
    return str(Path(recipe.slurm.venv) / "bin" / "python") if recipe.slurm.venv else sys.executable


def quoted(value: str) -> str:
    """Return ``value`` as one word of a shell; raises UserError where it would end the line."""
    return shlex.quote(_printable(value))


def _printable(value: str) -> str:
    if not value.isprintable():
        raise UserError(f"{value!r}: a job's script cannot carry line breaks and control characters; take them out")
    return value


def submit(script: str, recipe: Recipe, tasks: Sequence[Task]) -> int:
    """Hand the script to sbatch and say where the runs are; return sbatch's exit status."""
    if shutil.which("sbatch") is None:
        raise UserError("sbatch: there is no Slurm on this machine; submit from a login node, or use --print")
    folder = RunFolder(recipe.run_root, recipe.name).path
    written = folder / "job.sbatch"
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)  # Slurm makes no folder for its output
        written.write_text(script, encoding="utf-8")
    except OSError as error:
        raise UserError(f"run_root: {written} cannot be written ({reason_of(error)}); choose another") from error
    done = subprocess.run(["sbatch", "--parsable", str(written)], capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"error: sbatch: {shown(done.stderr.strip(), 1000)}; the script is {written}", file=sys.stderr)
        return done.returncode
    print(f"job {done.stdout.strip().partition(';')[0]}")
    for task in tasks:
        print(f"run {task.run}, logs {task.run}/logs/latest/rank-0.log")
    return 0


if __name__ == "__main__":
    sys.exit(main())
