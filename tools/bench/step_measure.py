"""The ranks of ``step.py``: the training loop by a recipe, then the engines by themselves on the same tokens.

python launch/torchrun.py --nproc-per-node N tools/bench/step_measure.py RECIPE REPEATS OUTPUT.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

import raw_engines
import torch.distributed as dist

from rlhf_megatron.compat import megatron
from rlhf_megatron.data.rollout_batch import batch_from_rows
from rlhf_megatron.generation.replica import replica_of
from rlhf_megatron.recipe import load_rl
from rlhf_megatron.roles.shares import share_out
from rlhf_megatron.rollout.vllm.process_environment import prepare_environment
from rlhf_megatron.topology.row_exchange import gather_rows
from rlhf_megatron.topology.world import join_world, leave_world

if TYPE_CHECKING:
    from rlhf_megatron.data.packing import MicroBatch
    from rlhf_megatron.generation.rollout_worker import RolloutWorker
    from rlhf_megatron.loops.training_run import TrainingRun
    from rlhf_megatron.recipe import RLRecipe
    from rlhf_megatron.roles.role import Role
    from rlhf_megatron.rollout.vllm.vllm_engine import VllmEngine


def measure(recipe: str, repeats: int) -> dict[str, list[float]]:
    """Run the recipe, whose metrics stay in its run folder; the seconds of raw parts, if any. Every rank calls it."""
    from rlhf_megatron.loops.rl import make_rollout_worker, run_rl
    from rlhf_megatron.loops.training_run import set_up

    run = set_up(load_rl(recipe), resume="none")
    worker = make_rollout_worker(run)
    run_rl(run, worker)
    raw = raw_seconds(run, worker, repeats) if repeats else {}
    run.close()
    return raw


def raw_seconds(run: TrainingRun[RLRecipe], worker: RolloutWorker, repeats: int) -> dict[str, list[float]]:
    """Return generation, forward passes, and forward and backward passes over the tokens of one step.

    Ranks without an engine, or without the actor, wait for those that have it.
    """
    recipe, role, engine = run.recipe, run.actor.local, cast("VllmEngine | None", worker.weight_sync.engine)
    assert recipe.rollout.drawn_lengths is not None
    group, replica = recipe.batch.responses_per_prompt, replica_of(recipe, run.context.rank, run.context.world_size)
    asked = run.data.train.next(recipe.batch.prompts_per_step)
    first = len(asked) if replica.index is None else replica.index
    rows = [index * group + k for index in range(first, len(asked), replica.count) for k in range(group)]
    prompts = [asked[row // group].token_ids for row in rows]
    lengths = [min(recipe.rollout.drawn_lengths.of_row(row), recipe.rollout.max_response_length) for row in rows]
    answers: list[list[int]] = []

    def generate(pieces: int | None) -> None:
        if engine:
            wanted = lengths if pieces is None else [1] * pieces
            answers[:] = raw_engines.generate(engine, prompts[: len(wanted)], wanted)

    seconds = {"generate": raw_engines.seconds_of(generate, repeats)}
    if engine:
        engine.sleep()
    own = gather_rows(batch_from_rows(prompts, answers, row_id=rows) if replica.leads else batch_from_rows([], []))
    [share] = share_out(own, [(run.actor.home, run.actor.assign(own.numbers))])
    micros: list[MicroBatch] = []
    if role:
        role.parameters()  # back on the GPU, if they have left it
        role.memory.come_back("gradients")
        micros = raw_engines.micro_batches(role, share.batch)
    for part, passes in (("forward", raw_engines.forward), ("forward and backward", raw_engines.forward_and_backward)):

        def train(pieces: int | None, passes: Callable[[Role, list[MicroBatch]], None] = passes) -> None:
            if role:
                passes(role, micros[:pieces])

        seconds[part] = raw_engines.seconds_of(train, repeats)
    return seconds


def main() -> None:
    """Join the others, measure, leave the result in a file."""
    recipe, repeats, output = sys.argv[1:]
    prepare_environment()
    join_world()
    megatron.install()
    leads = dist.get_rank() == 0
    raw = measure(recipe, int(repeats))
    if leads:
        Path(output).write_text(json.dumps(raw), encoding="utf-8")
    leave_world()


if __name__ == "__main__":
    main()
