"""A role as a checkpoint has it: its parameters whole, out of what each rank of the writer's layout has written.

Data-parallel ranks wrote ranges of each parameter, flattened (see ``state``). From there it goes on like a regathering,
by the rectangles of the weight map, so that the reader's layout may be another, or none at all.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from rlhf_megatron.checkpoint.experts_apart import experts_apart
from rlhf_megatron.checkpoint.manifest import first_problem
from rlhf_megatron.checkpoint.storage import TensorFile
from rlhf_megatron.errors import CheckpointError, ForeignCheckpoint
from rlhf_megatron.models.architecture import Architecture, Head
from rlhf_megatron.models.lora import Adaptation, adaptation_in, adapter_blocks, whole_adapter_blocks
from rlhf_megatron.models.stored_form import LATER_FIELDS, stored_form, without_silent_fields
from rlhf_megatron.models.weight_map import Block, is_expert, megatron_blocks, stays_float32, whole_blocks
from rlhf_megatron.regather.plan import Copy, ShardSpec, plan_regather
from rlhf_megatron.topology.layout import Layout
from rlhf_megatron.untrusted import reason_of, shown

ROWS_OF_ATTENTION = "stacked"  # written down, since nothing else tells a fused matrix in another order
EXPERTS = "stacked"  # many in a parameter, and not one as in earlier versions
_READER = -1  # whoever reads is none of the ranks that wrote


def _check_architecture(role: str, wanted: Architecture, saved: Mapping[str, Any]) -> None:
    # Through JSON, as the saved one went: tuples become lists.
    own = json.loads(json.dumps(stored_form(wanted)))
    saved = without_silent_fields(saved)
    del own["end_token_ids"]  # a matter of generation
    compared = dict.fromkeys([*own, *(key for key in LATER_FIELDS if key in saved)])
    different = [
        f"{key} {shown(saved.get(key), 60)} and not {shown(own.get(key), 60)}"
        for key in compared
        if saved.get(key) != own.get(key)
    ]
    if different:
        raise ForeignCheckpoint(
            f"the checkpoint is of another model than {role}'s: it has {'; '.join(different)}; give "
            "--resume none, or the run another name"
        )


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Adapters(_Strict):
    rank: int = Field(ge=1)
    scale: float = Field(gt=0, allow_inf_nan=False)
    modules: list[str] = Field(min_length=1)


_Scale = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RoleState(_Strict):
    """A role's state in a manifest, as ``role_state.role_state`` has written it."""

    layout: dict[str, int | None]
    ranks: list[Annotated[int, Field(ge=0)]] | None = None  # of all ranks, where an earlier version wrote it
    architecture: dict[str, Any]
    implementation: Literal["local", "transformer_engine"]
    adapters: _Adapters | None = None
    base: Any = None
    rows_of_attention: str | None = None
    experts: Literal["stacked"] | None = None
    steps_taken: int = Field(ge=0, le=2**53)
    loss_scale: tuple[_Scale, Annotated[int, Field(ge=0)]] | None = Field(None, strict=False)
    optimizer_steps: int = Field(ge=0, le=2**53)


def checked_state(state: Mapping[str, Any]) -> RoleState:
    """Return a role's ``state`` in a manifest; raises CheckpointError where it is not as a run writes it."""
    try:
        return RoleState.model_validate(state)
    except ValidationError as error:
        raise CheckpointError(f"the checkpoint's state of a role is damaged ({first_problem(error)})") from error


def head_of(state: Mapping[str, Any]) -> Head:
    """Return the head of the model that a role's ``state`` in a manifest is of."""
    return "scalar" if checked_state(state).architecture.get("head") == "scalar" else "language"


def files_of_role(state: Mapping[str, Any], files: Sequence[TensorFile]) -> list[TensorFile]:
    """Return those of the role's ranks, in their order; raises CheckpointError where there are not so many."""
    ranks = checked_state(state).ranks
    if ranks is None:
        return list(files)
    if len(set(ranks)) < len(ranks) or max(ranks, default=0) >= len(files):
        raise CheckpointError(f"the checkpoint has {len(files)} files, which are not those of its ranks {ranks[:8]}")
    return [files[rank] for rank in ranks]


def saved_adaptation(state: Mapping[str, Any]) -> Adaptation | None:
    """Return the adapters that a role's ``state`` in a manifest is of, or None where it is of the whole model."""
    saved = checked_state(state).adapters
    return Adaptation(saved.rank, saved.scale, tuple(saved.modules)) if saved else None


