"""Our side of ``peer.py``: the training loop by a recipe, with a clock around each of its steps.

python launch/torchrun.py --nproc-per-node 1 tools/bench/peer_ours.py RECIPE OUTPUT.json

The clock is that of ``peer_trl.py``: from the end of a step, its line in the metrics included, to the end of the next.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlhf_megatron.compat import megatron
from rlhf_megatron.recipe import load_rl
from rlhf_megatron.rollout.vllm.process_environment import prepare_environment
from rlhf_megatron.topology.world import join_world, leave_world

if TYPE_CHECKING:
    from rlhf_megatron.data.row_numbers import RowNumbers


def train(recipe: str) -> dict[str, Any]:
    """Train by the recipe; return seconds, CPU seconds and tokens of each step."""
    from rlhf_megatron.loops.rl import run_rl
    from rlhf_megatron.loops.step_recorder import StepRecorder
    from rlhf_megatron.loops.training_run import set_up

    ends: list[tuple[float, float]] = []
    counted: list[int] = []
    first_step_ended = 0.0

    class TimedRecorder(StepRecorder):
        """Reader of the time when a step has ended."""

        def begin_step(self, step: int) -> bool:
            if not ends:
                ends.append(now())
            return super().begin_step(step)

        def end_step(self, step: int, metrics: Mapping[str, float], tokens: int, trained_on: RowNumbers) -> None:
            nonlocal first_step_ended
            super().end_step(step, metrics, tokens, trained_on)
            ends.append(now())
            first_step_ended = first_step_ended or time.time()
            counted.append(tokens)

    run = set_up(load_rl(recipe), resume="none", recorder_class=TimedRecorder)
    result = run_rl(run)
    run.exports.write_last(result.saved_step)  # where the recipe asks for it, behind what is timed
    run.close()
    steps = list(itertools.pairwise(ends))
    return {
        "seconds": [after[0] - before[0] for before, after in steps],
        "cpu_seconds": [after[1] - before[1] for before, after in steps],
        "tokens": counted,
        "first_step_ended": first_step_ended,
        "threads": torch.get_num_threads(),
    }


def now() -> tuple[float, float]:
    """Return the time when what has been asked of the GPU is done, and the CPU's time of this process."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


def main() -> None:
    """Join the world, train, leave the result in a file."""
    recipe, output = sys.argv[1:]
    prepare_environment()
    join_world()
    megatron.install()
    result = train(recipe)
    Path(output).write_text(json.dumps(result), encoding="utf-8")
    leave_world()


if __name__ == "__main__":
    main()
