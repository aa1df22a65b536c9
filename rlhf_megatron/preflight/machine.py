"""Checks of one machine: its GPU, its limits, its RDMA ports, and the disk that checkpoints go to."""

from __future__ import annotations

import dataclasses
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from rlhf_megatron.monitor.gpu import SLOWDOWNS, GpuState, GpuUnreadable, read_gpu
from rlhf_megatron.preflight.check import Check, Result
from rlhf_megatron.topology.open_files import HOW_TO_RAISE, files_needed, raise_file_limit

GB = 2**30
_ENOUGH_FREE, _TOO_LITTLE_FREE = 0.92, 0.8  # of a GPU's memory, with this process's CUDA and NCCL in it already
_NEAR_SLOWDOWN = 5  # degrees Celsius
_LOW_CLOCK = 0.6  # of the highest, under load
_POWER_LIMIT = SLOWDOWNS["nvmlClocksEventReasonSwPowerCap"]  # usual under full load
_DRIVER_TOO_HOT = SLOWDOWNS["nvmlClocksEventReasonSwThermalSlowdown"]
_LOAD_SECONDS, _LOAD_SIZE, _LOAD_PRODUCTS = 1.0, 8192, 20  # products in flight outlast a reading of NVML
WRITE_BYTES = 1 << 28
_WRITE_BLOCK, _WRITE_SECONDS = 1 << 23, 2.0
_LONG_SAVE_SECONDS = 600.0

# ---- the GPU


def gpu_checks(local_rank: int) -> list[Check]:
    """Judge the CUDA device of a rank of this machine while it multiplies matrices; skipped where there is none."""
    if not torch.cuda.is_available():
        return [Check("gpu", "skipped", "no GPU")]
    if local_rank >= torch.cuda.device_count():
        seen = f"no GPU for local rank {local_rank}: this node has {torch.cuda.device_count()}"
        return [Check("gpu", "fail", seen, "lower --nproc-per-node")]
    torch.cuda.set_device(local_rank)
    torch.zeros(1, device="cuda")  # this process counts among the GPU's from here on
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    try:
        before = read_gpu(uuid)
        _load()
        under_load = read_gpu(uuid)
    except GpuUnreadable as error:
        return [Check("gpu", "skipped", str(error), "pip install nvidia-ml-py, to see errors and temperature")]
    finally:
        torch.cuda.synchronize()
    return [*judge_memory(before), *judge_under_load(under_load)]


def judge_memory(gpu: GpuState) -> Iterator[Check]:
    """Judge free memory and other processes, before this one has taken any."""
    share, seen = gpu.free_gb / gpu.memory_gb, f"{gpu.free_gb:.1f} of {gpu.memory_gb:.1f} GB free"
    result: Result = "ok" if share >= _ENOUGH_FREE else "warn" if share >= _TOO_LITTLE_FREE else "fail"
    yield Check("gpu memory", result, seen, "" if result == "ok" else "end what holds the memory (nvidia-smi)")
    others = len(gpu.processes) - 1
    if others > 0:  # which one is this process cannot be told inside a container, where numbers differ
        listed = ", ".join(map(str, gpu.processes))
        yield Check("gpu processes", "warn", f"{others} besides this one, of {listed}", "end them; see nvidia-smi")
    else:
        yield Check("gpu processes", "ok", "none besides this one")


def judge_under_load(gpu: GpuState) -> Iterator[Check]:
    """Judge errors of the memory, temperature and clocks, while the GPU computes."""
    if gpu.uncorrected_errors or gpu.remap_failed:
        failed = "; remapping of rows has failed" if gpu.remap_failed else ""
        seen = f"{gpu.uncorrected_errors or 0} uncorrected ECC errors{failed}"
        yield Check("gpu errors", "fail", seen, "take the node out and reset the GPU")
    elif gpu.remap_pending:
        yield Check("gpu errors", "warn", "a row of memory waits to be remapped", "reset the GPU when the node is idle")
    elif gpu.uncorrected_errors is None:
        yield Check("gpu errors", "skipped", "this GPU does not count ECC errors")
    else:
        yield Check("gpu errors", "ok", "no uncorrected ECC errors")
    yield _judge_temperature(gpu)
    yield _judge_clocks(gpu)


