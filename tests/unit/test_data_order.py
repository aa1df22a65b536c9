"""rlhf_megatron.data.order and stream: every row once in an epoch, shares of a mixture, curricula, resume."""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_megatron.data import rows
from rlhf_megatron.data.drawn_prompts import Readers
from rlhf_megatron.data.order import CurriculumOrder, Shares, WindowOrder
from rlhf_megatron.data.prompts import Prompt, PromptDataset
from rlhf_megatron.data.rows import Block
from rlhf_megatron.data.stream import PromptStream
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.data.tokenizer_loading import load_tokenizer
from rlhf_megatron.errors import CheckpointError, DataError
from rlhf_megatron.recipe import DataSection
from tiny_tokenizer import write_bpe_tokenizer

ORDER_OF_SEED_1 = [9, 2, 4, 7, 5, 0, 8, 6, 3, 1]
WINDOWS_OF_SEED_1 = [2, 0, 3, 1, 7, 5, 4, 6, 10, 8, 11, 9, 3, 0, 2, 1, 9, 10, 8, 11, 5, 7, 6, 4]
MEGABYTE = 2**20
TOO_LONG = "What is the answer to the following problem? " * 5


def make_blocks(shapes: list[tuple[int, int]]) -> list[Block]:
    """Return blocks of so many rows and megabytes."""
    firsts = itertools.accumulate((rows for rows, _ in shapes), initial=0)
    return [
        Block(0, range(1), first, count, size * MEGABYTE) for (count, size), first in zip(shapes, firsts, strict=False)
    ]


BLOCKS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=12).map(make_blocks)


@given(BLOCKS, st.integers(1, 40), st.integers(0, 2**63), st.booleans(), st.data())
def test_every_row_comes_once_in_an_epoch_however_it_is_read(
    blocks: list[Block], memory: int, seed: int, shuffle: bool, data: st.DataObject
) -> None:
    order = WindowOrder(blocks, memory, seed, shuffle=shuffle)
    size = order.size
    whole = order.rows(0, 3 * size)
    for epoch in range(3):
        assert sorted(whole[epoch * size : (epoch + 1) * size].tolist()) == list(range(size))
    first = data.draw(st.integers(0, 2 * size))
    count = data.draw(st.integers(1, size))
    again = WindowOrder(blocks, memory, seed, shuffle=shuffle)
    assert again.rows(first, count).tolist() == whole[first : first + count].tolist()


@given(BLOCKS, st.integers(9, 40), st.integers(0, 99))
def test_a_window_needs_no_more_than_its_memory(blocks: list[Block], memory: int, seed: int) -> None:
    """The blocks of an epoch, in the order in which they are first needed, come in whole windows."""
    epoch = WindowOrder(blocks, memory, seed).rows(0, sum(block.rows for block in blocks)).tolist()
    owner = {row: index for index, block in enumerate(blocks) for row in range(block.first, block.first + block.rows)}
    last_use = {owner[row]: position for position, row in enumerate(epoch)}
    needed: set[int] = set()
    for position, row in enumerate(epoch):
        needed = {block for block in needed | {owner[row]} if last_use[block] >= position}
        assert sum(blocks[block].size for block in needed) <= memory * MEGABYTE


def test_the_order_never_changes_between_versions() -> None:
    assert WindowOrder(make_blocks([(10, 1)]), 8, seed=1).rows(0, 10).tolist() == ORDER_OF_SEED_1
    assert WindowOrder(make_blocks([(4, 1), (4, 1), (2, 1)]), 8, seed=1).rows(0, 10).tolist() == ORDER_OF_SEED_1
    windows = WindowOrder(make_blocks([(4, 6), (4, 6), (4, 6)]), 8, seed=1)
    assert windows.rows(0, 24).tolist() == WINDOWS_OF_SEED_1


