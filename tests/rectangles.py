"""Rectangles of all sorts for the tests of the copying kernel. Run as a script, it checks the kernel where it is."""

from __future__ import annotations

import itertools

import torch

from rlhf_megatron.kernels.rectangle_copy import COLUMNS, RectangleCopies, copy_rectangles_reference
from rlhf_megatron.regather.recorded import Recorded

TYPES = (torch.float32, torch.bfloat16)


def check_kernel(device: str, exact_casts: bool, recorded: bool = False) -> None:
    """Check the kernel, or a CUDA graph of it, against ``Tensor.copy_``, and nothing written beside the rectangles.

    Triton's interpreter cuts float32 off to bfloat16 where hardware and torch round: without ``exact_casts`` the last
    bit may differ.
    """
    generator = torch.Generator().manual_seed(0)
    for of_origin, of_target in itertools.product(TYPES, TYPES):
        origin = torch.randn(40, 2 * COLUMNS + 16, generator=generator).to(device, of_origin)
        flat = torch.full([4 * COLUMNS + 64], 1000.0, dtype=of_target, device=device)
        whole = torch.full([50, 3 * COLUMNS], 1000.0, dtype=of_target, device=device)
        targets = [
            whole[2:19, 8 : COLUMNS + 184],  # aligned, in rows wider than a tile
            whole[30:35, 3001:3003],  # small, not aligned
            flat[3 : 3 + 3 * COLUMNS + 5],  # contiguous, not aligned, no multiple of a row
            whole[40:41],  # a row
        ]
        origins = [
            origin[3:20, 16 : COLUMNS + 192],
            origin[0:5, 5:7],
            origin.view(-1)[7 : 7 + 3 * COLUMNS + 5],
            origin.view(-1)[: 3 * COLUMNS].view(1, -1),
        ]
        copies = RectangleCopies(targets, origins, use_triton=True)
        run = Recorded(copies.launches, origin.device).run if recorded else copies.run
        for factor in (1, -2):  # the second time with other numbers in the same places
            origin.mul_(factor)
            run()
            found = flat.clone(), whole.clone()
            copy_rectangles_reference(targets, origins)
            for one, other in zip(found, (flat, whole), strict=True):
                if exact_casts or of_origin == of_target or of_target == torch.float32:
                    assert torch.equal(one, other), (of_origin, of_target)
                else:
                    torch.testing.assert_close(one, other, rtol=2**-7, atol=0)
                assert torch.equal(one == 1000, other == 1000) and (one == 1000).any()


if __name__ == "__main__":
    check_kernel("cpu", exact_casts=False)
