"""Sources of weights, read by rectangles of Hugging Face tensors, and filling a rank's parameters from one.

``hf_files`` is the source of a model folder; ``weight_map`` says which rectangle goes where.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from rlhf_megatron.models.architecture import Architecture, ModelError
from rlhf_megatron.models.families import FAMILIES
from rlhf_megatron.models.weight_map import SCORE, Block, Region, tensor_shapes
from rlhf_megatron.runtime.finite import are_finite, nonfinite
from rlhf_megatron.runtime.watchdog import watchdog


class WeightSource(Protocol):
    """Anything that gives rectangles of Hugging Face tensors."""

    def read(self, tensor: str, region: Region) -> Tensor:
        """Return ``tensor[region]``, on the CPU or the current device; all of it where the region is empty."""
        ...

    def where(self, tensor: str) -> str:
        """Return the origin of a tensor, for errors: a file."""
        ...


class RandomWeights:
    """Weights drawn from a seed, the same whatever the layout: factors of norms 1, biases 0, the rest N(0, 0.02).

    A scalar head has the standard deviation 1 / (hidden + 1), so that the first values are near 0.
    """

    def __init__(self, architecture: Architecture, seed: int, device: torch.device) -> None:
        self._shapes, self._seed, self._device = tensor_shapes(architecture), seed, device
        values = {"norm.weight": 0.0 if architecture.zero_centred_norms else 1.0, "bias": 0.0}
        self._values = {**FAMILIES[architecture.family].initial_values, **values}  # the first that fits counts

    def read(self, tensor: str, region: Region) -> Tensor:
        """Return ``tensor[region]`` in float32; the whole tensor is drawn so that every layout sees the same
        numbers."""
        shape = self._shapes[tensor]
        value = next((value for end, value in self._values.items() if tensor.endswith(end)), None)
        if value is not None:
            whole = torch.full(shape, value, device=self._device)
        else:
            digest = hashlib.sha256(f"{self._seed}/{tensor}".encode()).digest()
            generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest[:7], "little"))
            deviation = 1.0 / (shape[1] + 1) if tensor == SCORE else 0.02
            whole = torch.randn(shape, generator=generator, device=self._device).mul_(deviation)
        return whole[tuple(slice(start, stop) for start, stop in region)]

    def where(self, tensor: str) -> str:
        """Return the recipe key that they come from."""
        return "model.random_weights"


@torch.no_grad()
def load_blocks(blocks: Sequence[Block], parameters: dict[str, Tensor], source: WeightSource) -> None:
    """Fill ``parameters`` (by name) from ``source``; what no block covers (vocabulary padding) becomes zero.

    Raises ModelError where blocks and parameters do not name the same set, and where a parameter is not finite then.
    """
    named = {block.parameter for block in blocks}
    if named != set(parameters):
        odd = sorted(named ^ set(parameters))
        raise ModelError(f"the weight map and the model disagree on {len(odd)} parameters, the first is {odd[0]}")
    for parameter in parameters.values():
        parameter.zero_()
    for block in blocks:
        watchdog.beat()  # a large model takes its time
        window(parameters[block.parameter], block.offset, block.region).copy_(source.read(block.tensor, block.region))
    finite = dict(zip(parameters, are_finite(parameters.values()), strict=True))
    for block in blocks:
        if not finite[block.parameter]:
            _refuse_nonfinite(block.tensor, parameters[block.parameter].dtype, source)


def _refuse_nonfinite(tensor: str, dtype: torch.dtype, source: WeightSource) -> None:
    """Raise ModelError where a tensor is not finite as ``dtype``; of all of it, so that every rank says the same."""
    whole = source.read(tensor, ())
    given, cast = nonfinite([(tensor, whole)]), nonfinite([(tensor, whole.to(dtype))])
    if given:
        count = given[0].nan + given[0].infinite
        raise ModelError(
            f"{source.where(tensor)}: {tensor} holds {count} values that are not finite (NaN or infinity); download "
            "the model again"
        )
    if cast:
        kind, largest = str(dtype).removeprefix("torch."), torch.finfo(dtype).max
        raise ModelError(
            f"{source.where(tensor)}: {tensor} holds {cast[0].infinite} values beyond {largest:.3g}, the largest of "
            f"{kind}; set model.dtype to a type that has them, or take another model"
        )


def window(parameter: Tensor, offset: Sequence[int], region: Region) -> Tensor:
    """Return the view of ``parameter`` that begins at ``offset`` and has ``region``'s extents.

    vLLM stacks the matrices of experts in one parameter, which counts as one matrix here (see ``weight_map.Block``).
    """
    if parameter.dim() > len(offset):
        parameter = parameter.view(-1, *parameter.shape[2:])
    for dimension, (begin, (start, stop)) in enumerate(zip(offset, region, strict=True)):
        parameter = parameter.narrow(dimension, begin, stop - start)
    return parameter
