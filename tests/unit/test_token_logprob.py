"""The logprob of one token of each row: the reference here, the Triton kernel in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlhf_megatron.kernels.token_logprob import token_logprobs
from token_logprobs import check


def test_the_kernel_equals_float64() -> None:
    pytest.importorskip("triton", reason="the interpreter comes with Triton")
    script = Path(__file__).parent.parent / "token_logprobs.py"
    # The interpreter has to be asked for before Triton is imported.
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-P", str(script)], env=environment, check=True, timeout=120)


def test_the_kernel_compiles_for_a_gpu_with_wide_accesses() -> None:
    triton = pytest.importorskip("triton", reason="the compiler is Triton's")
    from triton.backends.compiler import GPUTarget

    from rlhf_megatron.kernels.triton_token_logprob import COLUMNS, _token_logprob

    values = {"VOCABULARY": 151_936, "COLUMNS": COLUMNS}
    signature = {"logits": "*fp32", "tokens": "*i64", "found": "*fp32", "stride": "i32"}
    signature |= dict.fromkeys(values, "constexpr")
    aligned = {(place,): [["tt.divisibility", 16]] for place in (0, 3)}
    source = triton.compiler.ASTSource(fn=_token_logprob, signature=signature, constexprs=values, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 16})
    assert "ld.global.v4.b32" in compiled.asm["ptx"] and "cubin" in compiled.asm


def test_logits_of_a_cpu() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
    tokens = torch.tensor([0, 49, 7, 7])
    check(token_logprobs(logits, tokens), logits, tokens)
