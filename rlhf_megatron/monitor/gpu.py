"""Readings of a GPU by NVML (nvidia-ml-py): memory, temperature, clocks, errors, processes, utilization.

Only readings: what is healthy is judged by runtime/preflight. Imports no torch, so a GPU is named by its UUID.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from statistics import fmean
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
    """Read the GPU of a UUID, with or without the prefix "GPU-". Takes some milliseconds.

    Raises GpuUnreadable without nvidia-ml-py, without a driver, or for an unknown UUID.
    """
    with _nvml() as nvml:
        name = _full_name(uuid)
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(name)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            title = nvml.nvmlDeviceGetName(handle)
        except nvml.NVMLError as error:
            raise GpuUnreadable(f"NVML cannot read {name}: {error}") from error
        return _state(nvml, handle, title.decode() if isinstance(title, bytes) else title, memory)


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """Give pynvml between its start and its end."""
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
    """Return all that is asked after the handle and the memory; each single question may go unanswered."""

    def asked(question: Callable[..., Any], *arguments: Any) -> Any:
        return _asked(nvml, question, handle, *arguments)

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


@dataclasses.dataclass(frozen=True)
class GpuUse:
    """Utilization of a GPU over some time. None stands for what it does not tell."""

    utilization: float | None  # share of the time in which a kernel ran, of samples a second apart
    watts: float | None  # mean power
    temperature: int | None  # degrees Celsius, the highest of these samples


class GpuMeter:
    """Sampler of one GPU in a thread for as long as it is open."""

    def __init__(self, uuid: str, interval: float = 1.0) -> None:
        """Begin at once, a sample each ``interval`` seconds; raises GpuUnreadable as ``read_gpu``."""
        self._open = contextlib.ExitStack()
        self._nvml = self._open.enter_context(_nvml())
        try:
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(_full_name(uuid))
        except self._nvml.NVMLError as error:
            self._open.close()
            raise GpuUnreadable(f"NVML cannot read {_full_name(uuid)}: {error}") from error
        self._lock, self._interval, self._ended = threading.Lock(), interval, threading.Event()
        self._utilization: list[float] = []
        self._temperature: list[int] = []
        self._energy, self._since = self._joules(), time.monotonic()
        self._thread = threading.Thread(target=self._run, name="gpu-meter", daemon=True)
        self._thread.start()

    def take(self) -> GpuUse:
        """Return the utilization since the last call, of which there is a sample however short that was."""
        if not self._utilization or not self._temperature:
            self._sample()
        energy, now = self._joules(), time.monotonic()
        with self._lock:
            utilization, self._utilization = self._utilization, []
            temperature, self._temperature = self._temperature, []
        watts = None
        if energy is not None and self._energy is not None and now > self._since:
            watts = (energy - self._energy) / (now - self._since)
        self._energy, self._since = energy, now
        return GpuUse(fmean(utilization) if utilization else None, watts, max(temperature, default=None))

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()
        self._open.close()

    def _run(self) -> None:
        self._sample()
        while not self._ended.wait(self._interval):
            self._sample()

    def _sample(self) -> None:
        rates = _asked(self._nvml, self._nvml.nvmlDeviceGetUtilizationRates, self._handle)
        degrees = _asked(self._nvml, self._nvml.nvmlDeviceGetTemperature, self._handle, self._nvml.NVML_TEMPERATURE_GPU)
        with self._lock:
            self._utilization += [] if rates is None else [rates.gpu / 100]
            self._temperature += [] if degrees is None else [degrees]

    def _joules(self) -> float | None:
        """Return the energy in joules that the GPU has used since the driver was loaded."""
        millijoules = _asked(self._nvml, self._nvml.nvmlDeviceGetTotalEnergyConsumption, self._handle)
        return None if millijoules is None else millijoules / 1000


def _full_name(uuid: str) -> str:
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _asked(nvml: Any, question: Callable[..., Any], *arguments: Any) -> Any:
    """Return the driver's answer, or None where there is none."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return None
