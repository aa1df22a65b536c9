"""Carries out a plan: straight from the trainer's parameters into the destination's existing storage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlhf_megatron.models.hf_files import window
from rlhf_megatron.regather.plan import Copy, rounds
from rlhf_megatron.regather.transport import Transport

STAGING_BYTES = 256 << 20


class Regather:
    """A plan made ready for one rank; ``run`` may be called any number of times."""

    def __init__(
        self,
        copies: Sequence[Copy],
        rank: int,
        dtype: torch.dtype,
        device: torch.device | str,
        transport: Transport,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """``dtype`` is the destination's: numbers are cast before they travel, if that is what they become."""
        self._dtype, self._device, self._transport = dtype, device, transport
        peers: dict[int, set[tuple[int, bool]]] = defaultdict(set)
        for copy in copies:
            if copy.source != copy.destination:
                peers[copy.source].add((copy.destination, True))
                peers[copy.destination].add((copy.source, False))
        busiest = max((len(of_rank) for of_rank in peers.values()), default=1)
        limit = max(1, staging_bytes // busiest // dtype.itemsize)
        self.bytes_received = sum(
            copy.elements * dtype.itemsize for copy in copies if copy.destination == rank != copy.source
        )
        self._local = [copy for copy in copies if copy.source == copy.destination == rank]
        self._rounds = [
            ([copy for copy in turn if copy.source == rank], [copy for copy in turn if copy.destination == rank])
            for turn in rounds(copies, limit)
        ]

    @torch.no_grad()
    def run(self, sources: Mapping[str, Tensor], destinations: Mapping[str, Tensor]) -> None:
        """Fills ``destinations`` (this rank's, by parameter name) from every rank's ``sources``.

        Collective over all ranks of the plan. Storage stays where it is; staging is bounded by ``staging_bytes``.
        """
        for copy in self._local:
            _target(copy, destinations).copy_(_origin(copy, sources))
        for outgoing, incoming in self._rounds:
            sends = {
                rank: torch.cat([_origin(copy, sources).reshape(-1).to(self._dtype) for copy in copies])
                for rank, copies in _by_peer(outgoing, "destination").items()
            }
            expected = _by_peer(incoming, "source")
            receives = {
                rank: torch.empty(sum(copy.elements for copy in copies), dtype=self._dtype, device=self._device)
                for rank, copies in expected.items()
            }
            self._transport.exchange(sends, receives)
            for rank, copies in expected.items():
                pieces = receives[rank].split([copy.elements for copy in copies])
                for copy, piece in zip(copies, pieces, strict=True):
                    target = _target(copy, destinations)
                    target.copy_(piece.view(target.shape))


def _by_peer(copies: Sequence[Copy], end: str) -> dict[int, list[Copy]]:
    peers: dict[int, list[Copy]] = defaultdict(list)
    for copy in copies:
        peers[getattr(copy, end)].append(copy)
    return peers


def _origin(copy: Copy, sources: Mapping[str, Tensor]) -> Tensor:
    return window(sources[copy.source_parameter], copy.source_offset, copy.region)


def _target(copy: Copy, destinations: Mapping[str, Tensor]) -> Tensor:
    return window(destinations[copy.destination_parameter], copy.destination_offset, copy.region)
