"""The optimizer's state in host memory for good: in each step it passes through the GPU, one piece after the other.

Moments and master weights may be in half as many bytes between steps, here and on the GPU: a piece's are widened for
its step.

While a piece takes its step the next one comes and the last one goes, so a step takes about as long as the link needs
for the state in one direction, and the GPU holds three pieces of it. No number changes: Adam's step of one parameter
knows nothing of the others'. With data parallelism each rank streams its own part over its own link.

Between steps a parameter's master weights, where they are streamed or remainders, are a tensor of the right shape that
reads as NaN and takes no memory; streamed moments are tensors of the host.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.roles.host_memory import pinned_buffers
from rlhf_megatron.roles.rounding import remainder_of, rounded_at_random, with_remainder

_MASTER = "master"
PIECE_BYTES = 1 << 30
_STATE_BYTES = 12  # of each element: master weight and two moments in float32
_IN_FLIGHT = 3
# Megatron's lists of the master weights that a rank has, and of the parameters that they are copied to.
_MASTERS_AND_MODELS = (
    ("shard_fp32_from_float16_groups", "model_float16_groups"),
    ("shard_fp32_groups", "model_fp32_groups"),
)


@dataclasses.dataclass
class _Visit:
    """A piece on its way to the device: the tensors of each parameter's state by name, and when they are there."""

    tensors: list[tuple[Tensor, dict[str, Tensor]]]
    arrived: torch.cuda.Event | None


