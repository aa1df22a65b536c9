"""Tensors of a checkpoint that stack several of the model's, such as the matrices of all experts of a layer.

The library knows a model's tensors as matrices and vectors, of which each framework holds rectangles (``weight_map``).
Where files, and vLLM's loader, have them otherwise, the family says so in ``Family.stacked_tensors``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Stacked:
    """``parts``: the model's tensors, one behind the other along a first dimension of their own.

    ``transposed``: each as its transpose. ``packed``: files may have it in MXFP4 instead (``mxfp4``).
    """

    parts: tuple[str, ...]
    transposed: bool = False
    packed: bool = False

    def assembled(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the checkpoint's tensor, made of the parts in their order."""
        import torch

        return torch.stack([part.t() if self.transposed else part for part in tensors])


def stored_shapes(shapes: Mapping[str, Shape], stacked: Mapping[str, Stacked]) -> dict[str, Shape]:
    """Return the tensors of a checkpoint and their shapes, given those of the model."""
    inside = {part for stack in stacked.values() for part in stack.parts}
    stored = {name: shape for name, shape in shapes.items() if name not in inside}
    for name, stack in stacked.items():
        part = shapes[stack.parts[0]]
        stored[name] = (len(stack.parts), *(reversed(part) if stack.transposed else part))
    return stored


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
        found = waiting.setdefault(whole, {})
        found[name] = tensor
        if len(found) == len(stacked[whole].parts):
            del waiting[whole]
            yield whole, stacked[whole].assembled([found[part] for part in stacked[whole].parts])
    if waiting:
        raise ValueError(f"parts of {min(waiting)} are missing")