def _judge_temperature(gpu: GpuState) -> Check:
    if gpu.temperature is None:
        return Check("gpu temperature", "skipped", "this GPU does not tell it")
    limit = gpu.slowdown_temperature
    seen = f"{gpu.temperature} C" + (f", slows down at {limit} C" if limit else "")
    if limit and gpu.temperature >= limit - _NEAR_SLOWDOWN:
        result: Result = "fail" if gpu.temperature >= limit else "warn"
        return Check("gpu temperature", result, seen, "look at fans, air flow and the rack's cooling")
    return Check("gpu temperature", "ok", seen)


def _judge_clocks(gpu: GpuState) -> Check:
    """Return clocks under load; the power limit lowers those of a healthy GPU too."""
    if gpu.clock_mhz is None:
        return Check("gpu clocks", "skipped", "this GPU does not tell them")
    seen = f"{gpu.clock_mhz} of {gpu.most_clock_mhz} MHz under load"
    seen += f"; held back: {', '.join(gpu.slowdowns)}" if gpu.slowdowns else ""
    hardware = [reason for reason in gpu.slowdowns if reason not in (_POWER_LIMIT, _DRIVER_TOO_HOT)]
    low = gpu.most_clock_mhz is not None and gpu.clock_mhz < _LOW_CLOCK * gpu.most_clock_mhz
    if hardware:
        return Check("gpu clocks", "fail", seen, "look at cooling and power supply; take the node out until then")
    if _DRIVER_TOO_HOT in gpu.slowdowns or (low and _POWER_LIMIT not in gpu.slowdowns):
        return Check("gpu clocks", "warn", seen, "look at cooling, and at clocks set by nvidia-smi -lgc")
    return Check("gpu clocks", "ok", seen)


