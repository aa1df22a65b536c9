"""Low-rank adapters to start from."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.lora import Adaptation, factor_shapes
from rlhf_megatron.models.weight_map import Region


class NewAdapters:
    """Adapters drawn from a seed, the same whatever the layout; a WeightSource.

    As PEFT draws them: A uniform within 1 / sqrt(columns) around 0, and B zero, so that the model is as it was.
    """

    def __init__(self, architecture: Architecture, adaptation: Adaptation, seed: int) -> None:
        self._shapes, self._seed = factor_shapes(architecture, adaptation), seed

    def read(self, tensor: str, region: Region) -> Tensor:
        """Return ``tensor[region]`` in float32 on the CPU."""
        shape = self._shapes[tensor]
        whole = torch.zeros(shape)
        if tensor.endswith("lora_A.weight"):
            digest = hashlib.sha256(f"{self._seed}/{tensor}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
            bound = shape[1] ** -0.5
            whole = torch.rand(shape, generator=generator).mul_(2 * bound).sub_(bound)
        return whole[tuple(slice(start, stop) for start, stop in region)]

    def where(self, tensor: str) -> str:
        """Return the recipe section that they come from."""
        return "actor.lora"
