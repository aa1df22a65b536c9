"""Seconds from the SIGKILL of one rank to the end of the next step, of a shape of step_shapes.yaml.

    python tools/bench/restart.py 7B --gpus 8 [--output docs/results/restart.json]

The run saves after step 2, which the next step's end publishes; a rank is killed as the update of step 4 begins, the
launcher starts all of them again, and the run resumes from step 2. Counted are the seconds from the kill to the end of
step 3, the first that is repeated, and those of this step alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import yaml
from reports import rows_with, write_report
from step import HERE, folder_with_model, prepare

from rlhf_megatron.errors import UserError
from rlhf_megatron.monitor.metrics import read_records
from rlhf_megatron.runtime.command import command
from rlhf_megatron.runtime.faults import VARIABLE

SAVED, REPEATED, KILLED = 2, 3, 4


@command
def main() -> int:
    """Measure one shape; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="of step_shapes.yaml")
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=1500.0, help="most that all may take; default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("docs/results/restart.json"), help="default: %(default)s")
    parser.add_argument("--work", type=Path, default=Path("runs/bench_restart"), help="default: %(default)s")
    options = parser.parse_args()
    shapes = yaml.safe_load((HERE / "step_shapes.yaml").read_text(encoding="utf-8"))
    shape = next((each for each in shapes if (each["model"], each["gpus"]) == (options.model, options.gpus)), None)
    if shape is None:
        raise UserError(f"{options.model} --gpus {options.gpus}: step_shapes.yaml has no such shape")
    row = {"model": options.model, "gpus": options.gpus, **measured(shape, options.work, options.seconds)}
    write_report(options.output, {"rows": rows_with(options.output, row)})
    print(row)
    return 0


def measured(shape: Mapping[str, Any], work: Path, limit: float) -> dict[str, float]:
    """Run a shape with the fault; return the seconds counted. Raises UserError where no step is repeated within
    ``limit``."""
    folder = folder_with_model(work / f"{shape['model']}-{shape['gpus']}")
    checkpoint = {"save_interval": SAVED, "export_at_end": False}
    recipe = prepare({**shape, "recipe": {**shape["recipe"], "checkpoint": checkpoint}}, folder, KILLED)
    launch = HERE.parents[1] / "launch"
    torchrun = [str(launch / "torchrun.py"), "--standalone", f"--nproc-per-node={shape['gpus']}", "--max-restarts=1"]
    process = subprocess.Popen(
        [sys.executable, "-P", *torchrun, str(launch / "train.py"), "recipe.yaml"],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, VARIABLE: f"kill@update:{KILLED}:{shape['gpus'] - 1}"},
    )  # fmt: skip
    assert process.stdout is not None
    moments = _Moments(folder / "runs" / recipe.name / "metrics.jsonl")
    threading.Thread(target=moments.read, args=(process.stdout,), daemon=True).start()
    try:
        moments.watch(process, time.monotonic() + limit)
    finally:
        process.terminate()  # torchrun passes it on to the ranks
        process.wait()
    if moments.killed is None or moments.repeated is None:
        raise UserError(f"{shape['model']}: step {REPEATED} was not repeated; the last line: {moments.last_line}")
    step = moments.records()[-1]["train/step_time_ms"] / 1000
    return {"seconds_to_next_step": moments.repeated - moments.killed, "step_seconds": step}


class _Moments:
    """Times at which the rank was killed and the first repeated step was done, by ``time.monotonic``."""

    def __init__(self, metrics: Path) -> None:
        self._metrics = metrics
        self.last_line = ""
        self.killed: float | None = None
        self.repeated: float | None = None

    def read(self, lines: IO[str]) -> None:
        """Pass on what the run prints, as it comes, and note when the fault is told of."""
        for line in lines:
            sys.stderr.write(line)
            self.last_line = line.strip() or self.last_line
            if VARIABLE in line and self.killed is None:
                self.killed = time.monotonic()

    def watch(self, process: subprocess.Popen[str], end: float) -> None:
        """Wait until the step is repeated, the run is over, or ``end`` is past."""
        while len(self.records()) < 2 and process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        if len(self.records()) == 2:
            self.repeated = time.monotonic()

    def records(self) -> list[Mapping[str, float]]:
        """Return those of the step that is done twice, so far."""
        records = read_records(self._metrics) if self._metrics.exists() else []
        return [of_step for of_step in records if of_step["step"] == REPEATED and "train/step_time_ms" in of_step]


if __name__ == "__main__":
    sys.exit(main())
