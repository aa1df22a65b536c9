"""A barrier of ranks in each other's memory: the reference here, the Triton kernel in Triton's interpreter."""

from __future__ import annotations

import re

import pytest

from peer_barriers import check_between_processes
from triton_kernels import assembly_for_hopper, run_in_interpreter


def test_no_rank_goes_ahead_of_another() -> None:
    check_between_processes(use_triton=False)


def test_the_kernel_counts_tells_and_waits() -> None:
    run_in_interpreter("peer_barriers.py")


def test_the_kernel_orders_what_other_gpus_see() -> None:
    pytest.importorskip("triton", reason="the compiler is Triton's")
    from rlhf_megatron.kernels.triton_peer_barrier import _come_and_wait

    types = {"own": "*i32", "words": "*i64"}
    assembly = assembly_for_hopper(_come_and_wait, types, {"LANES": 32, "COMPILED": True}, warps=1)
    operations = re.findall(r"(?:atom|st|ld|red)\.[\w.]*global[\w.]*", assembly)
    # The words' addresses are read in between; then the number is written, and looked for until it is there.
    assert operations == [
        "atom.global.gpu.relaxed.add.u32",
        "ld.global.b64",
        "ld.global.b64",
        "st.release.sys.global.b32",
        "atom.global.sys.acquire.add.u32",
    ]
    waiting = assembly[assembly.index("$L__BB0_1:") : assembly.index("ret;")]
    assert "atom.global.sys.acquire" in waiting and "bra \t$L__BB0_1" in waiting and "st.release" not in waiting
