"""A barrier of ranks in each other's memory, for its tests. Run as a script, it checks the kernel where it is."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from rlhf_megatron.kernels.peer_barrier import peer_barrier
from rlhf_megatron.regather.recorded import Recorded

WORLD, ROUNDS = 3, 60
SECONDS = 120  # after which a rank that waits for ever is ended


def check_alone(device: str, others: int, recorded: bool = False) -> None:
    """Check a rank whose ``others`` are ahead of it: it counts, and writes its number where it belongs and nowhere
    else."""
    rank, world = others // 2, others + 2
    numbers = torch.full([world], 100, dtype=torch.int32, device=device)
    numbers[rank], numbers[-1] = 0, -1  # the last is none of the others
    there = [other for other in range(world - 1) if other != rank]
    memory = torch.full([world, world], -7, dtype=torch.int32, device=device)
    barrier = peer_barrier(numbers, rank, {other: memory[other, rank:] for other in there}, use_triton=True)
    run = Recorded([barrier], numbers.device).run if recorded else barrier
    assert numbers[rank] == 0 and (memory == -7).all()
    for call in range(1, 4):
        run()
        written = torch.full_like(memory, -7)
        written[there, rank] = call
        assert torch.equal(memory, written)
        assert numbers.tolist() == [call if at == rank else 100 for at in range(world - 1)] + [-1]


def check_between_processes(use_triton: bool) -> None:
    """Check that ``WORLD`` processes of shared memory find the numbers of a round between two barriers, late or not."""
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(WORLD):
            process = os.fork()
            if process == 0:
                signal.alarm(SECONDS)
                wrong = _wrong_rounds(Path(folder), rank, use_triton)
                os._exit(min(wrong, 100))
            processes.append(process)
        assert [os.waitpid(process, 0)[1] for process in processes] == [0] * WORLD


def _wrong_rounds(folder: Path, rank: int, use_triton: bool) -> int:
    """Return in how many rounds this rank read anything but what all ranks wrote in it."""
    numbers = [_shared(folder / f"numbers-{each}") for each in range(WORLD)]
    values, generator = _shared(folder / "values"), random.Random(rank)
    others = {other: numbers[other][rank:] for other in range(WORLD) if other != rank}
    barrier = peer_barrier(numbers[rank], rank, others, use_triton)
    wrong = 0
    for number in range(ROUNDS):
        time.sleep(generator.choice((0, 0, 0.01)))
        values[rank] = number
        barrier()
        time.sleep(generator.choice((0, 0, 0.01)))
        wrong += values.tolist() != [number] * WORLD
        barrier()
    return wrong + (numbers[rank].tolist() != [2 * ROUNDS] * WORLD)


def _shared(path: Path) -> Tensor:
    return torch.from_file(str(path), shared=True, size=WORLD, dtype=torch.int32)


if __name__ == "__main__":
    for others in (0, 1, 7, 40):
        check_alone("cpu", others)
    check_between_processes(use_triton=True)
