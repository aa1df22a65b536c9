"""Prompts for training and evaluation: tokenized once when a dataset opens, then drawn in a deterministic order.

Here: `Prompt`, `PromptDataset` (over-long filter, tokens) and `PromptStream` (order, epochs, resume). Not here: parquet
files and columns (rows.py), tokenizers (tokenizer.py), packed batches (batch.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy
from numpy.typing import NDArray

from rlhf_megatron.data.errors import DataError
from rlhf_megatron.data.rows import (
    ParquetRows,
    RowPlace,
    parse_data_source,
    parse_extra_info,
    parse_ground_truth,
    parse_messages,
    parse_response,
)
from rlhf_megatron.data.tokenizer import Tokenizer

__all__ = ["DataError", "Prompt", "PromptDataset", "PromptStream"]

DEFAULT_RESPONSE_COLUMN = "reward_model.ground_truth"


class DataSettings(Protocol):
    """What is read of the recipe's data section."""

    @property
    def max_prompt_length(self) -> int:
        """Longest prompt in tokens, chat template included."""

    @property
    def overlong_prompts(self) -> str:
        """ "drop" or "stop"."""

    @property
    def response_column(self) -> str | None:
        """Column of the target text of supervised training; None: reward_model.ground_truth."""


@dataclass(frozen=True)
class Prompt:
    """One prompt, ready for generation (or one pair of prompt and response, for supervised training).

    Attributes:
        row: index in its PromptDataset.
        data_source: names the reward function.
        token_ids: the conversation in the chat template, up to and with the header of the assistant's turn.
        ground_truth: the right answer as text; "" in supervised data without one.
        extra_info: whatever the row carries for its reward function.
        response_token_ids: the target text and eos, in supervised training; else None.
    """

    row: int
    data_source: str
    token_ids: tuple[int, ...]
    ground_truth: str
    extra_info: dict[str, Any]
    response_token_ids: tuple[int, ...] | None = None


