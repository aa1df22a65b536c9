"""Checkpoints in which matrices with the same inputs are one tensor, with one's rows behind another's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rlhf_megatron.models.rectangles import Shapes, Slot

# A module of such a checkpoint, and those of others that it stands for.
_PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "shared_mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj"),
    "shared_mlp.output_linear": ("mlp.down_proj",),
}


def fused_shapes(shapes: Shapes, fused: Sequence[str]) -> Shapes:
    """Return the shapes of a checkpoint with the ``fused`` modules, of ``shapes`` of one without."""
    if not fused:
        return shapes
    holders: dict[str, tuple[int, ...]] = {}
    for tensor, (rows, *columns) in shapes.items():
        name = _holder(tensor, fused)
        holders[name] = (holders.get(name, (0,))[0] + rows, *columns)
    return holders


def fused_slots(slots: Iterable[Slot], shapes: Shapes, fused: Sequence[str]) -> Iterator[Slot]:
    """Yield the slots of such a checkpoint, of ``slots`` and ``shapes`` of one without the ``fused`` modules."""
    filled: Counter[str] = Counter()
    for slot in slots:
        name = _holder(slot.tensor, fused)
        if name == slot.tensor:
            yield slot
            continue
        first = filled[name]
        filled[name] += shapes[slot.tensor][0]
        yield Slot(name, slot.cut, slot.parameter, (first, filled[name]), slot.kind)


def _holder(tensor: str, fused: Sequence[str]) -> str:
    """Return the name of the tensor that has the rows of ``tensor``."""
    for module in fused:
        for part in _PARTS[module]:
            if f".{part}." in tensor:
                return tensor.replace(f".{part}.", f".{module}.")
    return tensor
