"""GPUs that plans know, from their vendor's data sheets."""

from __future__ import annotations

from typing import NamedTuple


class Gpu(NamedTuple):
    """One kind of GPU.

    Attributes:
        memory_gb: in GB of 2^30 bytes, as the card reports it; of an A100 the larger one.
        flops: dense bfloat16 operations per second.
        bandwidth: bytes per second of its memory.
        hopper: it multiplies blocks in 8 bits, each with its own scale.
        fp8: it multiplies in 8 bits.
    """

    memory_gb: float
    flops: float
    bandwidth: float
    hopper: bool = False
    fp8: bool = True


GPUS = {
    "A100": Gpu(80.0, 312e12, 2.04e12, fp8=False),
    "A800": Gpu(80.0, 312e12, 2.04e12, fp8=False),
    "B200": Gpu(179.0, 2250e12, 8.0e12),
    "GB200": Gpu(185.0, 2500e12, 8.0e12),
    "H100": Gpu(80.0, 989e12, 3.35e12, hopper=True),
    "H20": Gpu(96.0, 148e12, 4.0e12, hopper=True),
    "H200": Gpu(140.0, 989e12, 4.8e12, hopper=True),
    "H800": Gpu(80.0, 989e12, 3.35e12, hopper=True),
    "L40S": Gpu(45.0, 362e12, 0.864e12),
}
# What cards of another form reach, by what their names contain.
_OTHER_FLOPS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H200 NVL": 835e12}


def peak_flops(name: str) -> float | None:
    """Return dense bfloat16 operations per second of a GPU by its name, as torch gives it; None where it is not
    known."""
    peaks = {kind: gpu.flops for kind, gpu in GPUS.items()} | _OTHER_FLOPS
    return max(((len(known), peak) for known, peak in peaks.items() if known in name), default=(0, None))[1]