def _load() -> None:
    """Have the GPU multiply bfloat16 matrices for a second, in which its clocks rise, and a little after the return."""
    left, right = (torch.randn(_LOAD_SIZE, _LOAD_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    end = time.monotonic() + _LOAD_SECONDS
    while time.monotonic() < end:
        torch.cuda.synchronize()
        for _ in range(_LOAD_PRODUCTS):
            torch.mm(left, right)


# ---- files, sockets and the network's devices


def open_files_check(ranks: int) -> Check:
    """Check of files and sockets that a rank of a world of ``ranks`` may have open against the limit."""
    limit, needed = raise_file_limit(), files_needed(ranks)
    seen = f"{limit:,} may be open, {needed:,} are needed at most"
    return Check("open files", "ok", seen) if limit >= needed else Check("open files", "fail", seen, HOW_TO_RAISE)


def listen_check(ranks: int, limit: Path = Path("/proc/sys/net/core/somaxconn")) -> Check:
    """Check of how many connections may wait to be accepted, where all ``ranks`` come to one store at the same time."""
    waiting, wanted = _read(limit), min(ranks, socket.SOMAXCONN)
    if not waiting.isdecimal():
        return Check("listen queue", "skipped", f"{limit} cannot be read")
    seen = f"{waiting} connections may wait to be accepted"
    if int(waiting) < wanted:
        return Check("listen queue", "warn", seen, f"sysctl -w net.core.somaxconn={wanted}")
    return Check("listen queue", "ok", seen)


def rdma_check(expected: bool, root: Path = Path("/sys/class/infiniband")) -> Check:
    """Return the RDMA devices (InfiniBand and RoCE) of this machine with an active port, as the kernel lists them."""
    if not expected:
        return Check("rdma", "skipped", "slurm.network is not infiniband or roce")
    ports = {f"{port.parent.parent.name}:{port.name}": port for port in sorted(root.glob("*/ports/*"))}
    active = [f"{name} ({_read(port / 'rate')})" for name, port in ports.items() if "ACTIVE" in _read(port / "state")]
    asleep = [name for name, port in ports.items() if "ACTIVE" not in _read(port / "state")]
    if not active:
        seen = f"no active port ({', '.join(asleep)} are down)" if asleep else f"no device under {root}"
        return Check("rdma", "fail", seen, "load the driver and check the cables (ibstat), or use TCP knowingly")
    if asleep:
        seen = f"{', '.join(active)}; down: {', '.join(asleep)}"
        return Check("rdma", "warn", seen, "check the cables (ibstat), or leave the port out by NCCL_IB_HCA")
    return Check("rdma", "ok", ", ".join(active))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


# ---- the disk


@dataclasses.dataclass(frozen=True)
class Files:
    """Checkpoints or exports of a run: so many, of so many bytes each."""

    number: int
    bytes_each: float

    def bytes_of(self, most: int) -> float:
        """Return the bytes of all of them, or of so many if that is less."""
        return min(self.number, most) * self.bytes_each


def disk_check(folder: Path, checkpoints: Files, exports: Files, share: float) -> Check:
    """Return space and write speed of the run's ``folder``, which is made if it is not there.

    Args:
        folder: where checkpoints and exports go.
        checkpoints: those that lie there at a time, the one that is being written included.
        exports: all that the run makes.
        share: of a checkpoint that this machine writes.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        speed = write_speed(folder)
    except OSError as error:
        return Check("disk", "fail", f"{folder}: {error.strerror}", "choose another run_root")
    space, seconds = space_check(folder, checkpoints, exports), checkpoints.bytes_of(1) * share / speed
    took = f", {seconds:.0f} s for each checkpoint" if checkpoints.number else ""
    space = space._replace(seen=f"{space.seen}; written at {speed / 1e9:.2f} GB/s{took}")
    if space.result == "ok" and seconds > _LONG_SAVE_SECONDS:
        return space._replace(result="warn", advice="choose a faster file system for run_root, or save less often")
    return space


def space_check(folder: Path, checkpoints: Files, exports: Files) -> Check:
    """Return space for what goes into ``folder``, which is not made; the arguments are those of ``disk_check``."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not os.access(there, os.W_OK) or not there.is_dir():
        return Check("disk", "fail", f"run_root: {there} cannot be written", "choose another run_root")
    free = shutil.disk_usage(there).free
    seen = f"{free / GB:.1f} GB free"
    if checkpoints.number:
        seen += f"; {checkpoints.number} checkpoints of {checkpoints.bytes_each / GB:.1f} GB"
    if exports.number:
        seen += f"; {exports.number} exports of {exports.bytes_each / GB:.1f} GB"
    if free < checkpoints.bytes_of(1) + exports.bytes_of(1):
        return Check("disk", "fail", seen, f"make room under {folder}, or choose another run_root")
    if free < checkpoints.bytes_of(checkpoints.number) + exports.bytes_of(exports.number):
        return Check("disk", "warn", seen, "make room, or lower checkpoint.keep_last_k, or export less often")
    return Check("disk", "ok", seen)


def write_speed(folder: Path) -> float:
    """Return bytes per second into a new file until they are on the disk: up to 256 MB, or for two seconds. Removes
    it."""
    block = os.urandom(_WRITE_BLOCK)  # nothing that a file system could shrink
    path = folder / f".preflight-{os.uname().nodename}-{os.getpid()}"
    written, started = 0, time.perf_counter()
    try:
        with path.open("wb", buffering=0) as file:
            while written < WRITE_BYTES and time.perf_counter() - started < _WRITE_SECONDS:
                written += file.write(block)
                os.fsync(file.fileno())
        return written / (time.perf_counter() - started)
    finally:
        path.unlink(missing_ok=True)
