"""What the driver knows of a GPU, by NVML (nvidia-ml-py): memory, temperature, clocks, errors, processes.

Only readings: what is healthy is judged by runtime/preflight. Imports no torch, so a GPU is named by its UUID.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

GB = 2**30
# Reasons for which the driver lowers the clocks, by NVML's names; idle GPUs and clocks set on purpose are none.
SLOWDOWNS = {
    "nvmlClocksEventReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksEventReasonHwThermalSlowdown": "too hot (hardware)",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "power brake (power supply)",
    "nvmlClocksEventReasonSwThermalSlowdown": "too hot (driver)",
    "nvmlClocksEventReasonSwPowerCap": "power limit",
}


class GpuUnreadable(Exception):
    """NVML cannot be asked here; the text says why."""


@dataclasses.dataclass(frozen=True)
class GpuState:
    """One GPU at one moment. None stands for what this GPU or driver does not tell."""

    name: str
    memory_gb: float  # GB of 2^30 bytes
    free_gb: float
    temperature: int | None = None  # degrees Celsius
    slowdown_temperature: int | None = None
    clock_mhz: int | None = None  # of the multiprocessors
    most_clock_mhz: int | None = None
    slowdowns: tuple[str, ...] = ()  # values of SLOWDOWNS
    uncorrected_errors: int | None = None  # ECC, since the driver was loaded
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    processes: tuple[int, ...] = ()  # process ids that compute on it, numbered as outside of any container


def read_gpu(uuid: str) -> GpuState:
    """Reads the GPU of a UUID, with or without the prefix "GPU-". Takes some milliseconds.

    Raises GpuUnreadable without nvidia-ml-py, without a driver, or for an unknown UUID.
    """
    with _nvml() as nvml:
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(name)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            title = nvml.nvmlDeviceGetName(handle)
        except nvml.NVMLError as error:
            raise GpuUnreadable(f"NVML cannot read {name}: {error}") from error
        return _state(nvml, handle, title.decode() if isinstance(title, bytes) else title, memory)


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """pynvml between its start and its end."""
    try:
        import pynvml
    except ImportError:
        raise GpuUnreadable("nvidia-ml-py is not installed") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise GpuUnreadable(f"NVML does not start: {error}") from error
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _state(nvml: Any, handle: Any, name: str, memory: Any) -> GpuState:
    """All that is asked after the handle and the memory; each single question may go unanswered."""

    def asked(question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(handle, *arguments)
        except nvml.NVMLError:
            return None

    remapped = asked(nvml.nvmlDeviceGetRemappedRows)  # (correctable, uncorrectable, pending, failed)
    reasons = asked(nvml.nvmlDeviceGetCurrentClocksEventReasons) or 0
    return GpuState(
        name=name,
        memory_gb=memory.total / GB,
        free_gb=memory.free / GB,
        temperature=asked(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        slowdown_temperature=asked(nvml.nvmlDeviceGetTemperatureThreshold, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        clock_mhz=asked(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
        most_clock_mhz=asked(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM),
        slowdowns=tuple(text for constant, text in SLOWDOWNS.items() if reasons & getattr(nvml, constant)),
        uncorrected_errors=asked(
            nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        remap_pending=None if remapped is None else bool(remapped[2]),
        remap_failed=None if remapped is None else bool(remapped[3]),
        processes=tuple(process.pid for process in asked(nvml.nvmlDeviceGetComputeRunningProcesses) or ()),
    )
