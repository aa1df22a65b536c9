"""The optimizer's state in host memory for good: in each step it passes through the GPU, one piece after the other.

Moments may be in half as many bytes between steps, here and on the GPU: a piece's are widened for its step.

While a piece takes its step the next one comes and the last one goes, so a step takes about as long as the link needs
for the state in one direction, and the GPU holds three pieces of it. No number changes: Adam's step of one parameter
knows nothing of the others'. With data parallelism each rank streams its own part over its own link.

Between steps a parameter's master weights are a tensor of the right shape that reads as NaN and takes no memory, and
its moments are tensors of the host.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.roles.host_memory import pinned_buffers
from rlhf_megatron.roles.rounding import rounded_at_random

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
    """The share of the state of one of Megatron's distributed optimizers that lives in host memory."""

    def __init__(
        self, optimizer: Any, share: float, dtype: torch.dtype, steps_taken: Callable[[], int], piece_bytes: int
    ) -> None:
        """Take over the ``optimizer``'s steps, with moments of ``dtype`` between them.

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
        self._resident = [resident] if dtype == torch.float32 else list(_pieces(resident, piece_bytes))
        # A float32 model is its own master, which stays.
        self._copies = {id(main) for group in optimizer.shard_fp32_from_float16_groups for main in group}
        self._host: dict[tuple[int, str], Tensor] = {}
        self._parked = False
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        self._inner.step = self._step
        optimizer._copy_main_params_to_model_params = lambda: None  # done with each piece

    def owns(self, main: Tensor) -> bool:
        """Return whether these master weights are streamed."""
        return id(main) in self._owned

    def at_rest(self, main: Tensor) -> Tensor:
        """Return master weights where they are between steps, to read and to write."""
        return self._host[id(main), _MASTER] if self._parked and (id(main), _MASTER) in self._host else main

    def park(self) -> None:
        """Send master weights to the host, where they are not there already."""
        if self._parked:
            return
        self._parked = True
        for piece in self._pieces:
            self._leave(piece)
        self._settle()

    def unpark(self) -> None:
        """Bring master weights back, for Megatron to write them."""
        for piece in self._pieces if self._parked else ():
            for main in piece:
                main.data = self.at_rest(main).to(main.device)
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
        return self._moments(main) | ({_MASTER: main.data} if id(main) in self._copies else {})

    def _widen(self, piece: Sequence[Tensor]) -> None:
        """Make moments float32, as a step takes them."""
        for main in piece:
            for key, value in self._moments(main).items():
                self._put(main, key, value.float())

    def _narrow(self, piece: Sequence[Tensor]) -> None:
        """Round moments to the type that they have between steps."""
        for main in piece if self._dtype != torch.float32 else ():
            for order, (key, value) in enumerate(self._moments(main).items()):
                number = 2 * (self._steps_taken() * len(self._places) + self._places[id(main)]) + order
                self._put(main, key, rounded_at_random(value, number))

    def _fetch(self, piece: Sequence[Tensor]) -> _Visit:
        """Start to copy a piece to the device."""
        at_rest = [(main, self._state(main)) for main in piece]
        for main, tensors in at_rest:
            if _MASTER in tensors:
                tensors[_MASTER] = self.at_rest(main)
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
                self._put(main, key, value.float() if key != _MASTER else value)

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
            gone = torch.full((), torch.nan, device=main.device).expand(main.shape) if key == _MASTER else host
            self._put(main, key, gone)
        return stream.record_event() if stream is not None else None

    def _put(self, main: Tensor, key: str, value: Tensor) -> None:
        if key == _MASTER:
            main.data = value
        else:
            self._inner.state[main][key] = value

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
    optimizer: Any, share: float, dtype: torch.dtype, steps_taken: Callable[[], int]
) -> list[StreamedState]:
    """Return one for each of the optimizers that make up Megatron's ``optimizer`` and have parameters; none where the
    share is 0 and moments are float32."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer]) if share or dtype != torch.float32 else []
    return [StreamedState(part, share, dtype, steps_taken, PIECE_BYTES) for part in parts if part.optimizer is not None]


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
