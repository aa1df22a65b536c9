"""Record of what a loader copies from checkpoint tensors into a model's parameters, by strides and not by values.

A loader is run on probes: tensors with a checkpoint's names and shapes, on the meta device. A ``CopyRecorder`` around
it reads both sides of every ``copy_`` off their storage, offset and strides, and carries none of them out; so models of
any size are recorded without their memory, and parameters that are in use stay as they are. Storages that are made on
the way by ``contiguous``, a cast, ``cat`` or ``stack`` are followed back to the probes. A value that is computed
(``+ 1``, an index, a product) and reaches a parameter is named: that parameter is no copy.

Only tensors are known here. Which loader is run is the matter of vllm/weight_loading.py, what becomes of the copies
that of models/learned_map.py.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_SAME_VALUES = {
    aten.clone.default,
    aten._to_copy.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.lift_fresh.default,
}
_OF_A_SHAPE_ONLY = ("new_", "empty_like", "zeros_like", "ones_like", "full_like")


class StridedCopy(NamedTuple):
    """``parameter.as_strided(sizes, parameter_strides, parameter_offset)`` is a copy of the same view of ``tensor``.

    Rectangles, transposes, slices of stacked experts and reshapes by head are all of this form. Offsets and strides
    count elements of contiguous tensors.
    """

    tensor: str
    parameter: str
    sizes: tuple[int, ...]
    tensor_offset: int
    tensor_strides: tuple[int, ...]
    parameter_offset: int
    parameter_strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements that are copied."""
        return torch.Size(self.sizes).numel()

    def canonical(self) -> StridedCopy:
        """Return the same copy with as few dimensions as there can be, the parameter's outermost first."""
        dimensions = zip(self.sizes, self.tensor_strides, self.parameter_strides, strict=True)
        merged: list[tuple[int, int, int]] = []
        for size, source, target in sorted((each for each in dimensions if each[0] != 1), key=lambda each: -each[2]):
            if merged and merged[-1][1] == source * size and merged[-1][2] == target * size:
                merged[-1] = (merged[-1][0] * size, source, target)
            else:
                merged.append((size, source, target))
        sizes, sources, targets = (tuple(each) for each in zip(*merged, strict=True)) if merged else ((), (), ())
        return self._replace(sizes=sizes, tensor_strides=sources, parameter_strides=targets)


class UntraceableError(Exception):
    """A view that is not made of strided pieces of probes; the text says by what it was made."""


class _Piece(NamedTuple):
    """A rectangle (starts, sizes) of an intermediate tensor: a strided view of a probe."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    probe: str
    offset: int
    strides: tuple[int, ...]


class _Intermediate(NamedTuple):
    """A storage that the loader has made, contiguous or not, and the pieces of probes that it consists of."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    pieces: list[_Piece]
    owner: Tensor  # keeps the storage's address from being given to another


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _offset(tensor: Tensor) -> int:
    return int(tensor.storage_offset())


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors of an operation's arguments or results, which are in lists at most."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


@functools.cache
def _changes_inputs(func: Any) -> bool:
    return bool(func._schema.is_mutable)


@dataclasses.dataclass(frozen=True)
class LoadTrace:
    """Copies that a loader makes of a checkpoint on one rank.

    Attributes:
        copies: every copy, in the loader's order.
        shapes: of the engine's parameters on this rank.
        problems: one line for each parameter that is not a plain copy of checkpoint tensors: its values are computed,
            written from elsewhere, cast on the way, or come from nowhere.
    """

    copies: list[StridedCopy]
    shapes: dict[str, tuple[int, ...]]
    problems: list[str]


