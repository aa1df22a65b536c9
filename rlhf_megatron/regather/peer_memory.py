"""The parameters of the node's other GPUs as tensors of this process: read where they are, over NVLink, by one kernel.

Messages need buffers, and wait for each other; a read needs neither. CUDA's interprocess handles stand for whole
allocations, so each is opened once, and parameters are places in it. When a rank may read, others say by a number that
they write into its memory, which its stream waits for (cuStreamBatchMemOp): some microseconds, where NCCL takes ten
times as long, and part of the CUDA graphs that copy, so that no signal waits for Python.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.regather.plan import Copy, RankPlan
from rlhf_megatron.regather.rounds import split_copy
from rlhf_megatron.runtime.clocks import host_identity
from rlhf_megatron.topology.exchange import gather_objects, max_over_ranks

# Pieces in which ranks take turns as sources. One of bfloat16 takes some 6 microseconds of a link.
_PIECE_ELEMENTS = 1 << 20
_SIGNALS = "signals of other ranks"  # among the names of parameters


class Operation(NamedTuple):
    """Operation of a stream: write ``value``, or wait until what is there is not smaller."""

    kind: Literal["write", "wait"]
    place: Tensor
    """Its first element, int32."""
    value: int


@dataclasses.dataclass(frozen=True)
class _Offer:
    """Memory that a rank lets others of its host read: handles of allocations, and where in them its parameters are."""

    handles: list[bytes]
    locations: dict[str, tuple[int, int, tuple[int, ...], str]]  # handle, offset in bytes, shape, type


@dataclasses.dataclass(frozen=True)
class PeerMemory:
    """Parameters of other ranks that this one can read, as long as they stay where they are.

    Attributes:
        near: the ranks of this host, which read from each other and send each other nothing.
        parameters: for each rank that this one reads from or that reads from it, by name.
        own: where the parameters are that this rank lets others read.
        ahead: launches, which CUDA graphs may contain: what is asked of this rank's GPU after them begins when those
            ranks have come to theirs too; none for a rank without such ranks.
        behind: the same, to be launched in turn with those ``ahead``.
    """

    near: frozenset[int]
    parameters: Mapping[int, Mapping[str, Tensor]]
    own: Mapping[str, int]
    ahead: Sequence[Callable[[], None]]
    behind: Sequence[Callable[[], None]]
    _opened: list[Any]
    _signals: Tensor | None = None  # memory that other ranks write into

    def close(self) -> None:
        """Give the mappings back, before their owners free the memory."""
        _close_all(self._opened)


def map_peers(plan: RankPlan, sources: Mapping[str, Tensor]) -> PeerMemory | None:
    """Map what ``plan`` receives from ranks of the same host; collective over the world.

    ``sources`` are this rank's parameters, which must not move from here on. None, on all ranks alike, where there are
    no GPUs, where nothing would be read, or where one rank cannot map another's memory: GPUs without a link, memory of
    torch's expandable segments, ranks in containers that may not see each other.
    """
    hosts = gather_objects(host_identity() if torch.cuda.is_available() else None)
    rank = dist.get_rank()
    near = frozenset(other for other, host in enumerate(hosts) if host == hosts[rank] and host is not None)
    read = {copy.source for copy in plan.receives} & near
    if not max_over_ranks([len(read)])[0]:
        return None
    wanted = sorted({copy.source_parameter for copy in plan.sends if copy.destination in near})
    numbers = torch.zeros(2, len(hosts), dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()  # no zero may come after what others write
    offers = gather_objects(_offer({name: sources[name] for name in wanted} | {_SIGNALS: numbers}))
    if None in offers:  # which all ranks see
        return None
    opened: list[Any] = []
    partners = read | {copy.destination for copy in plan.sends} & near
    parameters = _open(offers, partners, opened)
    if max_over_ranks([parameters is None])[0]:
        _close_all(opened)
        return None
    assert parameters is not None
    own = {name: sources[name].data_ptr() for name in wanted}
    theirs = [{other: parameters[other][_SIGNALS][turn, rank:] for other in partners} for turn in range(2)]
    ahead, behind = (_launches(barrier_operations(numbers[turn], theirs[turn])) for turn in range(2))
    return PeerMemory(near, parameters, own, ahead, behind, opened, numbers)


def describe_transfer(plan: RankPlan, peers: PeerMemory | None, dtype: torch.dtype) -> str:
    """Describe, for the console, how what ``plan`` receives reaches this rank."""
    received, forwarded = (plan.bytes_received(dtype.itemsize), plan.forwarding.bytes_received(dtype.itemsize))
    sent = plan.without(peers.near).bytes_received(dtype.itemsize) if peers else received
    ways = [
        (received - sent, "read from other GPUs of this host"),
        (sent - forwarded, "sent by other ranks"),
        (forwarded, "forwarded by other ranks of this host"),
    ]
    return " and ".join(f"{size / 1e9:.3g} GB {way}" for size, way in ways if size) + ", on rank 0"


def spread_over_sources(copies: Sequence[Copy]) -> list[Copy]:
    """Return ``copies`` in small pieces, in an order in which every source is asked evenly from the first to the last.

    In the order of the parameters all ranks would read from the same one at a time, and from themselves while their
    links are idle.
    """
    of_source: dict[int, list[Copy]] = defaultdict(list)
    for copy in copies:
        of_source[copy.source] += split_copy(copy, _PIECE_ELEMENTS)
    placed: list[tuple[float, int, Copy]] = []
    for source, pieces in of_source.items():
        ends = list(itertools.accumulate(piece.elements for piece in pieces))
        placed += [
            ((end - piece.elements / 2) / ends[-1], source, piece) for piece, end in zip(pieces, ends, strict=True)
        ]
    return [piece for _, _, piece in sorted(placed, key=lambda each: each[:2])]


def barrier_operations(own: Tensor, theirs: Mapping[int, Tensor]) -> list[Operation]:
    """Return what a rank's GPU does at a barrier of it and others, which takes turns with one of other numbers.

    It writes 1 where ``theirs`` begins, by rank, waits until those ranks have written into ``own`` [world] int32, and
    takes back what they wrote. None of them has written again by then: before that they wait for this rank at the other
    barrier. So the same operations serve any number of times.
    """
    written = [own[rank:] for rank in theirs]
    return [
        *(Operation("write", place, 1) for place in theirs.values()),
        *(Operation("wait", place, 1) for place in written),
        *(Operation("write", place, 0) for place in written),
    ]


def _launches(operations: Sequence[Operation]) -> list[Callable[[], None]]:
    """Return what has the current stream do ``operations`` in order; none where there are none.

    What a GPU has written before is in its memory when its 1 is: each write has a fence.
    """
    from cuda.bindings import driver

    types, made = driver.CUstreamBatchMemOpType, []
    for kind, place, value in operations:
        operation = driver.CUstreamBatchMemOpParams()
        if kind == "write":
            parameters = operation.writeValue
            parameters.operation = types.CU_STREAM_MEM_OP_WRITE_VALUE_32
            parameters.flags = int(driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT)
        else:
            parameters = operation.waitValue
            parameters.operation = types.CU_STREAM_MEM_OP_WAIT_VALUE_32
            parameters.flags = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
        parameters.address, parameters.value = place.data_ptr(), value
        made.append(operation)

    def launch() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        _value_of("cuStreamBatchMemOp", driver.cuStreamBatchMemOp(stream, len(made), made, 0))

    return [launch] if made else []


def _offer(parameters: Mapping[str, Tensor]) -> _Offer | None:
    """Return handles of the allocations that hold ``parameters``; None where CUDA has none for them."""
    handles: dict[int, tuple[int, bytes]] = {}  # the allocation's address -> its number and its handle
    locations = {}
    for name, parameter in parameters.items():
        try:
            base, _ = _driver("cuMemGetAddressRange", parameter.data_ptr())
            if int(base) not in handles:
                handles[int(base)] = len(handles), _driver("cuIpcGetMemHandle", base).reserved
        except (OSError, ImportError):
            return None
        offset, kind = parameter.data_ptr() - int(base), str(parameter.dtype).removeprefix("torch.")
        locations[name] = handles[int(base)][0], offset, tuple(parameter.shape), kind
    return _Offer([handle for _, handle in handles.values()], locations)


def _open(offers: Sequence[_Offer], ranks: set[int], opened: list[Any]) -> dict[int, dict[str, Tensor]] | None:
    """Return the parameters that ``ranks`` offer, None where one cannot be mapped; ``opened`` gets what is to be
    closed."""
    from cuda.bindings import driver

    mapped: dict[int, dict[str, Tensor]] = {}
    for rank in sorted(ranks):
        bases = []
        for reserved in offers[rank].handles:
            handle = driver.CUipcMemHandle()
            handle.reserved = reserved
            try:
                base = _driver(
                    "cuIpcOpenMemHandle", handle, int(driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
                )
            except OSError:
                return None
            opened.append(base)
            bases.append(int(base))
        mapped[rank] = {
            name: _tensor_at(bases[number] + offset, shape, getattr(torch, kind))
            for name, (number, offset, shape, kind) in offers[rank].locations.items()
        }
    return mapped


def _close_all(opened: list[Any]) -> None:
    torch.cuda.synchronize()  # nothing reads there any more
    while opened:
        _driver("cuIpcCloseMemHandle", opened.pop())


def _driver(name: str, *arguments: Any) -> Any:
    """Call a function of CUDA's driver; raises OSError where it fails."""
    from cuda.bindings import driver

    return _value_of(name, getattr(driver, name)(*arguments))


def _value_of(name: str, result: Sequence[Any]) -> Any:
    error, *values = result
    if int(error):  # all but CUDA_SUCCESS
        raise OSError(f"{name}: {error.name}")
    return values[0] if len(values) == 1 else values


class _Bytes:
    """Memory of a GPU, as torch takes it."""

    def __init__(self, address: int, length: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (length,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def _tensor_at(address: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    length = torch.Size(shape).numel() * dtype.itemsize
    return torch.as_tensor(_Bytes(address, length)).view(dtype).view(shape)
