"""Carries out a plan: straight from the trainer's parameters into the destination's existing storage."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rlhf_megatron.compat.torch import lie_at
from rlhf_megatron.kernels.rectangle_copy import RectangleCopies
from rlhf_megatron.models.weight_source import window
from rlhf_megatron.regather.first_copies import FIRST_BYTES, split_off_first
from rlhf_megatron.regather.peer_memory import PeerMemory, spread_over_sources
from rlhf_megatron.regather.plan import Copy, RankPlan
from rlhf_megatron.regather.recorded import Recorded
from rlhf_megatron.regather.staging import DIRECT_BYTES, IN_FLIGHT, STAGING_BYTES, Half, stage
from rlhf_megatron.regather.transport import Pending, PointToPoint, Transport
from rlhf_megatron.regather.verify import RegatherError, compare_plans, verify_weights

_ON_THE_CURRENT_STREAM = contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class _Turn:
    """A round, bound to the parameters that it is from and for."""

    pack: RectangleCopies
    sends: dict[int, list[Tensor]]
    receives: dict[int, list[Tensor]]
    unpack: RectangleCopies
    forwards: bool


class _Places:
    """Where tensors are, to see later whether they still are there."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        self._numbers = list(range(len(tensors)))

    def hold(self, tensors: list[Tensor]) -> bool:
        """Return whether ``tensors`` are there."""
        return len(tensors) == len(self._addresses) and lie_at(tensors, self._addresses, self._numbers)


class _FirstCopies:
    """Copies of some parameters, which start when these are found where they were, before others are looked for.

    Attributes:
        copies: these alone.
    """

    def __init__(
        self,
        ahead: Sequence[Callable[[], None]],
        copies: RectangleCopies,
        device: torch.device,
        sources: Mapping[str, Tensor],
        destinations: Mapping[str, Tensor],
    ) -> None:
        self.copies, self._recorded = copies, Recorded([*ahead, *copies.launches], device)
        self._names = list(sources), list(destinations)
        self._places = _Places([*sources.values(), *destinations.values()])

    def start(self, sources: Mapping[str, Tensor], destinations: Mapping[str, Tensor]) -> bool:
        """Launch what is ahead and the copies and return True, unless a parameter is elsewhere: then do nothing."""
        held, filled = self._names
        if not self._places.hold([*map(sources.__getitem__, held), *map(destinations.__getitem__, filled)]):
            return False
        self._recorded.run()
        return True


