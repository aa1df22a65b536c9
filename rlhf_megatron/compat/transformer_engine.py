"""Private names of Transformer Engine that are used here, and the versions that were run."""

from __future__ import annotations

import torch

from rlhf_megatron.compat.private_names import REGISTRY, PrivateName

PACKAGES = ("transformer-engine",)
KNOWN = {"first": "2.20.2", "last": "2.20.2"}
"""The versions that were run."""

NAMES = (
    PrivateName(
        "transformer_engine.pytorch.module.base",
        "TransformerEngineBaseModule._fp8_workspaces",
        "weights in 8 bits between passes",
        absent="they stay on the GPU",
    ),
)

REGISTRY[PACKAGES] = NAMES


def forget_quantized_weights(model: torch.nn.Module) -> None:
    """Free the copies in 8 bits that layers keep of their weights, and of the transposes; the next pass makes them.

    They serve all micro-batches between two optimizer steps. Kept longer they would take two bytes a weight from the
    rollout, and be those of weights before a step.
    """
    for module in model.modules():
        getattr(module, "_fp8_workspaces", {}).clear()
