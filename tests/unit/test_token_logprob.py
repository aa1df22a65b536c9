"""The logprob of one token of each row: the reference here, the Triton kernel in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from rlhf_megatron.kernels.token_logprob import token_logprobs
from token_logprobs import check
from triton_kernels import assembly_for_hopper, run_in_interpreter


def test_the_kernel_equals_float64() -> None:
    run_in_interpreter("token_logprobs.py")


def test_the_kernel_compiles_for_a_gpu_with_wide_accesses() -> None:
    pytest.importorskip("triton", reason="the compiler is Triton's")
    from rlhf_megatron.kernels.triton_token_logprob import COLUMNS, WARPS, _token_logprob

    types = {"logits": "*fp32", "tokens": "*i64", "logprobs": "*fp32", "stride": "i32"}
    values = {"VOCABULARY": 151_936, "COLUMNS": COLUMNS}
    assert "ld.global.v4.b32" in assembly_for_hopper(_token_logprob, types, values, ["logits", "stride"], WARPS)


def test_logits_of_a_cpu() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
    tokens = torch.tensor([0, 49, 7, 7])
    check(token_logprobs(logits, tokens), logits, tokens)