class Regather:
    """A plan made ready for one rank; ``run`` may be called any number of times, and allocates in the first alone.

    Attributes:
        bytes_copied: what the last run copied within this rank; nothing where destinations are views of sources.
    """

    def __init__(
        self,
        plan: RankPlan,
        dtype: torch.dtype,
        device: torch.device | str,
        transport: Transport | None = None,
        staging_bytes: int = STAGING_BYTES,
        direct_bytes: int | None = DIRECT_BYTES,
        source_dtype: torch.dtype | None = None,
        peers: PeerMemory | None = None,
        first_bytes: int = FIRST_BYTES,
    ) -> None:
        """Compare the plans of all ranks and allocate at most ``staging_bytes``; collective over the world.

        ``dtype`` is the destinations', ``source_dtype`` the sources', the same by default: numbers are cast before they
        travel. Where none are, contiguous pieces of ``direct_bytes`` or more travel without a buffer (None: never).
        All are alike on all ranks. What ``peers`` has is read where it is, and does not travel. ``first_bytes`` of the
        largest parameters, at most half of all, are copied while the addresses of the others are compared.

        Raises RegatherError on every rank where two ends of a transfer plan differently.
        """
        compare_plans(plan, dtype)
        self.plan, self._dtype, self._device = plan, dtype, torch.device(device)
        self._transport = transport or PointToPoint()
        same_type = source_dtype in (None, dtype)
        self._peers = peers
        travels = plan.without(peers.near) if peers else plan
        self._rounds = stage(travels, dtype, device, staging_bytes, direct_bytes if same_type else None)
        self.bytes_copied = 0
        self._first_elements = first_bytes // dtype.itemsize
        self._places = _Places([])
        self._padding: list[Tensor] = []
        # As many signals from every rank: those that have nothing to copy give them too.
        self._ahead, self._behind = (list(peers.ahead), list(peers.behind)) if peers else ([], [])
        self._first = _FirstCopies(self._ahead, RectangleCopies([], []), self._device, {}, {})
        self._rest = Recorded(self._behind, self._device)
        self._turns: list[_Turn] = []
        messages_travel = bool(self._rounds) and not peers
        self._side_stream = torch.cuda.Stream() if messages_travel and self._device.type == "cuda" else None

    @property
    def bytes_received(self) -> int:
        """Bytes that reach this rank from others in a run."""
        return self.plan.bytes_received(self._dtype.itemsize)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the buffers on this rank."""
        halves = [half for turn in self._rounds[:IN_FLIGHT] for half in (turn.sends, turn.receives)]
        storages = [next(iter(half.buffers.values())).untyped_storage() for half in halves if half.buffers]
        return sum(storage.nbytes() for storage in storages)

    def run(self, sources: Mapping[str, Tensor], destinations: Mapping[str, Tensor]) -> None:
        """Fill ``destinations`` (this rank's, by parameter name) from every rank's ``sources``.

        Collective over the world. Storage stays where it is; rows that pad a vocabulary become zero. What is a view of
        its source already is not touched: it has the source's padding too. On a GPU the copies are on their way when
        this returns, in order on the current stream. Raises RegatherError where a peer is gone.
        """
        try:
            self._start_first(sources, destinations)
            with torch.no_grad():
                self._copy(sources, destinations)
                self._exchange()
        except RegatherError:
            raise
        except RuntimeError as error:
            peers = {peer for turn in self._rounds for peer in turn.sends.peers | turn.receives.peers}
            peers |= self._peers.near - {self.plan.rank} if self._peers else set()
            raise RegatherError(f"regathering: the exchange with ranks {sorted(peers)} failed ({error})") from error
        if self._side_stream:
            torch.cuda.current_stream().wait_stream(self._side_stream)

    def verify(self, sources: Mapping[str, Tensor], destinations: Mapping[str, Tensor]) -> None:
        """Raise RegatherError on every rank where ``destinations`` is not what ``sources`` is; collective."""
        verify_weights(self.plan, self._dtype, self._transport, sources, destinations)
        verify_weights(self.plan.forwarding, self._dtype, self._transport, destinations, destinations)

    def _start_first(self, sources: Mapping[str, Tensor], destinations: Mapping[str, Tensor]) -> None:
        """Start to copy the largest parameters, unless they have moved, when the node's ranks have finished them.

        Nothing else is done before: a GPU waits for each line of it. Either way this rank has signalled once.
        """
        with self._beside():
            started = self._first.start(sources, destinations)
        if not started:
            for launch in self._ahead:
                launch()

    def _copy(self, sources: Mapping[str, Tensor], destinations: Mapping[str, Tensor]) -> None:
        """Take what this rank has, and what the node's ranks have, before they change it again.

        One kernel takes both, in turn: a link leaves the memory time for both, but of two kernels the second begins
        when the first one's programs leave it room. While the largest parameters are copied, the rest is compared.
        """
        moved = self._bind(sources, destinations)
        for rows in self._padding:
            rows.zero_()
        with self._beside():
            if moved:  # as it is where the first have not started: they are among all
                self._first.copies.run()
            self._rest.run()

    def _exchange(self) -> None:
        """Pack a round while the one before it travels, then unpack that one; forwards when all has arrived."""
        for _, part in itertools.groupby(self._turns, lambda turn: turn.forwards):
            turns = list(part)
            under_way = self._start(turns[0])
            for turn, following in itertools.zip_longest(turns, turns[1:]):
                next_under_way = self._start(following) if following else []
                for pending in under_way:
                    pending.wait()
                turn.unpack.run()
                under_way = next_under_way

    def _start(self, turn: _Turn) -> list[Pending]:
        turn.pack.run()
        return self._transport.start(turn.sends, turn.receives)

    def _beside(self) -> contextlib.AbstractContextManager[None]:
        """Use a stream of its own on a GPU where messages travel: copies within the rank do not hold them up."""
        return _on_stream(self._side_stream) if self._side_stream else _ON_THE_CURRENT_STREAM

    def _bind(self, sources: Mapping[str, Tensor], destinations: Mapping[str, Tensor]) -> bool:
        """Work out the copies between parameters and buffers, unless all are where they were the last time: False."""
        tensors = [*sources.values(), *destinations.values()]
        if self._places.hold(tensors):
            return False
        shared = {copy.destination_parameter for copy in self.plan.local if _is_view(copy, sources, destinations)}
        self._padding = _padding(self.plan, destinations, shared)
        local = [copy for copy in self.plan.local if copy.destination_parameter not in shared]
        self.bytes_copied = sum(copy.elements for copy in local) * self._dtype.itemsize
        self._first, self._rest = self._bind_copies(local, sources, destinations)
        self._turns = []
        for turn in self._rounds:
            held = destinations if turn.forwards else sources
            sends, origins, packed = self._buffers(turn.sends, functools.partial(_origin, sources=held))
            receives, targets, unpacked = self._buffers(turn.receives, lambda copy: _target(copy, destinations))
            pack, unpack = RectangleCopies(packed, origins), RectangleCopies(targets, unpacked)
            self._turns.append(_Turn(pack, sends, receives, unpack, turn.forwards))
        self._places = _Places(tensors)
        return True

    def _bind_copies(
        self, copies: list[Copy], sources: Mapping[str, Tensor], destinations: Mapping[str, Tensor]
    ) -> tuple[_FirstCopies, Recorded]:
        """Return ``copies`` within the rank and those out of other ranks' memory, where their parameters must stay.

        Ahead of the first, others finish their sources; behind the rest these may change.
        """
        held = {self.plan.rank: sources}
        if self._peers:
            for name, address in self._peers.own.items():
                if sources[name].data_ptr() != address:
                    raise RegatherError(f"regathering: {name} has moved, and other ranks read it where it was")
            held |= self._peers.parameters
            read = [copy for copy in self.plan.receives if copy.source in self._peers.near]
            copies = spread_over_sources([*copies, *read])
        first, rest = split_off_first(copies, self._first_elements)
        if self._peers:
            first, rest = spread_over_sources(first), spread_over_sources(rest)
        bound = [
            RectangleCopies(
                [_target(copy, destinations) for copy in part], [_origin(copy, held[copy.source]) for copy in part]
            )
            for part in (first, rest)
        ]
        own = {copy.source_parameter: sources[copy.source_parameter] for copy in first if copy.source == self.plan.rank}
        filled = {copy.destination_parameter: destinations[copy.destination_parameter] for copy in first}
        return (
            _FirstCopies(self._ahead, bound[0], self._device, own, filled),
            Recorded([*bound[1].launches, *self._behind], self._device),
        )

    def _buffers(
        self, half: Half, view_of: Callable[[Copy], Tensor]
    ) -> tuple[dict[int, list[Tensor]], list[Tensor], list[Tensor]]:
        """Return tensors to or from each peer; windows of parameters, and the segments of buffers that belong to them.

        A contiguous window that is all there is for a buffer travels without it, whatever its other end is like.
        """
        travelling: dict[int, list[Tensor]] = defaultdict(list)
        views: list[Tensor] = []
        segments: list[Tensor] = []
        for peer, pieces in half.pieces.items():
            of_peer = [view_of(copy) for copy, _ in pieces]
            if len(of_peer) == 1 and of_peer[0].is_contiguous() and of_peer[0].dtype == self._dtype:
                travelling[peer].append(of_peer[0].view(-1))
                continue
            travelling[peer].append(half.buffers[peer])
            views += of_peer
            segments += [segment for _, segment in pieces]
        for peer, copies in half.direct.items():
            for copy in copies:
                view = view_of(copy)
                if not view.is_contiguous() or view.dtype != self._dtype:
                    raise RegatherError(
                        f"regathering: {copy.tensor} is to travel as it is, and its window {list(view.shape)} of type "
                        f"{view.dtype} with strides {view.stride()} is not contiguous or not of type {self._dtype}"
                    )
                travelling[peer].append(view.view(-1))
        return travelling, views, segments


@contextlib.contextmanager
def _on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Use ``stream`` behind the current one."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


def _origin(copy: Copy, sources: Mapping[str, Tensor]) -> Tensor:
    return window(sources[copy.source_parameter], copy.source_offset, copy.region)


def _target(copy: Copy, destinations: Mapping[str, Tensor]) -> Tensor:
    return window(destinations[copy.destination_parameter], copy.destination_offset, copy.region)


def _is_view(copy: Copy, sources: Mapping[str, Tensor], destinations: Mapping[str, Tensor]) -> bool:
    """Return whether a copy within the rank would read what it writes."""
    return _origin(copy, sources).data_ptr() == _target(copy, destinations).data_ptr()


def _padding(plan: RankPlan, destinations: Mapping[str, Tensor], shared: Collection[str]) -> list[Tensor]:
    """Return the last rows of a parameter that no copy fills, but not of ``shared`` ones.

    Raises RegatherError where anything else is not filled.
    """
    filled, ends = dict.fromkeys(destinations, 0), dict.fromkeys(destinations, 0)
    for copy in (*plan.local, *plan.arriving):
        name = copy.destination_parameter
        filled[name] += copy.elements
        for begin, (start, stop) in zip(copy.destination_offset[:1], copy.region[:1], strict=True):
            ends[name] = max(ends[name], begin + stop - start)
    tails = []
    for name, tensor in destinations.items():
        missing = tensor.numel() - filled[name]
        tail = tensor[ends[name] :] if tensor.dim() else tensor
        if not filled[name] or (missing and tail.numel() != missing):
            raise RegatherError(
                f"regathering: {filled[name]} of {tensor.numel()} elements of {name} {list(tensor.shape)} have a source"
            )
        tails += [tail] if missing and name not in shared else []
    return tails
