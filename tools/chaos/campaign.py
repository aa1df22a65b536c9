"""The fault campaign: a small RL run, once undisturbed and once with each fault, compared to the last bit.

    python tools/chaos/campaign.py [--only kill hang ...] [--list] [--warm] [--output docs/results/chaos.json]

Two ranks on this machine's CPU, real launches by torchrun, rewards from a service over HTTP. The run is recipe.yaml;
the faults are in cases.yaml. Those inside a rank are made by RLHF_MEGATRON_FAULT (rlhf_megatron/runtime/faults.py), the
others here; verdict.py judges. Exit status 1: an expectation was not met.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import platform
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import yaml
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from trajectories import GAMES
from verdict import RECIPE, ROWS, Case, Result, decisions, judge, metrics_of

from rlhf_megatron.errors import UserError
from rlhf_megatron.runtime.command import ArgumentParser, command
from rlhf_megatron.untrusted import reason_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RANKS = 2
# Starts a command in a folder with these variables, stdin, stdout and stderr; returns it with pid, poll and wait.
Start = Callable[[list[str], Path, dict[str, str], list[int]], Any]
# The longest that a case with one fault may take, and more for each further one.
LIMIT_SECONDS, SECONDS_OF_RESTART = 300.0, 60.0
FAULT = "RLHF_MEGATRON_FAULT"
TASK = ("reasoning-gym", "--task=chain_sum", "--set", "min_terms=2", "max_terms=2", "max_digits=1")
COLUMNS = ("fault", "expected", "what happened", "metrics and weights", "steps repeated", "seconds to recover")


class RewardService:
    """The process of reward_service.py."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.start()

    def start(self) -> None:
        """Start it, on the same port each time."""
        command = [sys.executable, "-P", str(HERE / "reward_service.py"), str(self.port)]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def stop(self) -> None:
        """Kill it: connections are refused from now on."""
        self.process.kill()
        self.process.wait()


class Launch:
    """One call of torchrun, until it ends; ``faults`` are the moments (seconds since 1970) of what happened to it."""

    def __init__(self, case: Case, folder: Path, start: Start) -> None:
        self.run, self.faults = folder / "runs" / case.name, list[float]()
        self.run.mkdir(parents=True, exist_ok=True)
        restarts = max(3, case.restarts) if case.launches == 1 else 0
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", f"--max-restarts={restarts}"]
        train = [str(ROOT / "launch" / "train.py"), *recipe_of(case)]
        command = [sys.executable, "-P", "-m", *torchrun, *train]
        reader, writer = os.pipe()
        with open(os.devnull, "rb") as none, open(writer, "wb") as output:
            files = [file.fileno() for file in (none, output, output)]
            self.process = start(command, folder, environment(case), files)
        self._reader = threading.Thread(target=self._read, args=(reader,), daemon=True)
        self._reader.start()

    def _read(self, output: int) -> None:
        with open(output, encoding="utf-8") as lines, (self.run / "launch.log").open("a", encoding="utf-8") as log:
            for line in lines:
                if line.startswith(f"{FAULT}: "):
                    self.faults.append(time.time())
                log.write(line)
                log.flush()

    def is_running(self) -> bool:
        """Return whether torchrun has not ended."""
        return self.process.poll() is None

    def wait_for(self, what: str, step: int | None = None) -> None:
        """Wait until recovery.jsonl has such a line, or metrics.jsonl one of the step; or the launch has ended."""
        while self.is_running():
            if (step in metrics_of(self.run)) if step else any(line["what"] == what for line in decisions(self.run)):
                return
            time.sleep(0.05)

    def finish(self, seconds: float) -> int | None:
        """Wait for the end; the exit status, or None where it did not come in time and everything was killed."""
        try:
            status: int | None = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return None
        self._reader.join(5.0)
        return status

    def kill(self) -> None:
        """Kill torchrun and all that it has started."""
        if self.is_running():
            root = psutil.Process(self.process.pid)
            for process in [*root.children(recursive=True), root]:
                process.kill()
            self.process.wait()


