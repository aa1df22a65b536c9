"""Prompts without end, read ahead while the model trains, with a position that a checkpoint keeps.

Not here: which row comes when (order.py), and how a row becomes a prompt (prompts.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from rlhf_megatron.data.drawn_prompts import DrawnPrompt, Readers, drawn_lengths
from rlhf_megatron.data.order import Order, Shares, WindowOrder, curriculum_order
from rlhf_megatron.data.prompts import READ_ROWS, LeftOut, Prompt, PromptDataset
from rlhf_megatron.errors import CheckpointError, DataError
from rlhf_megatron.recipe import DataSection
from rlhf_megatron.untrusted import shown

# Prompts that are read ahead: so many batches, or as many prompts as are enough while a window is decoded.
_BATCHES_AHEAD, _PROMPTS_AHEAD = 8, 2048
# What rows that are read ahead may have, where they are large.
_BYTES_AHEAD = 2**29
# Shares of rows that are read ahead, where ranks read together.
_SHARES_AHEAD = 4


_Count = Annotated[int, Field(ge=0, le=2**53)]


class _Position(TypedDict):
    """The position in the data, in a checkpoint and in the line of a fault."""

    drawn: _Count
    left_out: _Count
    positions: list[_Count]


_POSITION = TypeAdapter(_Position)


class _Drawn(NamedTuple):
    """A prompt, and where the stream is behind it."""

    prompt: Prompt | DrawnPrompt
    positions: tuple[int, ...]  # rows of each part that went by, over all its epochs
    left_out: int  # rows that were left out for their length, of all parts


class PromptStream:
    """The training prompts, epoch after epoch, the same on every rank and after every resume.

    A thread reads, tokenizes and filters rows ahead of time; rows that are left out are skipped where they are met.
    Of several ``readers`` each does so with a share of the rows.
    """

    def __init__(
        self, datasets: Sequence[PromptDataset], section: DataSection, seed: int, readers: Readers | None = None
    ) -> None:
        """Start at the first prompt, and begin to read.

        Args:
            datasets: one for each of ``section.parts``.
            section: the recipe's data section, for weights and order.
            seed: of the order.
            readers: the ranks that draw these prompts, all of them at a time; this rank alone by default.

        Raises:
            DataError: the curriculum's column is bad, or needs more memory than there is.
        """
        self._datasets, self._readers = datasets, readers or Readers()
        self._names = [part.name for part in section.parts]
        self._shares = Shares([part.weight for part in section.parts], seed)
        self._orders = [_order(section, dataset, seed, part) for part, dataset in enumerate(datasets)]
        self._description = {
            "seed": seed,
            "data.shuffle": section.shuffle,
            "data.shuffle_window_mb": section.shuffle_window_mb,
            "data.curriculum": section.curriculum.model_dump(mode="json") if section.curriculum else None,
            "data.validation_fraction": section.validation_fraction,
            "weights": [part.weight for part in section.parts],
            "data files": [dataset.rows.digest for dataset in datasets],
        }
        self._drawn, self._left_out = 0, 0  # prompts handed out, and rows that were left out before them
        self._positions = (0,) * len(datasets)
        self._waited = 0.0  # seconds for prompts since ``take_wait_ms``
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompt-reader")
        self._restart()

    def next(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts as a whole; see ``draw``."""
        return [prompt if isinstance(prompt, Prompt) else prompt.whole() for prompt in self.draw(count)]

    def draw(self, count: int) -> list[Prompt | DrawnPrompt]:
        """Return the next ``count`` prompts; the last ones of an epoch are followed by the first ones of the next.

        Collective over the ``readers``, who know the lengths of all.

        Raises:
            ValueError: count is not positive.
            DataError: a row is bad, or none of a whole epoch can be used.
        """
        if count <= 0:
            raise ValueError(f"cannot draw {count} prompts; ask for one or more")
        begun, prompts = time.perf_counter(), []
        for drawn in self._taken(count) if self._readers.count == 1 else itertools.islice(self._coming, count):
            prompts.append(drawn.prompt)
        self._waited += time.perf_counter() - begun
        self._drawn += count
        self._positions, self._left_out = drawn.positions, drawn.left_out
        return prompts

    def _taken(self, count: int) -> list[_Drawn]:
        """Return the prompts that were read ahead, of a rank that reads alone."""
        self._read_ahead(count)
        while len(self._ready) < count:
            self._ready.extend(self._reading[0].result())
            self._reading.popleft()
            self._asked.popleft()
        drawn = [self._ready.popleft() for _ in range(count)]
        self._read_ahead(max(count, min(count * _BATCHES_AHEAD, self._within(_PROMPTS_AHEAD))))
        return drawn

    def read(self, locations: Sequence[tuple[int, int]]) -> list[Prompt | None]:
        """Return the prompts with these ``part`` and ``row``, None for one that is left out now; the position stays.

        Raises:
            DataError: a row is bad.
        """

        def read_now() -> list[Prompt | None]:
            prompts = [
                (location, prompt)
                for part, dataset in enumerate(self._datasets)
                if (own := sorted({location for location in locations if location[0] == part}))
                for location, prompt in zip(own, dataset.read([row for _, row in own]), strict=True)
            ]
            usable = {location: prompt for location, prompt in prompts if isinstance(prompt, Prompt)}
            return [
                dataclasses.replace(usable[location], part=location[0]) if location in usable else None
                for location in locations
            ]

        begun = time.perf_counter()
        prompts = self._reader.submit(read_now).result()  # not beside what reads ahead
        self._waited += time.perf_counter() - begun
        return prompts

    def state(self) -> dict[str, Any]:
        """Return what ``load`` needs to go on behind the last prompt that was handed out (plain JSON values)."""
        return {
            "drawn": self._drawn,
            "left_out": self._left_out,
            "positions": list(self._positions),
            "order": dict(self._description),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken.

        Raises:
            DataError: the state belongs to another order: other files, seed, or settings of the data section.
            CheckpointError: it is damaged.
        """
        try:
            checked = _POSITION.validate_python(state, strict=True)
            if sum(checked["positions"]) < checked["drawn"] + checked["left_out"]:
                raise ValueError("more prompts than rows")
        except ValueError as error:  # and pydantic's
            raise CheckpointError("the saved position in the data is damaged; resume from another one") from error
        order = state.get("order")
        for name, now in self._description.items():
            saved = order.get(name) if isinstance(order, dict) else None
            if saved != now:
                values = "" if name == "data files" else f": {shown(saved)} instead of {now}"
                raise DataError(
                    f"the checkpoint was saved with other {name}{values}; restore what it was saved with, or "
                    "start a new run"
                )
        if len(checked["positions"]) != len(self._datasets):
            raise CheckpointError(f"the saved position is one in {len(checked['positions'])} parts of the data")
        self._drawn, self._left_out = checked["drawn"], checked["left_out"]
        self._positions = tuple(checked["positions"])
        self._restart()

    def metrics(self) -> dict[str, float]:
        """Return epochs gone by, of each part of a mixture, and the number of rows left out for their length.

        And blocks that are decoded again and again, where there are any.
        """
        epochs = [position / len(dataset) for position, dataset in zip(self._positions, self._datasets, strict=True)]
        names = [f"data/epoch/{name}" for name in self._names] if len(epochs) > 1 else ["data/epoch"]
        again = sum(dataset.rows.decoded_again for dataset in self._datasets)
        return {
            **dict(zip(names, epochs, strict=True)),
            "data/rows_left_out": float(self._left_out),
            **({"data/blocks_decoded_again": float(again)} if again else {}),
        }

    def take_wait(self) -> dict[str, float]:
        """Return the metric of the milliseconds since the last call that were spent waiting for prompts."""
        waited, self._waited = self._waited, 0.0
        return {"perf/data_loading_time_ms": waited * 1000.0}

    def data_sources(self) -> list[str]:
        """Return the distinct data sources of all parts; reads that column of every file."""
        return list(dict.fromkeys(source for dataset in self._datasets for source in dataset.data_sources()))

    def _restart(self) -> None:
        """Drop what was read ahead, and read from the present position on."""
        for future in getattr(self, "_reading", ()):
            future.cancel()
        self._coming = self._from(self._drawn, list(self._positions), self._left_out)
        self._ready: deque[_Drawn] = deque()
        self._reading: deque[Future[list[_Drawn]]] = deque()
        self._asked: deque[int] = deque()  # how many prompts each of these gives
        if self._readers.count == 1:
            self._read_ahead(1)

    def _read_ahead(self, prompts: int) -> None:
        """Have at least so many prompts read or on the way."""
        coming, count = self._coming, self._within(READ_ROWS)
        while len(self._ready) + sum(self._asked) < prompts:
            self._reading.append(self._reader.submit(lambda: list(itertools.islice(coming, count))))
            self._asked.append(count)

    def _within(self, rows: int) -> int:
        """Return so many rows, or fewer where the largest ones would take too much memory."""
        return max(1, min(rows, int(_BYTES_AHEAD // max(1.0, *(each.rows.row_bytes for each in self._datasets)))))

    def _from(self, drawn: int, positions: list[int], left_out: int) -> Iterator[_Drawn]:
        """Yield all prompts from there on."""
        parts = [self._of_part(part, position) for part, position in enumerate(positions)]
        for number in itertools.count(drawn):
            part = self._shares.part(number)
            prompt, positions[part], skipped = next(parts[part])
            left_out += skipped
            yield _Drawn(prompt, tuple(positions), left_out)

    def _of_part(self, part: int, position: int) -> Iterator[tuple[Prompt | DrawnPrompt, int, int]]:
        """Yield the prompts of one part, each with the position behind it and the rows left out just before it."""
        dataset = self._datasets[part]
        left_out = unused = 0
        for item in self._read_from(part, position) if self._readers.count == 1 else self._told_from(part, position):
            position += 1
            if not isinstance(item, LeftOut):
                yield item, position, left_out
                left_out = unused = 0
                continue
            left_out += item is LeftOut.LENGTH
            unused += 1
            # A row that comes first in one epoch and last in the next has all others between, twice.
            if unused == 2 * len(dataset):
                raise dataset.none_left(len(dataset))

    def _read_from(self, part: int, position: int) -> Iterator[Prompt | LeftOut]:
        """Yield all rows of a part from a position on, read here."""
        while True:
            rows = self._orders[part].rows(position, self._within(READ_ROWS)).tolist()
            position += len(rows)
            for item in self._datasets[part].read(rows):
                yield dataclasses.replace(item, part=part) if part and isinstance(item, Prompt) else item

    def _told_from(self, part: int, position: int) -> Iterator[DrawnPrompt | LeftOut]:
        """Yield the same by the shares that all ``readers`` read, whose next ones the thread reads already;
        collective."""
        dataset, count = self._datasets[part], self._readers.rows_at_once(READ_ROWS)

        def begin(position: int) -> tuple[list[int], Future[list[int]]]:
            rows = self._orders[part].rows(position, count).tolist()
            return rows, self._reader.submit(self._readers.own_codes, dataset, rows)

        shares = deque(begin(position + number * count) for number in range(_SHARES_AHEAD))
        while True:
            rows, own = shares.popleft()
            position += count
            shares.append(begin(position + (_SHARES_AHEAD - 1) * count))
            for row, item in zip(rows, drawn_lengths(dataset, rows, self._readers.total(own.result())), strict=True):
                yield item if isinstance(item, LeftOut) else DrawnPrompt(part, row, item, self._whole)

    def _whole(self, part: int, row: int) -> Prompt:
        [prompt] = self.read([(part, row)])
        if prompt is None:
            raise self._datasets[part].rows.location(row).error("prompt", "has changed while the run reads it")
        return prompt


def _order(section: DataSection, dataset: PromptDataset, seed: int, part: int) -> Order:
    """Return the order of the rows of one part."""
    rows, memory, wanted = dataset.rows, section.shuffle_window_mb, section.curriculum
    if wanted is None:
        return WindowOrder(rows.blocks, memory, seed, part, section.shuffle)
    descending = wanted.order == "descending"
    return curriculum_order(rows, wanted.column, descending, wanted.bands, seed, part, section.shuffle, memory)
