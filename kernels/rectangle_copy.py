"""Many rectangles copied at once, between parameters and buffers of any strides and number types.

``torch._foreach_copy_`` is the reference, and what CPUs use. On a GPU it starts a kernel for each rectangle that is not
contiguous; the tens of thousands of a mixture of experts then take longer to start than to copy. There one Triton
kernel (``triton_rectangle_copy``) walks a table of all of them.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

COLUMNS = 1024  # of a tile; a contiguous rectangle is cut into rows of this length
ROWS = 16  # of a tile
_WORD_BYTES = 16  # the widest access of a GPU's thread


@torch.no_grad()
def copy_rectangles_reference(targets: Sequence[Tensor], origins: Sequence[Tensor]) -> None:
    """Do ``targets[i].copy_(origins[i])`` for all i; shapes are equal in pairs, types may differ."""
    if targets:
        torch._foreach_copy_(list(targets), list(origins))


class RectangleCopies:
    """Copies between fixed places, worked out once and carried out any number of times without allocating.

    Attributes:
        launches: what carries them out on the current stream, in order; none where there is nothing to copy.
    """

    def __init__(self, targets: Sequence[Tensor], origins: Sequence[Tensor], use_triton: bool | None = None) -> None:
        """Take views [n] or [n, m] of one device, equal in shape in pairs; a GPU's views must have contiguous rows.

        ``use_triton``: whether the kernel or the reference copies; by default the kernel where there is a GPU.
        """
        self.launches: list[Callable[[], None]] = []
        if not targets:
            return
        if targets[0].is_cuda if use_triton is None else use_triton:
            self.launches = _launches(targets, origins)
        else:
            self.launches = [functools.partial(copy_rectangles_reference, list(targets), list(origins))]

    def run(self) -> None:
        """Carry them out on the current stream."""
        for launch in self.launches:
            launch()


def _launches(targets: Sequence[Tensor], origins: Sequence[Tensor]) -> list[Callable[[], None]]:
    """Launch once for each pair of types, and for places that allow the widest accesses and those that do not."""
    from rlhf_megatron.kernels.triton_rectangle_copy import launch

    jobs: dict[tuple[torch.dtype, torch.dtype, bool], list[tuple[int, ...]]] = defaultdict(list)
    for target, origin in zip(targets, origins, strict=True):
        for job in _matrices(target, origin):
            jobs[origin.dtype, target.dtype, _is_aligned(job, origin, target)].append(job)
    made = []
    for (origin_type, target_type, aligned), rows in jobs.items():
        table = torch.tensor(rows, dtype=torch.int64)
        tiles = _tiles(table)
        device = targets[0].device
        made.append(launch(table.to(device), tiles.to(device), origin_type, target_type, aligned))
    return made


def _matrices(target: Tensor, origin: Tensor) -> list[tuple[int, ...]]:
    """Return (address of origin, of target, rows, columns, row stride of origin, of target) of one rectangle, in
    elements."""
    addresses = origin.data_ptr(), target.data_ptr()
    if not (target.is_contiguous() and origin.is_contiguous()):
        if target.ndim != 2 or target.stride(1) != 1 or origin.stride(1) != 1:
            raise ValueError(f"a rectangle {list(target.shape)} with strides {target.stride()} has no contiguous rows")
        return [(*addresses, *target.shape, origin.stride(0), target.stride(0))]
    rows, rest = divmod(target.numel(), COLUMNS)
    done = rows * COLUMNS
    whole: list[tuple[int, ...]] = [(*addresses, rows, COLUMNS, COLUMNS, COLUMNS)] if rows else []
    ends = addresses[0] + done * origin.element_size(), addresses[1] + done * target.element_size()
    return [*whole, (*ends, 1, rest, rest, rest)] if rest else whole


def _is_aligned(job: tuple[int, ...], origin: Tensor, target: Tensor) -> bool:
    """Return whether every row begins and ends at a multiple of the widest access, on both sides."""
    of_origin, of_target, _, columns, origin_stride, target_stride = job
    distances = [
        of_origin, of_target, columns * origin.element_size(), columns * target.element_size(),
        origin_stride * origin.element_size(), target_stride * target.element_size(),
    ]  # fmt: skip
    return all(distance % _WORD_BYTES == 0 for distance in distances)


def _tiles(table: Tensor) -> Tensor:
    """Return [tiles, 3] int32: the row of ``table``, the first row and the first column of each tile."""
    rows = table[:, 2].add(ROWS - 1).div(ROWS, rounding_mode="floor")
    columns = table[:, 3].add(COLUMNS - 1).div(COLUMNS, rounding_mode="floor")
    counts = rows * columns
    job = torch.repeat_interleave(torch.arange(len(table)), counts)
    within = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts)[job]
    across = columns[job]
    first_row = within.div(across, rounding_mode="floor") * ROWS
    return torch.stack([job, first_row, within % across * COLUMNS], dim=1).to(torch.int32).contiguous()