def _check_adaptation(
    role: str, architecture: Architecture, wanted: Adaptation | None, saved: Adaptation | None
) -> None:
    """Compare what of both is in the model: a version may know of more layers than the one that wrote."""
    wanted, saved = (each and adaptation_in(architecture, each) for each in (wanted, saved))
    if wanted == saved:
        return
    has, asked = (
        f"adapters of rank {each.rank} and scale {each.scale:g} on {', '.join(each.modules)}" if each else "the weights"
        for each in (saved, wanted)
    )
    raise ForeignCheckpoint(
        f"the checkpoint has {has} of {role}, and the recipe asks for {asked} ({role}.lora); change it back, give "
        "--resume none, or the run another name"
    )


class _Piece(_Strict):
    """A range of a parameter, flattened."""

    shape: list[Annotated[int, Field(ge=0)]] = Field(max_length=8)
    start: int
    stop: int


_ShardKey = tuple[str, int, int, int]


def _shard_keys(layout: Layout, position: int) -> tuple[_ShardKey, _ShardKey]:
    """Return keys of the shards of most parameters, and of those of experts; data-parallel ranks have the same."""
    coordinates, of_experts = layout.coordinates(position), layout.expert_coordinates(position)
    return (
        ("layer", coordinates.pipeline, coordinates.tensor, 0),
        ("experts", of_experts.pipeline, of_experts.tensor, of_experts.expert),
    )


