"""Utilization, power and temperature of all ranks' GPUs in a step, as metrics."""

from __future__ import annotations

import math

import torch

from rlhf_megatron.monitor.gpu import GpuMeter, GpuUnreadable, GpuUse
from rlhf_megatron.topology.exchange import gather_objects, max_over_ranks, sum_over_ranks


class GpuUses:
    """A meter on each rank's GPU; none where there are none, or where one cannot be read. Every call is collective."""

    def __init__(self) -> None:
        """Begin to measure; ``problem`` says why that cannot be, where there are GPUs."""
        self.problem: str | None = None
        self._meter: GpuMeter | None = None
        if not torch.cuda.is_available():
            return
        try:
            self._meter = GpuMeter(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))
        except GpuUnreadable as error:
            self.problem = str(error)
        self.problem = next((problem for problem in gather_objects(self.problem) if problem), None)
        if self.problem:
            self.close()

    def metrics(self) -> dict[str, float]:
        """Return ``perf/gpu_utilization`` and ``perf/gpu_power_watts``, the mean over all GPUs since the last call,
        ``perf/gpu_utilization_lowest`` of the GPU that did least, and ``perf/gpu_temperature_highest``."""
        return over_gpus(self._meter.take()) if self._meter else {}

    def close(self) -> None:
        """End the measuring on this rank."""
        if self._meter:
            self._meter.close()
        self._meter = None


def over_gpus(own: GpuUse) -> dict[str, float]:
    """Return the metrics over the GPUs of all ranks, from those that report each of them; collective."""
    used, watts = own.utilization, own.watts
    values = [0.0 if value is None else value for value in (used, watts)]
    used_sum, watts_sum, uses, powers = sum_over_ranks([*values, float(used is not None), float(watts is not None)])
    least, hottest = max_over_ranks(
        [-math.inf if value is None else value for value in (None if used is None else -used, own.temperature)]
    )
    metrics: dict[str, float] = {}
    if uses:
        metrics |= {"perf/gpu_utilization": used_sum / uses, "perf/gpu_utilization_lowest": -least}
    if powers:
        metrics["perf/gpu_power_watts"] = watts_sum / powers
    if math.isfinite(hottest):
        metrics["perf/gpu_temperature_highest"] = hottest
    return metrics
