"""Small runs for tests of whole commands: their model and data, a recipe, and what a run leaves behind.

Import it as ``from end_to_end.runs import ...``. No test lives here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from end_to_end.commands import Command, Finished, python, torchrun
from rlhf_megatron.monitor.metrics import comparable, read_records, read_steps
from rlhf_megatron.runtime.recovery import RecoveryLog

TRAIN = "launch/train.py"
# A supervised run that takes a few hundredths of a second per step and says nothing but its numbers.
SUPERVISED: dict[str, Any] = {
    "name": "whole",
    "loop": "sft",
    "steps": 300,
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train_files": ["train.parquet"], "max_prompt_length": 64},
    "batch": {"prompts_per_step": 4},
    "actor": {"tokens_per_gpu": 512, "optimizer": {"learning_rate": 1e-3, "warmup_steps": 3}},
    "evaluation": {"at_start": False, "at_end": False},
    "checkpoint": {"export_at_end": False},
    "monitor": {"plots": False},
}
# Some reward that differs between random answers.
LENGTH_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return (len(solution_str) % 5) / 4
"""


def make_model(folder: Path, layers: int, *options: str, name: str = "model") -> None:
    """Write a model with random weights, of two heads that split over two tensor-parallel ranks."""
    sizes = (f"--layers={layers}", "--hidden-size=64", "--intermediate-size=64", "--heads=2", "--kv-heads=2")
    python("tools/make_tiny_model.py", f"--output={name}", *sizes, *options, folder=folder).check()


def make_sums(folder: Path, size: int, *options: str, name: str = "train") -> None:
    """Write ``size`` prompts that ask for the sum of two digits to NAME.parquet."""
    task = ("reasoning-gym", "--task=chain_sum", "--set", "min_terms=2", "max_terms=2", "max_digits=1")
    arguments = (*task, f"--size={size}", f"--output={name}.parquet", *options)
    python("tools/prepare_data.py", *arguments, folder=folder).check()


def write_digits(folder: Path, questions: Iterable[str]) -> None:
    """Write train.parquet with these questions, none of which has a right answer."""
    rows = [
        {
            "data_source": "digits",
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"style": "rule", "ground_truth": ""},
        }
        for question in questions
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")


def on_two_ranks(folder: Path, recipe: str) -> Callable[..., Finished]:
    """Return a function that trains by a recipe of ``folder`` on two ranks, with further keys, until that ends."""

    def train(*keys: str) -> Finished:
        with torchrun(2, TRAIN, recipe, *keys, folder=folder) as command:
            return command.finish()

    return train


def records_of(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run's metrics so far."""
    path = run / "metrics.jsonl"
    return read_records(path) if path.exists() else []


def decisions(run: Path) -> list[dict[str, Any]]:
    """Return what a run's recovery has done so far."""
    return RecoveryLog(run).lines()


def logged(run: Path) -> int:
    """Return how many records of metrics a run has logged."""
    return len(records_of(run))


def steps_of(run: Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of a run's steps, the last word on each; None where a number was not finite."""
    path = run / "metrics.jsonl"
    return read_steps(path) if path.exists() else {}


def metrics_of(run: Path) -> dict[int, dict[str, Any]]:
    """Return ``steps_of`` without what depends on the machine."""
    return comparable(steps_of(run))


def wait_for(command: Command, condition: Callable[[], bool]) -> None:
    """Return when ``condition`` holds; raises AssertionError where the command ends before, or after five minutes."""
    deadline = time.time() + 300
    while not condition():
        assert command.is_running() and time.time() < deadline
        time.sleep(0.02)
