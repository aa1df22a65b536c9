"""The kernel of ``peer_barrier``: one program of one warp, in which each thread looks after another rank.

While it waits it keeps a warp busy, as NCCL's kernels do; a GPU that ranks share gives each its time nevertheless.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _come_and_wait(  # type: ignore[no-untyped-def] # Triton looks names of annotations up and accepts its own alone
    own, words, LANES: tl.constexpr, COMPILED: tl.constexpr
):
    call = tl.atomic_add(own, 1, sem="relaxed", scope="gpu") + 1
    calls = tl.full([LANES], 0, tl.int32) + call
    places = tl.load(words + tl.arange(0, LANES))
    awaited = tl.load(words + LANES + tl.arange(0, LANES)).to(tl.pointer_type(tl.int32))
    # What this GPU's earlier kernels wrote is to be seen before the number is, hence a release. It is a store, since
    # some links between GPUs know no atomic operations, and in assembly, since Triton's own stores release nothing.
    if COMPILED:
        tl.inline_asm_elementwise(
            "st.release.sys.global.b32 [$1], $2; mov.b32 $0, $2;",  # which has to have a result
            "=r,l,r", [places, calls], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.atomic_xchg(places.to(tl.pointer_type(tl.int32)), calls, sem="release", scope="sys")
    # In this GPU's own memory, where every GPU has atomic operations: adding nothing reads what is there now.
    while tl.min(tl.atomic_add(awaited, 0, sem="acquire", scope="sys"), axis=0) < call:
        pass


def launch(own: Tensor, words: Tensor) -> Callable[[], None]:
    """Return a function that counts on in ``own`` [1 or more] int32 and waits, by ``words`` [2, lanes] int64 (see
    ``peer_barrier``)."""
    is_compiled = isinstance(_come_and_wait, triton.JITFunction)  # Triton's interpreter knows no assembly
    grid = (1, 1, 1)
    arguments = own, words, words.shape[1], is_compiled
    compiled = _come_and_wait.warmup(*arguments, num_warps=1, grid=grid)
    start = compiled[grid] if compiled else functools.partial(_come_and_wait[grid], num_warps=1)
    return functools.partial(start, *arguments)
