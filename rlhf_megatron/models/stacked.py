"""Tensors of a checkpoint that stack several of the model's, such as the matrices of all experts of a layer.

The library knows a model's tensors as matrices and vectors, of which each framework holds rectangles (``weight_map``).
Where files, and vLLM's loader, have them otherwise, the family says so in ``Family.stacked_tensors``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(gate_proj|up_proj|down_proj)\.weight")


@dataclasses.dataclass(frozen=True)
class Stacked:
    """``parts``: the model's tensors, one behind the other along a first dimension of their own.

    ``joined``: so many neighbours are one matrix there, rows below rows. ``transposed``: each matrix as its transpose.
    ``packed``: files may have it in MXFP4 instead (``mxfp4``).
    """

    parts: tuple[str, ...]
    transposed: bool = False
    packed: bool = False
    joined: int = 1

    def assembled(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the checkpoint's tensor, made of the parts in their order."""
        import torch

        stacked = torch.stack(list(tensors))
        stacked = stacked.unflatten(0, (-1, self.joined)).flatten(1, 2) if self.joined > 1 else stacked
        return stacked.transpose(1, 2) if self.transposed else stacked


def stored_shapes(shapes: Mapping[str, Shape], stacked: Mapping[str, Stacked]) -> dict[str, Shape]:
    """Return the tensors of a checkpoint and their shapes, given those of the model."""
    inside = {part for stack in stacked.values() for part in stack.parts}
    stored = {name: shape for name, shape in shapes.items() if name not in inside}
    for name, stack in stacked.items():
        rows, *others = shapes[stack.parts[0]]
        matrix = (rows * stack.joined, *others)
        stored[name] = (len(stack.parts) // stack.joined, *(reversed(matrix) if stack.transposed else matrix))
    return stored


def joint_experts(shapes: Mapping[str, Shape]) -> dict[str, Stacked]:
    """Return the two stacks of each layer's experts that transformers has in memory, and some checkpoints in files.

    They are gate_up_proj [experts, gate's and up's rows, columns] and down_proj [experts, rows, columns].
    """
    by_stack: dict[str, list[str]] = {}
    for name in shapes:
        match = _EXPERT.fullmatch(name)
        if match:
            matrix = "down_proj" if match[2] == "down_proj" else "gate_up_proj"
            by_stack.setdefault(f"{match[1]}.{matrix}", []).append(name)
    return {
        name: Stacked(tuple(parts), joined=2 if name.endswith("gate_up_proj") else 1)
        for name, parts in by_stack.items()
    }


def stored_tensors(
    tensors: Iterable[tuple[str, Tensor]], stacked: Mapping[str, Stacked]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a checkpoint's tensors, given the model's; a stack as soon as all of its parts have come."""
    stack_of = {part: name for name, stack in stacked.items() for part in stack.parts}
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        whole = stack_of.get(name)
        if whole is None:
            yield name, tensor
            continue
        parts = waiting.setdefault(whole, {})
        parts[name] = tensor
        if len(parts) == len(stacked[whole].parts):
            del waiting[whole]
            yield whole, stacked[whole].assembled([parts[part] for part in stacked[whole].parts])
    if waiting:
        raise ValueError(f"parts of {min(waiting)} are missing")