class SavedRole:
    """The model of a role in the files of its ranks, which stay open as long as it is used."""

    def __init__(
        self,
        name: str,
        architecture: Architecture,
        state: Mapping[str, Any],
        files: Sequence[TensorFile],
        adaptation: Adaptation | None = None,
    ) -> None:
        """Set up; ``state`` is the role's in the manifest, ``files`` are those of its ranks in their order.

        ``adaptation`` is the reader's; with one, the files are to hold its adapters and nothing else.
        Raises CheckpointError where they do not belong together, or are of another version.
        """
        self._role, self._architecture, self._files = name, architecture, files
        self._adaptation = adaptation
        checked = checked_state(state)
        _check_architecture(name, architecture, checked.architecture)
        _check_adaptation(name, architecture, adaptation, saved_adaptation(state))
        if checked.rows_of_attention != ROWS_OF_ATTENTION:
            raise ForeignCheckpoint(
                f"the checkpoint was written by another version, with {name}'s queries, keys and values in another "
                "order; go on with that version, or give --resume none"
            )
        try:
            self._layout = Layout(**checked.layout)  # type: ignore[arg-type]  # None where a field may be that
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint's layout of {name} is none ({reason_of(error)})") from error
        self._implementation, self._has_stacks = checked.implementation, checked.experts == EXPERTS
        if len(files) != self._layout.size:
            raise CheckpointError(f"the checkpoint has files of {len(files)} ranks; its {name} had {self._layout.size}")
        self._peers: dict[_ShardKey, list[int]] = defaultdict(list)
        self._shard_keys = [_shard_keys(self._layout, position) for position in range(self._layout.size)]
        first: dict[tuple[_ShardKey, _ShardKey], int] = {}
        for position, keys in enumerate(self._shard_keys):
            first.setdefault(keys, position)
            for key in keys:
                self._peers[key].append(position)
        self._positions = list(first.values())
        self._parameter = lru_cache(maxsize=2)(self._read)

    def copies(self, wanted: Sequence[Block]) -> dict[str, list[Copy]]:
        """Return the rectangles that fill each parameter of ``wanted``, for ``fill``."""
        held = {position: self._blocks(position) for position in self._positions}
        by_parameter: dict[str, list[Copy]] = defaultdict(list)
        for copy in plan_regather(ShardSpec.of(held), ShardSpec.of({_READER: wanted}), rank=_READER).receives:
            by_parameter[copy.destination_parameter].append(copy)
        return by_parameter

    def _blocks(self, position: int) -> list[Block]:
        if self._adaptation:
            return adapter_blocks(self._architecture, self._adaptation, self._layout, position)
        blocks = megatron_blocks(self._architecture, self._layout, position, self._implementation)
        if self._has_stacks:
            return blocks
        return experts_apart(self._architecture, self._layout, blocks, self._implementation)

    def whole_blocks(self) -> list[Block]:
        """Return the blocks that ``tensors`` gives."""
        if self._adaptation:
            return whole_adapter_blocks(self._architecture, self._adaptation)
        return whole_blocks(self._architecture)

    def fill(self, whole: Tensor, copies: Sequence[Copy], kind: str) -> None:
        """Write the rectangles of ``copies`` into the reader's parameter; ``kind``: "weights" or a moment's name."""
        for copy in copies:
            source = self._parameter(copy.source, copy.source_parameter, kind)
            extent = [stop - start for start, stop in copy.region]
            ends = [at + size for at, size in zip(copy.source_offset, extent, strict=True)]
            if len(ends) != source.dim() or any(end > size for end, size in zip(ends, source.shape, strict=True)):
                shape = f"shape {tuple(source.shape)}, which its layout does not have"
                raise CheckpointError(f"the checkpoint's {self._role}/{kind}/{copy.source_parameter} has {shape}")
            target = tuple(slice(at, at + size) for at, size in zip(copy.destination_offset, extent, strict=True))
            window = tuple(slice(at, at + size) for at, size in zip(copy.source_offset, extent, strict=True))
            whole[target] = source[window]

    def part(self, whole: Tensor, copies: Sequence[Copy], kind: str, start: int, stop: int) -> Tensor:
        """Return elements ``start`` to ``stop`` of the reader's parameter, flattened, which has the shape of ``whole``.

        Where the writers had the same parameter, nothing else of it is read.
        """
        source = {(copy.source, copy.source_parameter) for copy in copies}
        if len(source) == 1 and all(copy.source_offset == copy.destination_offset for copy in copies):
            [(position, name)] = source
            pieces = self._pieces(position, name, kind)
            if pieces[0][0].shape == list(whole.shape):
                return self._joined(pieces, name, kind, start, stop)
        filled = torch.zeros_like(whole)
        self.fill(filled, copies, kind)
        return filled.reshape(-1)[start:stop]

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield every Hugging Face tensor whole, with its name, one at a time; of adapters, every A and B."""
        blocks = self.whole_blocks()
        copies = self.copies(blocks)
        for block in blocks:
            whole = torch.empty([stop for _, stop in block.region])
            self.fill(whole, copies[block.parameter], "weights")
            yield block.tensor, whole if stays_float32(block.tensor) else whole.to(dtype)

    def _read(self, position: int, name: str, kind: str) -> Tensor:
        """Return a parameter of the writer's layout, joined from the ranges of its data-parallel ranks."""
        pieces = self._pieces(position, name, kind)
        shape = pieces[0][0].shape
        return self._joined(pieces, name, kind, 0, math.prod(shape)).view(shape)

    def _pieces(self, position: int, name: str, kind: str) -> list[tuple[_Piece, TensorFile]]:
        """Return the ranges of a parameter of the writer's layout in order, and the files that have them; there is
        one."""
        of_layer, of_experts = self._shard_keys[position]
        peers = self._peers[of_experts if is_expert(name) else of_layer]
        tensor = f"{self._role}/{kind}/{name}"
        pieces = [(piece, self._files[peer]) for peer in peers if (piece := self._piece(self._files[peer], name))]
        pieces.sort(key=lambda pair: (pair[0].start, pair[0].stop))
        ends = [0, *(piece.stop for piece, _ in pieces)]
        size = math.prod(pieces[0][0].shape) if pieces else 0
        # Nothing is allocated before it is known that the files have as much.
        if (
            not pieces
            or [piece.start for piece, _ in pieces] != ends[:-1]
            or ends[-1] != size
            or any(piece.shape != pieces[0][0].shape for piece, _ in pieces)
            or any(file.shape(tensor) != (piece.stop - piece.start,) for piece, file in pieces)
        ):
            count = f"not just the {size} elements" if pieces else "nothing"
            raise CheckpointError(f"the checkpoint holds {count} of {self._role}'s {kind} of {shown(name)}")
        return pieces

    def _joined(
        self, pieces: Sequence[tuple[_Piece, TensorFile]], name: str, kind: str, start: int, stop: int
    ) -> Tensor:
        """Return elements ``start`` to ``stop`` of what the ``pieces`` are of."""
        tensor, joined = f"{self._role}/{kind}/{name}", torch.zeros(stop - start)
        for piece, file in pieces:
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first >= last:
                continue
            value = file.part(tensor, first - piece.start, last - piece.start)
            if value.dtype != torch.float32 and (kind == "weights" or value.dtype != torch.bfloat16):
                raise CheckpointError(f"the checkpoint holds {tensor} as {value.dtype}, and float32 is written")
            joined[first - start : last - start] = value
        return joined

    def _piece(self, file: TensorFile, name: str) -> _Piece | None:
        """Return the range of a parameter that a file has, if it has one."""
        try:
            of_role = file.about["pieces"][self._role]
            return _Piece.model_validate(of_role[name]) if name in of_role else None
        except (KeyError, TypeError, ValidationError) as error:
            raise CheckpointError(f"{file.path}: its description of {shown(name)} is damaged") from error