class CopyRecorder(TorchDispatchMode):
    """Record of a loader's copies; read its attributes when it is done.

    Attributes:
        copies: in the loader's order, with the names of probes and parameters.
        fills: parameters that the loader writes one value into, such as the padding of a vocabulary; ``tensor`` is
            empty.
        computed: (parameter, operation) where a parameter's values are made from a probe's but are no copy.
        constant: (parameter, operation) where a parameter is written with something that comes from no probe.
        casts: "from->to" of every change of type on the way.
    """

    def __init__(self, probes: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        """Name the storages that are watched."""
        super().__init__()
        self._probes = {_storage(tensor): (name, tensor) for name, tensor in probes.items()}
        self._parameters = {_storage(tensor): (name, tensor) for name, tensor in parameters.items()}
        self._intermediates: dict[int, _Intermediate] = {}
        self._untraceable: dict[int, tuple[str, Tensor]] = {}
        self.copies: list[StridedCopy] = []
        self.fills: list[StridedCopy] = []
        self.computed: list[tuple[str, str]] = []
        self.constant: list[tuple[str, str]] = []
        self.casts: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry out what touches no parameter, and note where its results come from."""
        kwargs = kwargs or {}
        if func is aten.copy_.default and (_storage(args[0]) in self._parameters or self._comes_from_a_probe(args[1])):
            self._record_copy(args[0], args[1])
            return args[0]
        written = args[0] if _changes_inputs(func) and args and isinstance(args[0], Tensor) else None
        if written is not None and _storage(written) in self._parameters:
            others = _tensors((*args[1:], *kwargs.values()))
            self._record_write(func, args, written, any(map(self._comes_from_a_probe, others)))
            return written
        result = func(*args, **kwargs)
        if written is None:
            self._trace(func, args, kwargs, result)
        elif self._comes_from_a_probe(written):
            self._untraceable[_storage(written)] = (str(func), written)
        return result

    def _comes_from_a_probe(self, tensor: Tensor) -> bool:
        storage = _storage(tensor)
        return storage in self._probes or storage in self._intermediates or storage in self._untraceable

    def _trace(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """Note of which probes the storages are made that an operation has returned."""
        made = [each for each in _tensors((result,)) if not self._comes_from_a_probe(each)]  # others are views
        if not made or func.__name__.startswith(_OF_A_SHAPE_ONLY):
            return
        inputs = list(_tensors((*args, *kwargs.values())))
        if not any(map(self._comes_from_a_probe, inputs)):
            if any(_storage(each) in self._parameters for each in inputs):
                for each in made:
                    if _storage(each) not in self._parameters:
                        self._untraceable[_storage(each)] = (f"{func} of what was loaded", each)
            return
        for each in made:
            try:
                pieces = list(self._pieces_of_new(func, args, each))
            except UntraceableError as error:
                self._untraceable[_storage(each)] = (str(error), each)
            else:
                self._intermediates[_storage(each)] = _Intermediate(tuple(each.shape), each.stride(), pieces, each)

    def _pieces_of_new(self, func: Any, args: Any, result: Tensor) -> Iterator[_Piece]:
        """Yield the pieces of a storage that ``func`` has made."""
        if func in _SAME_VALUES:
            if args[0].dtype != result.dtype:
                self.casts.add(f"{args[0].dtype}->{result.dtype}")
            yield from self._pieces(args[0])
        elif func is aten.cat.default or func is aten.stack.default:
            along = (args[1] if len(args) > 1 else 0) % result.dim()
            begin = 0
            for tensor in args[0]:
                part = tensor.unsqueeze(along) if func is aten.stack.default else tensor
                for piece in self._pieces(part) if self._comes_from_a_probe(part) else ():  # else it is padding
                    starts = list(piece.starts)
                    starts[along] += begin
                    yield piece._replace(starts=tuple(starts))
                begin += part.shape[along]
        else:
            raise UntraceableError(str(func))

    def _pieces(self, view: Tensor) -> Iterator[_Piece]:
        """Yield ``view`` as rectangles of itself that are strided views of probes."""
        storage, sizes = _storage(view), tuple(view.shape)
        if storage in self._untraceable:
            raise UntraceableError(self._untraceable[storage][0])
        if storage in self._probes:
            yield _Piece((0,) * len(sizes), sizes, self._probes[storage][0], _offset(view), view.stride())
        else:
            yield from _pieces_of_view(self._intermediates[storage], sizes, view.stride(), _offset(view))

    def _record_copy(self, target: Tensor, source: Tensor) -> None:
        if _storage(target) not in self._parameters:
            self._untraceable[_storage(target)] = ("a copy into a temporary", target)
            return
        name = self._parameters[_storage(target)][0]
        if not self._comes_from_a_probe(source):
            self.constant.append((name, "aten.copy_ of no checkpoint tensor"))
            return
        if source.dtype != target.dtype:
            self.casts.add(f"{source.dtype}->{target.dtype}")
        try:
            for piece in self._pieces(source.expand(target.shape)):
                begin = sum(map(int.__mul__, piece.starts, target.stride()), _offset(target))
                self.copies.append(
                    StridedCopy(piece.probe, name, piece.sizes, piece.offset, piece.strides, begin, target.stride())
                )
        except UntraceableError as error:
            self.computed.append((name, str(error)))

    def _record_write(self, func: Any, args: Any, target: Tensor, from_probes: bool) -> None:
        """Note a parameter that is changed in place by another operation than a copy."""
        name, sizes = self._parameters[_storage(target)][0], tuple(target.shape)
        if func is aten.fill_.Scalar or func is aten.zero_.default:
            nowhere = (0,) * len(sizes)
            self.fills.append(StridedCopy("", name, sizes, 0, nowhere, _offset(target), target.stride()))
        else:
            (self.computed if from_probes else self.constant).append((name, str(func)))


def _pieces_of_view(
    of: _Intermediate, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> Iterator[_Piece]:
    """Yield the rectangles of a view of an intermediate tensor, in the view's coordinates."""
    axes = sorted((axis for axis, size in enumerate(of.sizes) if size > 1), key=lambda axis: -of.strides[axis])
    starts, rest = [0] * len(of.sizes), offset
    for axis in axes:
        starts[axis], rest = divmod(rest, of.strides[axis])
    dimension_of: dict[int, tuple[int, int]] = {}  # axis of the intermediate -> (dimension of the view, step)
    for dimension, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        if size == 1:
            continue
        free = [axis for axis in axes if axis not in dimension_of and stride and stride % of.strides[axis] == 0]
        within = [a for a in free if starts[a] + (size - 1) * (stride // of.strides[a]) < of.sizes[a]]
        if within:
            dimension_of[within[0]] = (dimension, stride // of.strides[within[0]])
            continue
        # A reshape has joined this axis with the one outside it: cut the view where the axis ends.
        along = next((axis for axis in free if of.strides[axis] == stride), None)
        first, width = (1, 1) if along is None else (of.sizes[along] - starts[along], of.sizes[along])
        for begin, end in itertools.pairwise([0, *range(first, size, width), size]):
            part = (*sizes[:dimension], end - begin, *sizes[dimension + 1 :])
            for piece in _pieces_of_view(of, part, strides, offset + begin * stride):
                shifted = list(piece.starts)
                shifted[dimension] += begin
                yield piece._replace(starts=tuple(shifted))
        return
    for piece in of.pieces:
        cut = _intersection(piece, sizes, starts, dimension_of)
        if cut is not None:
            yield cut


def _intersection(
    piece: _Piece, sizes: tuple[int, ...], starts: list[int], dimension_of: Mapping[int, tuple[int, int]]
) -> _Piece | None:
    """Return the part of ``piece`` in a view that begins at ``starts``, in the view's coordinates, or None."""
    low, high, strides, offset = [0] * len(sizes), list(sizes), [0] * len(sizes), piece.offset
    for axis, (first, extent) in enumerate(zip(piece.starts, piece.sizes, strict=True)):
        if axis not in dimension_of:
            if not first <= starts[axis] < first + extent:
                return None
            offset += (starts[axis] - first) * piece.strides[axis]
            continue
        dimension, step = dimension_of[axis]
        low[dimension] = max(0, -(-(first - starts[axis]) // step))
        high[dimension] = min(sizes[dimension], -(-(first + extent - starts[axis]) // step))
        if low[dimension] >= high[dimension]:
            return None
        offset += (starts[axis] + low[dimension] * step - first) * piece.strides[axis]
        strides[dimension] = step * piece.strides[axis]
    return _Piece(tuple(low), tuple(map(int.__sub__, high, low)), piece.probe, offset, tuple(strides))
