"""What the GPUs of several ranks did in a step, as one set of numbers, where some do not tell everything."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from parallel.ranks import run_ranks
from rlhf_megatron.monitor.gpu import GpuUse
from rlhf_megatron.runtime.gpu_use import GpuUses, over_gpus

ALL = [(0.5, 300.0, 60), (1.0, 500.0, 70)]
SOME = [(None, 400.0, None), (0.25, None, None)]
NONE = [(None, None, None)] * 2


def of_each() -> list[dict[str, float]]:
    found = [over_gpus(GpuUse(*of_ranks[dist.get_rank()])) for of_ranks in (ALL, SOME, NONE)]
    return [*found, GpuUses().metrics()]


def test_the_mean_of_those_that_tell_and_the_extremes() -> None:
    for everything, some, nothing, of_this_machine in run_ranks(of_each, 2):
        assert everything == pytest.approx(
            {
                "perf/gpu_utilization": 0.75,
                "perf/gpu_utilization_lowest": 0.5,
                "perf/gpu_power_watts": 400.0,
                "perf/gpu_temperature_highest": 70.0,
            }
        )
        assert some == {
            "perf/gpu_utilization": 0.25,
            "perf/gpu_utilization_lowest": 0.25,
            "perf/gpu_power_watts": 400.0,
        }
        assert nothing == of_this_machine == {}, "there are no GPUs here"
