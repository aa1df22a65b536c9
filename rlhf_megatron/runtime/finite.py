"""Numbers that are not finite in tensors: weights as they are read, saved and exported, and gradients.

Looking takes one pass over a tensor and no memory: its smallest and its largest number are taken, in which a nan or an
infinity shows. What is wrong with a tensor is counted where something is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.errors import UserError
from rlhf_megatron.runtime.ranks import named_ranks

_SHOWN = 3


class NotFiniteError(UserError):
    """Weights that are not finite: nothing can be learned, saved or exported with them."""

    is_transient = True  # an attempt that goes on from before may not come to them again


@dataclasses.dataclass(frozen=True)
class BadTensor:
    """A tensor that is not finite on a rank, and how many of its elements are nan or infinite."""

    name: str
    nan: int
    infinite: int
    elements: int


def are_finite(tensors: Iterable[Tensor]) -> list[bool]:
    """Return for each tensor, of floating-point numbers, whether they are all finite.

    One wait for each device, whatever the number of tensors.
    """
    results: list[bool] = []
    by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        results.append(True)
        if tensor.numel():
            extremes = torch.stack(torch.aminmax(tensor.detach())).double()
            by_device.setdefault(tensor.device, []).append((index, extremes))
    for of_device in by_device.values():
        finite = torch.stack([extremes for _, extremes in of_device]).isfinite().all(dim=1).tolist()
        for (index, _), is_finite in zip(of_device, finite, strict=True):
            results[index] = is_finite
    return results


def nonfinite(named_tensors: Iterable[tuple[str, Tensor]]) -> list[BadTensor]:
    """Return the tensors that are not finite, in their order."""
    named = list(named_tensors)
    finite = are_finite(tensor for _, tensor in named)
    return [
        BadTensor(name, int(tensor.isnan().sum()), int(tensor.isinf().sum()), tensor.numel())
        for (name, tensor), is_finite in zip(named, finite, strict=True)
        if not is_finite
    ]


def nonfinite_gradients(named_parameters: Iterable[tuple[str, Tensor]]) -> list[BadTensor]:
    """Return the parameters of ``module.named_parameters()`` whose gradient (Megatron's main_grad, else grad) is not
    finite, in the module's order."""
    return nonfinite(
        (name, gradient)
        for name, parameter in named_parameters
        if (gradient := getattr(parameter, "main_grad", None)) is not None or (gradient := parameter.grad) is not None
    )


def describe_nonfinite(bad: list[BadTensor], group: dist.ProcessGroup | None = None) -> str:
    """Return which tensors are not finite, and on which ranks; the same text on all of ``group``.

    Those nearest to the loss come first: a backward pass carries a nan on from there. Collective over ``group``
    (default: all ranks). Empty where ``bad`` is on every rank.
    """
    own = (dist.get_rank(), bad[: -_SHOWN - 1 : -1], len(bad))
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, own, group=group)
    reports: dict[str, list[tuple[int, BadTensor]]] = {}
    for rank, shown, _ in gathered:
        for tensor in shown:
            reports.setdefault(tensor.name, []).append((rank, tensor))
    parts = []
    for name, where in list(reports.items())[:_SHOWN]:
        worst = max((tensor for _, tensor in where), key=lambda tensor: tensor.nan + tensor.infinite)
        kinds = [f"{count} {kind}" for count, kind in ((worst.nan, "nan"), (worst.infinite, "inf")) if count]
        ranks = named_ranks(rank for rank, _ in where)
        parts.append(f"{name} ({' and '.join(kinds)} of {worst.elements}) on {ranks}")
    more = max(count for *_, count in gathered) - len(parts)
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")


def only_finite(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield what ``tensors`` does, by name, as long as it is finite; raises NotFiniteError at the first that is not."""
    for name, tensor in tensors:
        for bad in nonfinite([(name, tensor)]):
            kind = str(tensor.dtype).removeprefix("torch.")
            count = bad.nan + bad.infinite
            raise NotFiniteError(f"{name} holds {count} values that are not finite (NaN or infinity) as {kind}")
        yield name, tensor
