"""Triton's kernels where there is no GPU: carried out by its interpreter, and compiled for one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest


def run_in_interpreter(script: str, *arguments: str) -> None:
    """Run a script of this folder, which checks kernels; it has to ask for the interpreter before Triton is there."""
    pytest.importorskip("triton", reason="the interpreter comes with Triton")
    path = Path(__file__).with_name(script)
    found_in = os.pathsep.join([str(path.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": found_in}
    checked = subprocess.run(
        [sys.executable, "-P", str(path), *arguments], env=environment, capture_output=True, text=True, timeout=600
    )
    assert checked.returncode == 0, checked.stderr


def assembly_for_hopper(
    function: Any, types: Mapping[str, str], constants: Mapping[str, Any], aligned: Sequence[str] = (), warps: int = 4
) -> str:
    """Return what a kernel becomes for GPUs of the kind of the H200; ``aligned`` arguments are multiples of 16.

    ``types`` has those of all arguments but the ``constants``.
    """
    triton = pytest.importorskip("triton", reason="the compiler is Triton's")
    from triton.backends.compiler import GPUTarget

    signature = {name: "constexpr" if name in constants else types[name] for name in function.arg_names}
    multiples = {(list(signature).index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = triton.compiler.ASTSource(fn=function, signature=signature, constexprs=dict(constants), attrs=multiples)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert "cubin" in compiled.asm
    assembly: str = compiled.asm["ptx"]
    return assembly


def let_loops_end_at_tensors() -> None:
    """Let loops end at tensors: numpy 2.4 makes no index of an array with one element, which Triton 3.6's interpreter
    asks for in ``range``."""
    from triton.runtime import interpreter

    usual: Any = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        usual(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