class Disturbance:
    """Disturbances of a launch from outside; each method returns when it is over."""

    def __init__(self, launch: Launch, service: RewardService) -> None:
        self._launch, self._service = launch, service

    def send_sigterm(self) -> None:
        """Send it to torchrun, after step 3."""
        self._begin(3)
        os.kill(self._launch.process.pid, signal.SIGTERM)

    def kill_torchrun(self) -> None:
        """Kill it after step 3; its ranks are left to themselves."""
        self._begin(3)
        os.kill(self._launch.process.pid, signal.SIGKILL)

    def truncate_checkpoint(self) -> None:
        """Cut the end off one file of the newest checkpoint, when the launch has ended."""
        self._launch.process.wait(LIMIT_SECONDS)
        checkpoints = self._launch.run / "checkpoints"
        file = checkpoints / (checkpoints / "latest").read_text().strip() / "rank-00001.safetensors"
        os.truncate(file, file.stat().st_size - 8)

    def stop_service_briefly(self) -> None:
        """Stop the service for less time than the tries take."""
        self._begin(3)
        self._service.stop()
        time.sleep(1.5)
        self._service.start()

    def stop_service_until_fault(self) -> None:
        """Stop the service until the run has noted the fault."""
        self._begin(3)
        self._service.stop()
        self._launch.wait_for("fault")
        self._service.start()

    def freeze_service(self) -> None:
        """Freeze the service for longer than a request may take: it accepts connections and does not answer."""
        self._begin(3)
        self._service.process.send_signal(signal.SIGSTOP)
        time.sleep(4.0)
        self._service.process.send_signal(signal.SIGCONT)

    def _begin(self, step: int) -> None:
        self._launch.wait_for("step", step)
        self._launch.faults.append(time.time())


def cold_start(command: list[str], folder: Path, variables: dict[str, str], files: list[int]) -> Any:
    """Return a process as everyone starts one."""
    stdin, stdout, stderr = files
    return subprocess.Popen(command, cwd=folder, env=variables, stdin=stdin, stdout=stdout, stderr=stderr)


def warm_start() -> Start:
    """Fork of a process that has done the imports, in place of processes; torchrun's own code otherwise."""
    sys.path.append(str(ROOT / "tests"))
    nursery = importlib.import_module("nursery").nursery()
    start: Start = nursery.start
    return start


def environment(case: Case) -> dict[str, str]:
    """Return one thread for each rank, no GPU, no search of the network for models, the fault, and a job of two
    hours."""
    settings = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    settings |= {FAULT: case.fault, "RLHF_MEGATRON_DEADLINE": f"{time.time() + 7200:.0f}"}
    return {**os.environ, **settings}


def recipe_of(case: Case) -> list[str]:
    """Return the arguments of train.py."""
    player = f"games/{case.name}/counted.py:{case.environment or case.agent}"
    if case.environment:
        keys = [f"rollout.multi_turn.environment={player}"]
    elif case.agent:
        keys = ["rollout.multi_turn=null", f"rollout.agent.function={player}"]
    else:
        keys = []
    return ["games.yaml" if keys else "grpo.yaml", f"name={case.name}", *keys, *case.overrides]


def lay_out_game(case: Case, folder: Path) -> None:
    """Put the environment or agent of a case where it keeps its ledger."""
    game = folder / "games" / case.name
    game.mkdir(parents=True)
    shutil.copy(HERE / "counted.py", game)
    if case.kill:
        (game / "kill").write_text(case.kill)


def perform(case: Case, folder: Path, service: RewardService, start: Start) -> Result:
    """Run a case and judge it by the reference, which lies beside it."""
    started, faults, status = time.monotonic(), list[float](), None
    limit = LIMIT_SECONDS + SECONDS_OF_RESTART * (case.restarts - 1)
    if case.environment or case.agent:
        lay_out_game(case, folder)
    for number in range(case.launches):
        launch = Launch(case if number == 0 else replace(case, fault=""), folder, start)
        try:
            if case.outside and number == 0:
                getattr(Disturbance(launch, service), case.outside)()
            status = launch.finish(max(1.0, limit - (time.monotonic() - started)))
        finally:
            launch.kill()
        faults += launch.faults
    problems = []
    if status is None:
        problems.append(f"still running after {limit:.0f} s")
    elif status:
        problems.append(f"the last launch ended with status {status}")
    return judge(case, folder, faults, time.monotonic() - started, problems)


