"""Products of numbers in 8 bits (e4m3) with scales by blocks, by DeepGEMM, which vLLM's wheel has.

DeepGEMM compiles a kernel for each shape and range of tokens when it is first asked for, some seconds each, and keeps
them in vLLM's cache folder. Where it cannot, the process does without: a warning says why, once.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

Quantized = tuple[Tensor, Tensor]
"""Numbers [n, k] in e4m3 and scales in float32: of tokens [n, k / 128], by columns; of weights [n / 128, k / 128], by
rows."""
_REFUSED: list[str] = []  # why DeepGEMM does not run in this process


def multiply(tokens: Quantized, weights: Quantized, output: Tensor, otherwise: str) -> bool:
    """Write the product of tokens [n, k] and weights [m, k] of blocks into ``output`` [n, m], bfloat16.

    False where DeepGEMM does not run here; ``otherwise`` ends the warning about it: what multiplies instead.
    """
    if _REFUSED:
        return False
    try:
        from vllm.utils.deep_gemm import fp8_gemm_nt, is_deep_gemm_supported

        if not is_deep_gemm_supported():
            return False
        # Scales stay what they are, as in training, and are not rounded to powers of two.
        fp8_gemm_nt(tokens, weights, output, is_deep_gemm_e8m0_used=False)
        return True
    except torch.OutOfMemoryError:
        raise
    except (ImportError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        _REFUSED.append(reason)
        warnings.warn(f"DeepGEMM does not run here ({reason}); {otherwise}", stacklevel=2)
        return False
