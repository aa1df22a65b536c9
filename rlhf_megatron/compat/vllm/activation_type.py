"""The numbers that an activation learns, which vLLM does not have as a model's other weights."""

from __future__ import annotations

from typing import Any

import torch

from rlhf_megatron.compat.patches import patch
from rlhf_megatron.compat.vllm.names import KNOWN, PACKAGES


@patch(
    *PACKAGES,
    **KNOWN,
    why="vLLM has the numbers of xIELU (Apertus) in bfloat16 in models of any type, which loading rounds to, and two "
    "of the four as buffers, which are no parameters for a sync to reach",
    upstream="https://github.com/vllm-project/vllm/pull/30635",
)
def learn_activations_as_weights() -> None:
    """Have all numbers of xIELU as parameters, in the type in which vLLM makes a model's other weights."""
    from vllm.model_executor.layers import activation

    if not hasattr(activation, "XIELU"):
        return
    original = activation.XIELU.__init__

    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **{"dtype": torch.get_default_dtype()} | options)
        for name, buffer in dict(self.named_buffers()).items():
            delattr(self, name)
            setattr(self, name, torch.nn.Parameter(buffer, requires_grad=False))

    activation.XIELU.__init__ = __init__