def prepare(folder: Path, port: int) -> None:
    """Make models with random weights, data, and the recipes."""
    RECIPE["reward"]["service"]["url"] = f"http://127.0.0.1:{port}/score"
    (folder / "grpo.yaml").write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    (folder / "games.yaml").write_text(yaml.safe_dump(GAMES), encoding="utf-8")
    sizes = ["--layers=2", "--hidden-size=64", "--intermediate-size=64", "--heads=2", "--kv-heads=2"]
    for script, *arguments in (
        ["make_tiny_model.py", "--output=model", *sizes],
        ["make_tiny_model.py", "--output=talker", "--talkative", *sizes],
        ["prepare_data.py", *TASK, "--size=6", "--seed=9", "--output=held_out.parquet"],
        ["prepare_data.py", *TASK, f"--size={ROWS}", "--exclude=held_out.parquet", "--output=train.parquet"],
    ):
        command = [sys.executable, "-P", str(ROOT / "tools" / script), *arguments]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)


def write(path: Path, results: list[Result]) -> None:
    """Write the results as JSON, and beside it as a table in Markdown."""
    record = {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "hardware": f"{platform.machine()}, {len(os.sched_getaffinity(0))} CPU cores",
        "ranks": RANKS,
        "recipe": RECIPE,
        "cases": [asdict(result) for result in results],
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    rows = [COLUMNS, ["---"] * len(COLUMNS), *(result.row() for result in results)]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in rows)
    about = (
        f"`{record['command']}`, {record['date']}, {record['hardware']}. What it is: [recovery.md](../recovery.md).\n"
    )
    path.with_suffix(".md").write_text(f"# The fault campaign\n\n{about}\n{table}", encoding="utf-8")


def campaign(chosen: list[Case], folder: Path, start: Start, console: Console) -> list[Result]:
    """Perform all of them, the reference first."""
    service, results = RewardService(), list[Result]()
    columns = (SpinnerColumn(), TextColumn("{task.completed}/{task.total} {task.description}"), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("model and data", total=len(chosen))
            prepare(folder, service.port)
            for case in chosen:
                progress.update(task, description=case.name)
                results.append(perform(case, folder, service, start))
                progress.console.print(f"{results[-1].seconds:4.0f} s  {'  '.join(results[-1].row()[:4])}")
                progress.advance(task)
    finally:
        service.stop()
    return results


@command
def main() -> int:
    """Return 1 where an expectation was not met."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[""], help="cases whose names begin so")
    parser.add_argument("--list", action="store_true", help="show the cases")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write the results, and FILE.md beside them")
    parser.add_argument("--warm", action="store_true", help="without the ranks' imports: a third of the time")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="work in this new folder, and keep it")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    described = yaml.safe_load((HERE / "cases.yaml").read_text(encoding="utf-8"))
    reference, *cases = (Case(name, **fields) for name, fields in described.items())
    chosen = [case for case in cases if case.name.startswith(tuple(options.only))]
    if options.list or not chosen:
        console.print(*(f"{case.name:24} {case.expected}" for case in chosen or cases), sep="\n")
        return 0 if chosen else 2
    folder = options.keep or Path(tempfile.mkdtemp())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if options.output:  # before the hours, not after them
            options.output.touch()
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be written ({reason_of(error)})") from error
    try:
        results = campaign([reference, *chosen], folder, warm_start() if options.warm else cold_start, console)
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    table = Table(*COLUMNS)
    for result in results:
        table.add_row(*result.row(), style="red" if result.problems else None)
    console.print(table)
    if options.output:
        write(options.output, results)
    return int(any(result.problems for result in results))


if __name__ == "__main__":
    sys.exit(main())
