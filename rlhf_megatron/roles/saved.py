"""A role as a checkpoint has it: its parameters whole, out of what each rank of the writer's layout has written.

Data-parallel ranks wrote ranges of each parameter, flattened (see ``state``). From there it goes on like a regathering,
by the rectangles of the weight map, so that the reader's layout may be another, or none at all.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.models.adapters import Adaptation, adapter_blocks, whole_adapter_blocks
from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.weight_map import Block, is_expert, megatron_blocks, whole_blocks
from rlhf_megatron.regather.plan import Copy, Side, plan_regather
from rlhf_megatron.runtime.checkpoint import CheckpointError, TensorFile
from rlhf_megatron.topology.layout import Layout

ROWS_OF_ATTENTION = "stacked"  # written down, since nothing else tells a fused matrix in another order
_READER = -1  # whoever reads is none of the ranks that wrote


def _check_architecture(role: str, wanted: Architecture, saved: Mapping[str, Any]) -> None:
    # Through JSON, as the saved one went: tuples become lists.
    own = json.loads(json.dumps(dataclasses.asdict(wanted)))
    del own["end_token_ids"]  # a matter of generation
    different = [f"{key} {saved.get(key)} and not {value}" for key, value in own.items() if saved.get(key) != value]
    if different:
        raise CheckpointError(
            f"the checkpoint is of another model than {role}'s: it has {'; '.join(different)}; give "
            "--resume none, or the run another name"
        )


def saved_adaptation(state: Mapping[str, Any]) -> Adaptation | None:
    """What adapters a role's ``state`` in a manifest is of, where it is not of the whole model."""
    saved = state.get("adapters")
    return Adaptation(saved["rank"], saved["scale"], tuple(saved["modules"])) if saved else None


def _check_adaptation(role: str, wanted: Adaptation | None, saved: Adaptation | None) -> None:
    if wanted == saved:
        return
    has, asked = (
        f"adapters of rank {each.rank} and scale {each.scale:g} on {', '.join(each.modules)}" if each else "the weights"
        for each in (saved, wanted)
    )
    raise CheckpointError(
        f"the checkpoint has {has} of {role}, and the recipe asks for {asked} ({role}.lora); change it back, give "
        "--resume none, or the run another name"
    )


_Place = tuple[str, int, int, int]


def _places(layout: Layout, position: int) -> tuple[_Place, _Place]:
    """What tells the shards of most parameters apart, and what those of experts; data-parallel ranks have the same."""
    place, of_experts = layout.coordinates(position), layout.expert_coordinates(position)
    return (
        ("layer", place.pipeline, place.tensor, 0),
        ("experts", of_experts.pipeline, of_experts.tensor, of_experts.expert),
    )


class SavedRole:
    """What the files of a role's ranks hold of its model; they stay open as long as it is used."""

    def __init__(
        self,
        name: str,
        architecture: Architecture,
        state: Mapping[str, Any],
        files: Sequence[TensorFile],
        adaptation: Adaptation | None = None,
    ) -> None:
        """``state`` is the role's in the manifest, ``files`` are those of its ranks in their order.

        ``adaptation`` is the reader's; with one, the files are to hold its adapters and nothing else.
        Raises CheckpointError where they do not belong together, or are of another version.
        """
        self._role, self._architecture, self._files = name, architecture, files
        self._adaptation = adaptation
        _check_architecture(name, architecture, state["architecture"])
        _check_adaptation(name, adaptation, saved_adaptation(state))
        if state.get("rows_of_attention") != ROWS_OF_ATTENTION:
            raise CheckpointError(
                f"the checkpoint was written by another version, with {name}'s queries, keys and values in another "
                "order; go on with that version, or give --resume none"
            )
        self._layout, self._implementation = Layout(**state["layout"]), state["implementation"]
        if len(files) != self._layout.size:
            raise CheckpointError(f"the checkpoint has files of {len(files)} ranks; its {name} had {self._layout.size}")
        self._peers: dict[_Place, list[int]] = defaultdict(list)
        self._places = [_places(self._layout, position) for position in range(self._layout.size)]
        first: dict[tuple[_Place, _Place], int] = {}
        for position, places in enumerate(self._places):
            first.setdefault(places, position)
            for place in places:
                self._peers[place].append(position)
        self._positions = list(first.values())
        self._parameter = lru_cache(maxsize=2)(self._read)

    def copies(self, wanted: Sequence[Block]) -> dict[str, list[Copy]]:
        """Which rectangles fill each parameter of ``wanted``, for ``fill``."""
        held = {position: self._blocks(position) for position in self._positions}
        by_parameter: dict[str, list[Copy]] = defaultdict(list)
        for copy in plan_regather(Side.of(held), Side.of({_READER: wanted}), rank=_READER).receives:
            by_parameter[copy.destination_parameter].append(copy)
        return by_parameter

    def _blocks(self, position: int) -> list[Block]:
        if self._adaptation:
            return adapter_blocks(self._architecture, self._adaptation, self._layout, position)
        return megatron_blocks(self._architecture, self._layout, position, self._implementation)

    def whole_blocks(self) -> list[Block]:
        """What ``tensors`` gives."""
        if self._adaptation:
            return whole_adapter_blocks(self._architecture, self._adaptation)
        return whole_blocks(self._architecture)

    def fill(self, whole: Tensor, copies: Sequence[Copy], kind: str) -> None:
        """Writes the rectangles of ``copies`` into the reader's parameter; ``kind``: "weights" or a moment's name."""
        for copy in copies:
            source = self._parameter(copy.source, copy.source_parameter, kind)
            extent = [stop - start for start, stop in copy.region]
            target = tuple(slice(at, at + size) for at, size in zip(copy.destination_offset, extent, strict=True))
            window = tuple(slice(at, at + size) for at, size in zip(copy.source_offset, extent, strict=True))
            whole[target] = source[window]

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Every Hugging Face tensor whole, with its name, one at a time; of adapters, every A and B."""
        blocks = self.whole_blocks()
        copies = self.copies(blocks)
        for block in blocks:
            whole = torch.empty([stop for _, stop in block.region])
            self.fill(whole, copies[block.parameter], "weights")
            yield block.tensor, whole.to(dtype)

    def _read(self, position: int, name: str, kind: str) -> Tensor:
        """A parameter of the writer's layout, joined from the ranges of its data-parallel ranks."""
        found = 0
        whole: Tensor | None = None
        of_layer, of_experts = self._places[position]
        for peer in self._peers[of_experts if is_expert(name) else of_layer]:
            piece = self._files[peer].about["pieces"][self._role].get(name)
            if piece is None:
                continue
            if whole is None:
                whole = torch.zeros(piece["shape"])
            part = self._files[peer].tensor(f"{self._role}/{kind}/{name}")
            if part.dtype != torch.float32:
                raise CheckpointError(f"the checkpoint holds {self._role}'s {kind} of {name} as {part.dtype}")
            whole.view(-1)[piece["start"] : piece["stop"]] = part
            found += piece["stop"] - piece["start"]
        if whole is None or found != whole.numel():
            count = "nothing" if whole is None else f"{found} of {whole.numel()} elements"
            raise CheckpointError(f"the checkpoint holds {count} of {self._role}'s {kind} of {name}")
        return whole