@dataclass
class _TokenTable:
    """Token lists of many rows in one flat int32 array: a list per row would cost ten times the memory."""

    chunks: list[NDArray[numpy.int32]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    flat: NDArray[numpy.int32] = field(default_factory=lambda: numpy.zeros(0, numpy.int32))
    offsets: NDArray[numpy.int64] = field(default_factory=lambda: numpy.zeros(1, numpy.int64))

    def add(self, token_ids: Sequence[int]) -> None:
        self.chunks.append(numpy.asarray(token_ids, numpy.int32))
        self.lengths.append(len(token_ids))

    def freeze(self) -> None:
        self.flat = numpy.concatenate(self.chunks) if self.chunks else self.flat
        self.offsets = numpy.concatenate([[0], numpy.cumsum(self.lengths, dtype=numpy.int64)])
        self.chunks = []

    def arrays(self) -> Iterator[NDArray[numpy.int32]]:
        """The tokens of each row in turn, without a copy."""
        for start, stop in itertools.pairwise(self.offsets.tolist()):
            yield self.flat[start:stop]

    def __getitem__(self, index: int) -> tuple[int, ...]:
        return tuple(self.flat[self.offsets[index] : self.offsets[index + 1]].tolist())


class PromptDataset:
    """The usable rows of some parquet files, as `Prompt`.

    Opening reads every row once: it checks the columns, tokenizes, and drops over-long rows, so that bad data stops a
    run before a GPU-hour is spent and no step waits for a tokenizer. Only tokens stay in memory; answers and extra_info
    are read from the memory-mapped files when a row is asked for.

    Attributes:
        dropped: number of rows left out because they are too long.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        tokenizer: Tokenizer,
        data_section: DataSettings,
        *,
        with_response: bool = False,
        max_response_length: int | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Open, check and tokenize.

        Args:
            files: parquet files with verl's columns (see rows.py).
            tokenizer: from `load_tokenizer`.
            data_section: the recipe's data section.
            with_response: tokenize the response column too (supervised training). data_source and reward_model may then
                be missing from the files.
            max_response_length: longest response in tokens, eos included; longer rows count as over-long.
            on_progress: called with (rows done, rows in all) after each chunk.

        Raises:
            DataError: a file, column or row is bad, a row is over-long with overlong_prompts "stop", or none is left.
        """
        self._tokenizer = tokenizer
        self._settings = data_section
        self._response_column = (data_section.response_column or DEFAULT_RESPONSE_COLUMN) if with_response else None
        self._max_response_length = max_response_length
        self._rows = ParquetRows(files, *self._columns(files))
        self.dropped = 0
        self._kept: list[int] = []
        self._prompt_tokens = _TokenTable()
        self._response_tokens = _TokenTable()
        for first, rows in self._rows.scan(self._scanned_columns()):
            self._take(first, rows)
            if on_progress is not None:
                on_progress(first + len(rows), len(self._rows))
        if not self._kept:
            raise DataError(
                f"{', '.join(str(file) for file in files)}: all {self.dropped} rows are too long; raise "
                f"data.max_prompt_length (now {data_section.max_prompt_length} tokens)"
            )
        self._prompt_tokens.freeze()
        self._response_tokens.freeze()

    def __len__(self) -> int:
        """Return the number of usable rows."""
        return len(self._kept)

    def __getitem__(self, index: int) -> Prompt:
        """Return one prompt.

        Raises:
            IndexError: the index is not in 0 .. len - 1.
        """
        if not 0 <= index < len(self._kept):
            raise IndexError(f"prompt {index} of {len(self._kept)}")
        row = self._kept[index]
        place = self._rows.place(row)
        values = self._rows.read(row)
        supervised = self._response_column is not None
        return Prompt(
            row=index,
            data_source=self._data_source(values, place, supervised),
            token_ids=self._prompt_tokens[index],
            ground_truth=self._ground_truth(values, place, supervised),
            extra_info=parse_extra_info(values.get("extra_info"), place),
            response_token_ids=self._response_tokens[index] if supervised else None,
        )

    def rows(self, indices: Sequence[int]) -> list[Prompt]:
        """Return several prompts in the order asked for; each row group is decoded once."""
        found = {index: self[index] for index in sorted(set(indices))}
        return [found[index] for index in indices]

    def place(self, index: int) -> RowPlace:
        """Return the file of a prompt and its row there, for messages."""
        return self._rows.place(self._kept[index])

    def lengths(self) -> NDArray[numpy.int64]:
        """Return the prompts' lengths in tokens, [len]."""
        return numpy.diff(self._prompt_tokens.offsets)

    def prompts_shared_with(self, other: PromptDataset) -> int:
        """Return how many of these prompts, compared by their tokens, the other dataset has too."""
        own = [tokens.tobytes() for tokens in self._prompt_tokens.arrays()]
        wanted = set(own)
        shared = {key for tokens in other._prompt_tokens.arrays() if (key := tokens.tobytes()) in wanted}
        return sum(key in shared for key in own)

    def data_sources(self) -> list[str]:
        """Return the distinct data sources of all rows in order of appearance; reads that column of every file."""
        seen: dict[str, None] = {}
        for first, rows in self._rows.scan(["data_source"]):
            for offset, row in enumerate(rows):
                if row.get("data_source") is not None:
                    seen.setdefault(parse_data_source(row["data_source"], self._rows.place(first + offset)))
        return list(seen)

    def _columns(self, files: Sequence[str | Path]) -> tuple[list[str], list[str]]:
        """Return the required and the optional top-level columns."""
        described = ["data_source", "reward_model"]
        if self._response_column is None:
            return ["prompt", *described], ["extra_info"]
        # A dotted path names a field of a struct, as in extra_info.answer.
        return ["prompt", self._response_column.split(".")[0]], [*described, "extra_info"]

    def _scanned_columns(self) -> list[str]:
        columns = ["prompt", "data_source", "reward_model"]
        if self._response_column is not None:
            columns.append(self._response_column.split(".")[0])
        return list(dict.fromkeys(columns))

    def _take(self, first: int, rows: list[dict[str, Any]]) -> None:
        """Check and tokenize consecutive rows, and keep those that are short enough."""
        places = [self._rows.place(first + offset) for offset in range(len(rows))]
        texts, responses = [], []
        for row, place in zip(rows, places, strict=True):
            messages = parse_messages(row.get("prompt"), place)
            supervised = self._response_column is not None
            self._data_source(row, place, supervised)
            self._ground_truth(row, place, supervised)
            try:
                texts.append(self._tokenizer.render_chat(messages))
            except DataError as error:
                raise place.error("prompt", str(error)) from error
            if self._response_column is not None:
                responses.append(parse_response(row, self._response_column, place))
        prompt_ids = self._tokenizer.encode_many(texts)
        response_ids = [
            [*token_ids, self._tokenizer.eos_token_id] for token_ids in self._tokenizer.encode_many(responses)
        ]
        for offset, place in enumerate(places):
            response = response_ids[offset] if response_ids else None
            if self._fits(prompt_ids[offset], response, place):
                self._kept.append(first + offset)
                self._prompt_tokens.add(prompt_ids[offset])
                if response is not None:
                    self._response_tokens.add(response)

    def _fits(self, prompt: list[int], response: list[int] | None, place: RowPlace) -> bool:
        """Return whether a row is short enough; count it, or stop, if it is not."""
        limits = [("prompt", len(prompt), "data.max_prompt_length", self._settings.max_prompt_length)]
        if response is not None and self._max_response_length is not None:
            column = self._response_column or DEFAULT_RESPONSE_COLUMN
            limits.append((column, len(response), "the response limit", self._max_response_length))
        for column, length, name, limit in limits:
            if length > limit:
                if self._settings.overlong_prompts == "stop":
                    raise place.error(
                        column, f"{length} tokens, over {name} = {limit}; raise it, or set data.overlong_prompts: drop"
                    )
                self.dropped += 1
                return False
        return True

    @staticmethod
    def _data_source(row: dict[str, Any], place: RowPlace, supervised: bool) -> str:
        value = row.get("data_source")
        return "" if supervised and value is None else parse_data_source(value, place)

    @staticmethod
    def _ground_truth(row: dict[str, Any], place: RowPlace, supervised: bool) -> str:
        value = row.get("reward_model")
        missing = value is None or (isinstance(value, dict) and value.get("ground_truth") is None)
        return "" if supervised and missing else parse_ground_truth(value, place)


class PromptStream:
    """Prompts without end: epoch after epoch, each in its own order, the same on every rank and after every resume.

    The next batch is read from the files by a background thread while the current one is being trained on.
    """

    def __init__(self, dataset: PromptDataset, seed: int, shuffle: bool = True) -> None:
        """Start at the first prompt of epoch 0.

        Args:
            dataset: where prompts come from.
            seed: of the order; with the epoch it gives the permutation.
            shuffle: False keeps the files' order in every epoch.
        """
        self._dataset = dataset
        self._seed = seed
        self._shuffle = shuffle
        self._position = 0  # prompts handed out since the start; epoch = position // len(dataset)
        self._order = lru_cache(maxsize=2)(self._permutation)
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompt-reader")
        self._ahead: tuple[list[int], Future[list[Prompt]]] | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the next prompt, from 0."""
        return self._position // len(self._dataset)

    def next(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts; the last ones of an epoch are followed by the first ones of the next.

        Raises:
            ValueError: count is not positive.
        """
        if count <= 0:
            raise ValueError(f"cannot draw {count} prompts; ask for one or more")
        wanted = self._indices(self._position, count)
        if self._ahead is not None and self._ahead[0] == wanted:
            prompts = self._ahead[1].result()
        else:
            prompts = self._dataset.rows(wanted)
        self._position += count
        following = self._indices(self._position, count)
        self._ahead = (following, self._reader.submit(self._dataset.rows, following))
        return prompts

    def state(self) -> dict[str, Any]:
        """Return what `load` needs to go on behind the last prompt that was handed out (plain JSON values)."""
        return {
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "rows": len(self._dataset),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            DataError: the state belongs to another order: other data (or another length limit), seed or shuffle.
        """
        for name, saved, now in (
            ("usable rows", state["rows"], len(self._dataset)),
            ("seed", state["seed"], self._seed),
            ("data.shuffle", state["shuffle"], self._shuffle),
        ):
            if saved != now:
                raise DataError(
                    f"resume: the checkpoint was saved with {name} {saved} but this run has {now}; "
                    "restore the same data, limits and seed, or start a new run"
                )
        self._position = int(state["position"])
        self._ahead = None

    def _indices(self, start: int, count: int) -> list[int]:
        """Return the dataset indices of `count` prompts from an absolute position on."""
        size = len(self._dataset)
        return [int(self._order(position // size)[position % size]) for position in range(start, start + count)]

    def _permutation(self, epoch: int) -> NDArray[numpy.int64]:
        """Return the order of one epoch, [len].

        Sorted raw bits of PCG64 and not Generator.permutation: NumPy promises the former never to change between
        versions (NEP 19), and a resume must not depend on the version.
        """
        size = len(self._dataset)
        if not self._shuffle:
            return numpy.arange(size, dtype=numpy.int64)
        bits = numpy.random.PCG64(numpy.random.SeedSequence([self._seed, epoch])).random_raw(size)
        return numpy.argsort(bits, kind="stable").astype(numpy.int64)