@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=60),
    st.one_of(st.none(), st.integers(1, 70)),
    st.booleans(),
    st.integers(0, 99),
)
def test_a_curriculum_goes_through_the_numbers_in_their_order(
    values: list[int], bands: int | None, shuffle: bool, seed: int
) -> None:
    numbers = numpy.array(values, numpy.float64)
    order = CurriculumOrder(numbers, seed, bands=bands, shuffle=shuffle)
    size = len(values)
    for epoch in range(2):
        drawn = order.rows(epoch * size, size).tolist()
        assert sorted(drawn) == list(range(size))
        in_order = sorted(values)
        if bands is None:
            assert [values[row] for row in drawn] == in_order
            continue
        edges = [-(-band * size // bands) for band in range(bands + 1)]
        for first, last in itertools.pairwise(edges):
            assert sorted(values[row] for row in drawn[first:last]) == in_order[first:last]


def test_rows_of_the_same_number_are_shuffled_in_each_epoch() -> None:
    numbers = numpy.repeat([1.0, 2.0], 20)
    drawn = CurriculumOrder(numbers, seed=1).rows(0, 80).tolist()
    assert drawn[:20] != sorted(drawn[:20]) and drawn[:20] != drawn[40:60]
    kept = CurriculumOrder(numbers, seed=1, shuffle=False).rows(0, 80).tolist()
    assert kept == [*range(40), *range(40)]


@settings(max_examples=60)
@given(
    st.lists(st.floats(0.01, 1.0), min_size=1, max_size=5),
    st.integers(0, 99),
    st.integers(0, 10**9),
    st.integers(1, 4000),
    st.integers(1, 8),
)
def test_every_stretch_of_a_mixture_has_its_shares(
    weights: list[float], seed: int, first: int, count: int, stride: int
) -> None:
    shares = Shares(weights, seed)
    drawn = [shares.part(first + stride * n) for n in range(count)]
    # The discrepancy of such sequences grows as the logarithm; a replica, which takes every stride-th, has them too.
    bound = stride * (2.0 + math.log(count))
    for part, weight in enumerate(weights):
        assert abs(drawn.count(part) - count * weight / sum(weights)) <= bound


# ---- the stream


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_bpe_tokenizer(tmp_path_factory.mktemp("bpe")))


def write(path: Path, count: int, first: int = 0, long: tuple[int, ...] = ()) -> str:
    """Return a file of ``count`` rows whose answers count from ``first``, of which some are too long; four row
    groups."""
    table = [
        {
            "data_source": path.stem,
            "prompt": [{"role": "user", "content": TOO_LONG if number in long else f"What is {number} + 1?"}],
            "reward_model": {"style": "rule", "ground_truth": str(first + number)},
            "extra_info": {"difficulty": (number * 7) % 5},
        }
        for number in range(count)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), path, row_group_size=-(-count // 4))
    return str(path)


def open_stream(
    tokenizer: Tokenizer, section: DataSection, seed: int = 5, readers: Readers | None = None
) -> PromptStream:
    datasets = [PromptDataset(part.files, tokenizer, section) for part in section.parts]
    return PromptStream(datasets, section, seed, readers)


def numbers(prompts: list[Prompt]) -> list[int]:
    return [int(prompt.ground_truth) for prompt in prompts]


@pytest.fixture(params=["plain", "windows", "file order", "curriculum", "mixture", "held out"])
def reopen(
    request: pytest.FixtureRequest, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., PromptStream]:
    """Open the same stream of two files, of which 3 of 40 rows are too long, again and again."""
    monkeypatch.setattr("rlhf_megatron.data.stream.READ_ROWS", 8)
    monkeypatch.setattr("rlhf_megatron.data.stream._PROMPTS_AHEAD", 16)
    files = [write(tmp_path / "a.parquet", 25, long=(3, 20)), write(tmp_path / "b.parquet", 15, 25, long=(2,))]
    values: dict[str, Any] = {"train_files": files, "max_prompt_length": 40}
    if request.param == "windows":  # of one block each: every row group is more than a part of this memory
        monkeypatch.setattr(rows, "BLOCK_BYTES", 1)
        monkeypatch.setattr(
            "rlhf_megatron.data.stream.WindowOrder",
            lambda blocks, _, seed, part, shuffle: WindowOrder(blocks, 0, seed, part, shuffle),
        )
    values |= {
        "plain": {},
        "windows": {},
        "file order": {"shuffle": False},
        "curriculum": {"curriculum": {"column": "extra_info.difficulty", "bands": 3}},
        "mixture": {
            "train_files": [],
            "mixture": [{"name": "a", "files": files[:1], "weight": 3}, {"name": "b", "files": files[1:], "weight": 1}],
        },
        "held out": {"validation_fraction": 0.3},
    }[request.param]
    section = DataSection.model_validate(values)
    return lambda readers=None: open_stream(tokenizer, section, readers=readers)


def test_resuming_anywhere_is_the_same_as_never_stopping(reopen: Callable[[], PromptStream]) -> None:
    whole = reopen().next(130)
    for position in range(0, 100, 7):
        stream = reopen()
        for count in (1, position % 5 + 1, 4):  # uneven, as dynamic sampling draws
            if stream.state()["drawn"] + count <= position:
                stream.next(count)
        if position > stream.state()["drawn"]:
            stream.next(position - stream.state()["drawn"])
        state = json.loads(json.dumps(stream.state()))  # as a checkpoint would keep it
        resumed = reopen()
        resumed.next(3)
        resumed.load(state)
        assert resumed.next(2) + resumed.next(8) == whole[position : position + 10]
        stream.next(10)
        assert resumed.state() == stream.state()
        assert resumed.metrics() == stream.metrics()
    some = [whole[place] for place in (40, 3, 3, 77, 0)]
    assert resumed.read([(prompt.part, prompt.row) for prompt in some]) == some, "and drawn ones can be read again"
    assert resumed.state() == stream.state()


class Together:
    """Threads in the place of ranks that draw together."""

    def __init__(self, count: int) -> None:
        self.count, self._barrier, self._given = count, threading.Barrier(count, timeout=60), [list[float]()] * count

    def readers(self, place: int) -> Readers:
        def total(values: Sequence[float]) -> list[float]:
            self._given[place] = list(values)
            self._barrier.wait()
            sums = [sum(column) for column in zip(*self._given, strict=True)]
            self._barrier.wait()
            return sums

        return Readers(place, self.count, total)

    def of_each(self, function: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(self.count) as threads:
            return list(threads.map(function, range(self.count)))


def test_ranks_that_read_shares_draw_what_one_rank_draws(reopen: Callable[..., PromptStream]) -> None:
    together, alone = Together(3), reopen()
    streams = [reopen(together.readers(place)) for place in range(3)]
    for count in (5, 1, 30):
        expected = alone.next(count)
        drawn = together.of_each(lambda place, count=count: streams[place].draw(count))  # type: ignore[misc]
        for of_rank in drawn:
            places = [(prompt.part, prompt.row, prompt.length) for prompt in of_rank]
            assert places == [(prompt.part, prompt.row, prompt.length) for prompt in expected]
        assert [prompt.whole() for prompt in drawn[1]] == expected
        assert [stream.state() for stream in streams] == [alone.state()] * 3
    resumed = [reopen(together.readers(place)) for place in range(3)]
    for stream in resumed:
        stream.load(json.loads(json.dumps(alone.state())))
    assert together.of_each(lambda place: resumed[place].next(7)) == [alone.next(7)] * 3


def test_a_bad_row_is_told_by_every_rank_that_reads_a_share(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", 12)
    table = pyarrow.parquet.read_table(path).to_pylist()
    table[7]["prompt"] = []
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), path)
    together, section = Together(2), DataSection(train_files=[path], max_prompt_length=40)

    def told(place: int) -> str:
        with pytest.raises(DataError) as raised:
            open_stream(tokenizer, section, readers=together.readers(place)).draw(12)
        return str(raised.value)

    first, second = together.of_each(told)
    assert first == second and "row 7, column prompt: empty" in first


def test_an_epoch_has_every_usable_row_once(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", 25, long=(3, 20))
    section = DataSection(train_files=[file], max_prompt_length=40)
    stream = open_stream(tokenizer, section)
    epochs = [numbers(stream.next(23)) for _ in range(3)]
    usable = [number for number in range(25) if number not in (3, 20)]
    assert [sorted(epoch) for epoch in epochs] == [usable] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    assert numbers(open_stream(tokenizer, section, seed=6).next(23)) != epochs[0]
    stream.next(1)
    assert stream.metrics()["data/rows_left_out"] == 6.0
    assert 3.0 < stream.metrics()["data/epoch"] < 3.2
    waits = [stream.take_wait()["perf/data_loading_time_ms"] for _ in range(2)]
    assert waits[0] > 0.0 == waits[1]
    with pytest.raises(ValueError, match="cannot draw 0 prompts"):
        stream.next(0)


def test_a_single_usable_row_is_drawn_wherever_its_epochs_have_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", 8, long=tuple(range(1, 8)))
    stream = open_stream(tokenizer, DataSection(train_files=[file], max_prompt_length=40))
    assert numbers(stream.next(60)) == [0] * 60
    none = write(tmp_path / "b.parquet", 8, long=tuple(range(8)))
    assert stream.read([(0, 3), (0, 0)])[0] is None
    with pytest.raises(DataError, match="all 8 rows are too long"):
        open_stream(tokenizer, DataSection(train_files=[none], max_prompt_length=40)).next(1)


def test_parts_of_a_mixture_go_through_epochs_of_their_own(tokenizer: Tokenizer, tmp_path: Path) -> None:
    files = [write(tmp_path / "large.parquet", 60), write(tmp_path / "small.parquet", 5, 100)]
    mixture = [
        {"name": name, "files": [file], "weight": 1} for name, file in zip(("large", "small"), files, strict=True)
    ]
    section = DataSection.model_validate({"mixture": mixture, "max_prompt_length": 40})
    stream = open_stream(tokenizer, section)
    drawn = numbers(stream.next(100))
    small = [number for number in drawn if number >= 100]
    assert 48 <= len(small) <= 52
    for first in range(0, 45, 5):
        assert sorted(small[first : first + 5]) == list(range(100, 105))
    large = [number for number in drawn if number < 100]
    assert len(set(large)) == len(large)
    assert stream.metrics()["data/epoch/small"] == len(small) / 5
    assert stream.metrics()["data/epoch/large"] == len(large) / 60
    assert stream.data_sources() == ["large", "small"]


def test_a_curriculum_orders_what_is_drawn(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", 20)
    for order, expected in (("ascending", [0, 1, 2, 3, 4]), ("descending", [4, 3, 2, 1, 0])):
        wanted = {"column": "extra_info.difficulty", "order": order}
        section = DataSection.model_validate({"train_files": [file], "max_prompt_length": 40, "curriculum": wanted})
        drawn = open_stream(tokenizer, section).next(40)
        assert [prompt.extra_info["difficulty"] for prompt in drawn] == [
            level for level in expected for _ in "1234"
        ] * 2


def test_a_curriculum_over_more_than_the_memory_needs_sorted_files(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_megatron.data.order._STRETCH", 100)
    count = 8000
    text = numpy.random.default_rng(1).integers(33, 126, (count, 400), numpy.uint8)
    prompts = [[{"role": "user", "content": bytes(line).decode()}] for line in text]
    for name, levels in (("sorted", range(count)), ("mixed", [(n * 7919) % count for n in range(count)])):
        columns = {"prompt": prompts, "level": list(levels), "data_source": ["x"] * count}
        columns["reward_model"] = [{"ground_truth": "1"}] * count
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / f"{name}.parquet", row_group_size=500)

    def opened(name: str) -> PromptStream:
        values = {"train_files": [str(tmp_path / f"{name}.parquet")], "max_prompt_length": 900, "shuffle_window_mb": 1}
        return open_stream(tokenizer, DataSection.model_validate(values | {"curriculum": {"column": "level"}}))

    assert [prompt.row for prompt in opened("sorted").next(600)] == list(range(600))
    with pytest.raises(
        DataError, match=r"by level lie in 4 MB of row groups, over data\.shuffle_window_mb=1; raise it"
    ):
        opened("mixed")


@pytest.mark.parametrize(
    "damage",
    [
        {"drawn": True}, {"drawn": -1}, {"drawn": 2**60}, {"drawn": 7}, {"left_out": "0"}, {"left_out": 2**53},
        {"positions": []}, {"positions": [0, 0]}, {"positions": 5}, {"positions": [None]}, {"positions": [1.5]},
    ],
)  # fmt: skip
def test_a_position_that_is_none_is_refused(tokenizer: Tokenizer, tmp_path: Path, damage: dict[str, Any]) -> None:
    values = {"train_files": [write(tmp_path / "a.parquet", 10)], "max_prompt_length": 40}
    stream = open_stream(tokenizer, DataSection.model_validate(values))
    stream.next(3)
    state = stream.state()
    with pytest.raises(CheckpointError, match="the saved position "):
        stream.load(state | damage)
    assert stream.state() == state


def test_what_a_state_does_not_belong_to_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    values: dict[str, Any] = {"train_files": [write(tmp_path / "a.parquet", 10)], "max_prompt_length": 40}
    state = open_stream(tokenizer, DataSection.model_validate(values)).state()
    for changes, seed, told in (
        ({}, 6, "other seed: 5 instead of 6;"),
        ({"shuffle": False}, 5, "other data.shuffle: True instead of False;"),
        ({"validation_fraction": 0.2}, 5, "other data.validation_fraction: 0.0 instead of 0.2;"),
        ({"curriculum": {"column": "extra_info.difficulty"}}, 5, "other data.curriculum: None instead of"),
        ({"train_files": [write(tmp_path / "b.parquet", 10, first=1)]}, 5, "other data files; restore"),
    ):
        stream = open_stream(tokenizer, DataSection.model_validate(values | changes), seed)
        with pytest.raises(DataError) as caught:
            stream.load(state)
        assert str(caught.value).startswith(f"the checkpoint was saved with {told}")
        assert "\n" not in str(caught.value)
    (tmp_path / "elsewhere").mkdir()
    moved = write(tmp_path / "elsewhere" / "a.parquet", 10)
    stream = open_stream(
        tokenizer, DataSection.model_validate(values | {"train_files": [moved], "max_prompt_length": 39})
    )
    stream.load(state)  # the same rows in another place, and another limit: the order is the same


def test_a_bad_row_is_told_when_its_turn_comes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", 1000)
    table = pyarrow.parquet.read_table(file).to_pylist()
    table[700]["prompt"] = []
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), file)
    stream = open_stream(tokenizer, DataSection(train_files=[file], max_prompt_length=40, shuffle=False))
    assert numbers(stream.next(500)) == list(range(500))
    for _ in range(2):
        with pytest.raises(DataError, match=r"a\.parquet, row 700, column prompt: empty"):
            stream.next(300)
    all_long = write(tmp_path / "long.parquet", 4, long=(0, 1, 2, 3))
    with pytest.raises(DataError, match=r"long\.parquet: all 4 rows are too long; raise data\.max_prompt_length"):
        open_stream(tokenizer, DataSection(train_files=[all_long], max_prompt_length=40)).next(1)