class StreamedState:
    """The state of one of Megatron's distributed optimizers: the share that lives in host memory, and what is in fewer
    bytes between steps."""

    def __init__(
        self,
        optimizer: Any,
        share: float,
        dtype: torch.dtype,
        remainders: bool,
        steps_taken: Callable[[], int],
        piece_bytes: int,
    ) -> None:
        """Take over the ``optimizer``'s steps, with moments of ``dtype`` between them, and of master weights the
        ``remainders`` alone, if the model is bfloat16.

        The smallest parameters are streamed, up to ``share`` (0 to 1) of all state, since none is cut: pieces are of
        ``piece_bytes`` at most, or of one larger parameter. ``steps_taken``, before a step, decides how it rounds.
        """
        self._dtype, self._steps_taken = dtype, steps_taken
        self._optimizer, self._inner = optimizer, optimizer.optimizer
        self._whole_step: Callable[[], Any] = self._inner.step
        self._copy_to_model: Callable[[], None] = optimizer._copy_main_params_to_model_params
        mains = [main for group in self._inner.param_groups for main in group["params"]]
        self._owned = _smallest(mains, share)
        self._pieces = list(_pieces([main for main in mains if id(main) in self._owned], piece_bytes))
        self._places = {id(main): position for position, main in enumerate(mains)}
        resident = [main for main in mains if id(main) not in self._owned]
        is_whole = dtype == torch.float32 and not remainders
        self._resident = [resident] if is_whole else list(_pieces(resident, piece_bytes))
        # A float32 model is its own master, which stays.
        groups = zip(optimizer.shard_fp32_from_float16_groups, optimizer.shard_float16_groups, strict=True)
        rounded = {id(main): model for pair in groups for main, model in zip(*pair, strict=True)}
        self._copies = set(rounded)
        self._rounded: dict[int, Tensor] = rounded if remainders else {}
        self._remainders: dict[int, Tensor] = {}  # on the device, in place of master weights
        self._host: dict[tuple[int, str], Tensor] = {}
        self._parked = False
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        self._inner.step = self._step
        optimizer._copy_main_params_to_model_params = lambda: None  # done with each piece

    def streams(self, main: Tensor) -> bool:
        """Return whether a parameter's state is in host memory between steps."""
        return id(main) in self._owned

    def replaces(self, main: Tensor) -> bool:
        """Return whether another tensor stands for these master weights between steps."""
        return id(main) in self._owned or id(main) in self._rounded

    @property
    def on_device(self) -> list[Tensor]:
        """Tensors of the device in place of master weights that are not streamed."""
        return list(self._remainders.values())

    def at_rest(self, main: Tensor) -> Tensor:
        """Return master weights as they are between steps: where they are then, or of remainders a copy."""
        kept = self._kept(main)
        return with_remainder(self._rounded[id(main)], kept.to(main.device)) if kept.dtype == torch.int16 else kept

    def write(self, main: Tensor, values: Tensor) -> None:
        """Set master weights between steps, whose rounded ones the model has already."""
        kept = self._kept(main)
        if kept.dtype == torch.int16:
            rounded = self._rounded[id(main)]
            values = remainder_of(values.to(rounded.device), rounded)
        kept.copy_(values)

    def _kept(self, main: Tensor) -> Tensor:
        """Return what there is of master weights now."""
        if not self._parked:
            return main.data
        return self._host.get((id(main), _MASTER), self._remainders.get(id(main), main.data))

    def park(self) -> None:
        """Have master weights as they are between steps, and where, if they are not already."""
        if self._parked:
            return
        for piece in self._resident:
            self._keep_remainders(piece)
        for piece in self._pieces:
            self._keep_remainders(piece)
            self._leave(piece)
        self._parked = True
        self._settle()

    def unpark(self) -> None:
        """Bring master weights back, for Megatron to write them."""
        for piece in (*self._resident, *self._pieces) if self._parked else ():
            for main in piece:
                main.data = self.at_rest(main).to(main.device)
        self._remainders.clear()
        self._parked = False

    @torch.no_grad()
    def _step(self) -> None:
        """Take the inner optimizer's step, and the copy of master weights to the model, for one piece at a time."""
        self.park()
        counts = [group.get("step") for group in self._inner.param_groups]
        left: list[torch.cuda.Event | None] = []
        coming = self._fetch(self._pieces[0]) if self._pieces else None
        for piece in self._resident:
            self._widen(piece)
            self._step_of(piece, counts)
            self._narrow(piece)
        for number, piece in enumerate(self._pieces):
            here = coming
            if number >= _IN_FLIGHT - 1 and (gone := left[number - _IN_FLIGHT + 1]) is not None:
                gone.synchronize()  # or all pieces would get memory at once
            coming = self._fetch(self._pieces[number + 1]) if number + 1 < len(self._pieces) else None
            self._arrive(here)
            self._widen(piece)
            self._step_of(piece, counts)
            self._narrow(piece)
            left.append(self._leave(piece))
        self._settle()

    def _step_of(self, mains: Sequence[Tensor], counts: Sequence[Any]) -> None:
        """Take the whole step of these parameters alone; ``counts`` are the groups' counts of the steps before."""
        chosen = {id(main) for main in mains}
        with contextlib.ExitStack() as stack:
            for group, count in zip(self._inner.param_groups, counts, strict=True):
                # Transformer Engine counts the steps of a group, also of one without parameters.
                group.pop("step", None)
                if count is not None:
                    group["step"] = count
                stack.callback(group.__setitem__, "params", group["params"])
                group["params"] = [main for main in group["params"] if id(main) in chosen]
            for masters, models in _MASTERS_AND_MODELS:
                before = getattr(self._optimizer, masters), getattr(self._optimizer, models)
                pairs = [
                    [(main, model) for main, model in zip(*groups, strict=True) if id(main) in chosen]
                    for groups in zip(*before, strict=True)
                ]
                for name, groups, index in zip((masters, models), before, (0, 1), strict=True):
                    stack.callback(setattr, self._optimizer, name, groups)
                    setattr(self._optimizer, name, [[pair[index] for pair in group] for group in pairs])
            self._whole_step()
            self._copy_to_model()

    def _moments(self, main: Tensor) -> dict[str, Tensor]:
        """Return the moments of a parameter, where and as they are now."""
        return {
            key: value
            for key, value in self._inner.state.get(main, {}).items()
            if isinstance(value, Tensor) and value.shape == main.shape
        }

    def _state(self, main: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a parameter's state that are streamed, where they are now."""
        master = self._remainders.get(id(main), main.data)
        return self._moments(main) | ({_MASTER: master} if id(main) in self._copies else {})

    def _widen(self, piece: Sequence[Tensor]) -> None:
        """Make all float32, as a step takes it."""
        for main in piece:
            for key, value in self._moments(main).items():
                self._put(main, key, value.float())
            if id(main) in self._remainders:
                main.data = with_remainder(self._rounded[id(main)], self._remainders.pop(id(main)))

    def _narrow(self, piece: Sequence[Tensor]) -> None:
        """Have all as it is between steps."""
        self._keep_remainders(piece)
        for main in piece if self._dtype != torch.float32 else ():
            for order, (key, value) in enumerate(self._moments(main).items()):
                number = 2 * (self._steps_taken() * len(self._places) + self._places[id(main)]) + order
                self._put(main, key, rounded_at_random(value, number))

    def _keep_remainders(self, piece: Sequence[Tensor]) -> None:
        """Keep of master weights what the model does not have."""
        for main in piece:
            if id(main) not in self._rounded:  # float32 is its own
                continue
            self._remainders[id(main)] = remainder_of(main.data, self._rounded[id(main)])
            main.data = _nothing(main)

    def _fetch(self, piece: Sequence[Tensor]) -> _Visit:
        """Start to copy a piece to the device."""
        at_rest = [(main, self._state(main)) for main in piece]
        for main, tensors in at_rest:
            if _MASTER in tensors:
                tensors[_MASTER] = self._kept(main)
        if not piece[0].is_cuda:
            return _Visit([(main, {key: value.clone() for key, value in of.items()}) for main, of in at_rest], None)
        stream = self._both_streams()[0]
        with torch.cuda.stream(stream):
            coming = [
                (main, {key: value.to(main.device, non_blocking=True) for key, value in of.items()})
                for main, of in at_rest
            ]
            return _Visit(coming, stream.record_event())

    def _arrive(self, visit: _Visit | None) -> None:
        """Put a piece in its place, for all that is asked of the device from now on."""
        assert visit is not None
        if visit.arrived is not None:
            torch.cuda.current_stream().wait_event(visit.arrived)
        for main, tensors in visit.tensors:
            for key, value in tensors.items():
                if value.is_cuda:
                    value.record_stream(torch.cuda.current_stream())
                self._put(main, key, value)

    def _leave(self, piece: Sequence[Tensor]) -> torch.cuda.Event | None:
        """Start to copy a piece to the host, and give up its memory on the device."""
        leaving = [(main, key, value) for main in piece for key, value in self._state(main).items()]
        new = {(id(main), key): value.nbytes for main, key, value in leaving if (id(main), key) not in self._host}
        self._host |= zip(new, pinned_buffers(list(new.values())), strict=True)
        stream = self._both_streams()[1] if piece[0].is_cuda else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        for main, key, value in leaving:
            host = self._host[id(main), key].view(value.dtype).view(value.shape)
            self._host[id(main), key] = host
            with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                host.copy_(value, non_blocking=True)
            if stream is not None and value.is_cuda:
                value.record_stream(stream)
            self._remainders.pop(id(main), None)
            self._put(main, key, _nothing(main) if key == _MASTER else host)
        return stream.record_event() if stream is not None else None

    def _put(self, main: Tensor, key: str, value: Tensor) -> None:
        if key != _MASTER:
            self._inner.state[main][key] = value
        elif value.dtype == torch.int16:
            self._remainders[id(main)] = value
        else:
            main.data = value

    def _settle(self) -> None:
        """Wait until all that left is on the host."""
        if self._streams is not None:
            self._streams[1].synchronize()

    def _both_streams(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """Return those of what comes and of what leaves: a link carries both at once."""
        if self._streams is None:
            self._streams = (torch.cuda.Stream(), torch.cuda.Stream())
        return self._streams


def streamed_states(
    optimizer: Any, share: float, dtype: torch.dtype, remainders: bool, steps_taken: Callable[[], int]
) -> list[StreamedState]:
    """Return one for each of the optimizers that make up Megatron's ``optimizer`` and have parameters; none where
    nothing is streamed and all is float32."""
    if not share and dtype == torch.float32 and not remainders:
        return []
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [
        StreamedState(part, share, dtype, remainders, steps_taken, PIECE_BYTES)
        for part in parts
        if part.optimizer is not None
    ]


def _nothing(main: Tensor) -> Tensor:
    """Return what stands for master weights that are elsewhere."""
    return torch.full((), torch.nan, device=main.device).expand(main.shape)


def _smallest(mains: Sequence[Tensor], share: float) -> set[int]:
    """Return the smallest of them, which together have no more than ``share`` of all elements."""
    room = share * sum(main.numel() for main in mains)
    chosen = set()
    for main in sorted(mains, key=Tensor.numel):
        room -= main.numel()
        if room < -0.5:
            break
        chosen.add(id(main))
    return chosen


def _pieces(mains: Sequence[Tensor], piece_bytes: int) -> Iterator[list[Tensor]]:
    piece: list[Tensor] = []
    for main in mains:
        if piece and _STATE_BYTES * sum(map(Tensor.numel, [*piece, main])) > piece_bytes:
            yield piece
            piece = []
        piece.append(main)
    if piece:
        yield piece
