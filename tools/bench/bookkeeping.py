"""Times what a rank of many does with the rows of a step beside the engines, by one thread of a CPU.

    python tools/bench/bookkeeping.py [--ranks 4 64 1024 8192] [--replica-ranks 1 2 4] [--repeats 3] \\
        [--output docs/results/scaling.json]

Each rank answers 8 prompts with 8 responses each, has so sampled 64 rows of 16,384 tokens, and computes as many. One
rank is run; what others tell it and send it is made before, so what the network takes is not in it: the bytes that it
would carry are given instead. Its seconds are those of its processor, which others on the machine do not lengthen.

With --replica-ranks four processes exchange a million tokens over gloo that replicas of so many ranks have sampled.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import torch
import torch.distributed as dist
import torch.multiprocessing
from data import write_tokenizer
from reports import spread, write_report
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rlhf_megatron.algorithms.advantage import outcomes, row_advantages
from rlhf_megatron.algorithms.aggregation import row_weights
from rlhf_megatron.algorithms.objective import objective_fields, rows_to_learn
from rlhf_megatron.data.drawn_prompts import Readers
from rlhf_megatron.data.packing import assign_rows, plan_micro_batches
from rlhf_megatron.data.prompts import READ_ROWS, Prompt, PromptDataset
from rlhf_megatron.data.rollout_batch import RolloutBatch, batch_from_rows
from rlhf_megatron.data.row_numbers import RowNumbers, SpreadRows, from_table
from rlhf_megatron.data.stream import PromptStream
from rlhf_megatron.data.tokenizer_loading import load_tokenizer
from rlhf_megatron.generation.generated_groups import GroupPacker
from rlhf_megatron.generation.prompt_groups import Group, requests_for
from rlhf_megatron.generation.replica import Replica
from rlhf_megatron.recipe import DataSection
from rlhf_megatron.recipe.algorithm import AlgorithmSection
from rlhf_megatron.roles import shares
from rlhf_megatron.roles.shares import Home, Share
from rlhf_megatron.rollout.engine import Completion, request_seed
from rlhf_megatron.rollout.work_queue import WorkQueues
from rlhf_megatron.topology import row_exchange

ROWS, TOKENS, PROMPT, RESPONSES = 64, 16_384, 1_024, 8
BUDGET, ATTENTION = 32_768, 1e-5
TEXTS = 64  # different prompts
PROCESSES, SHORT = 4, 4_096  # of --replica-ranks: so many rows of SHORT tokens on each


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 64, 1024, 8192])
    parser.add_argument("--replica-ranks", type=int, nargs="+", default=[1, 2, 4], choices=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=3, help="the first is left out (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="write the results there as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    replicas = among_processes(options.replica_ranks, 3 * options.repeats)
    rows = [measure(ranks, options.repeats) for ranks in options.ranks]
    show(rows)
    show_replicas(replicas)
    if options.output:
        settings = {"rows_of_a_rank": ROWS, "tokens_of_a_row": TOKENS, "tokens_per_gpu": BUDGET}
        write_report(options.output, {"settings": settings, "rows": rows, "replicas": replicas})
    return 0


class Others:
    """Messages of other ranks, as the network would bring it: made the first time, and then there."""

    def __init__(self, numbers: RowNumbers) -> None:
        self._numbers, self._messages = numbers, dict[int, Tensor]()
        self.sent = self.received = self.partners = 0
        self.seconds = 0.0

    def transfer(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        """Stand in for ``row_exchange._transfer``."""
        began = time.thread_time()
        self.sent, self.received = (sum(len(each) for each in side.values()) for side in (sent, received))
        self.partners = len({*sent, *received})
        for peer, message in received.items():
            message.copy_(self._messages.get(peer, message))
        self.seconds += time.thread_time() - began

    def tell(self, rows_from: Mapping[int, list[int]]) -> None:
        """Pack the messages that are to come from each rank."""
        for peer, rows in rows_from.items():
            batch = rows_of(self._numbers.select(torch.tensor(rows)))
            label = torch.stack([batch.row_id, batch.lengths], dim=1)
            parts = (label, batch.tokens.int(), batch.rollout_logprobs, batch.response_mask)
            self._messages[peer] = torch.cat([row_exchange._bytes(part) for part in parts])


class Prompts:
    """The prompts that so many ranks draw together, and what those other than this one tell of their shares."""

    def __init__(self, ranks: int, folder: Path) -> None:
        rows = ranks * ROWS // RESPONSES
        texts = [f"{'What is 12 + 34? ' * (number + 1)}" for number in range(TEXTS)]
        table = {
            "data_source": ["arithmetic"] * rows,
            "prompt": [[{"role": "user", "content": texts[row % TEXTS]}] for row in range(rows)],
            "reward_model": [{"ground_truth": "46"}] * rows,
        }
        pyarrow.parquet.write_table(pyarrow.table(table), folder / "rows.parquet")
        write_tokenizer(folder / "tokenizer")
        section = DataSection(train_files=[str(folder / "rows.parquet")], max_prompt_length=PROMPT)
        dataset = PromptDataset(section.train_files, load_tokenizer(folder / "tokenizer"), section)
        readers = Readers(0, ranks, self._total)
        self._codes = numpy.array(Readers(0, 1).own_codes(dataset, range(min(TEXTS, rows))))
        self._at_once = readers.rows_at_once(READ_ROWS)
        self.ranks, self.seconds, self._calls = ranks, 0.0, 0
        self.stream = PromptStream([dataset], section, seed=1, readers=readers)
        self._rows = self.stream._orders[0]

    def _total(self, own: Sequence[float]) -> list[float]:
        began = time.process_time()
        rows = self._rows.rows(self._calls * self._at_once, self._at_once)
        self._calls += 1
        total: list[float] = self._codes[rows % TEXTS].tolist()
        self.seconds += time.process_time() - began
        return total

    def step(self) -> dict[str, float]:
        """Return seconds in which a step's prompts are drawn, and its requests made that this rank answers."""
        began, self.seconds = time.process_time(), 0.0
        drawn = self.stream.draw(self.ranks * ROWS // RESPONSES)
        groups = [Group(prompt, number=number) for number, prompt in enumerate(drawn)]
        requests = requests_for(groups, RESPONSES, lambda _: TOKENS, lambda row: request_seed(1, 1, row))
        queue = WorkQueues("static", 0, self.ranks).open(len(groups))
        self.stream._reader.submit(int).result()  # the share that is read ahead is this step's too
        of_all = time.process_time() - began - self.seconds
        began = time.process_time()
        claimed, _ = queue.claim(ROWS // RESPONSES)
        assert sum(len(requests.of_group(group)) for group in claimed) == ROWS
        return {"prompts and requests of all": of_all, "requests of own rows": time.process_time() - began}


def numbers_of_all(ranks: int) -> Tensor:
    """Return the table of all ranks' rows: mean length 16,384, in the order in which ranks hold them."""
    count = ranks * ROWS
    generator = torch.Generator().manual_seed(1)
    row_id = torch.arange(count)
    spread = (torch.randn(count, generator=generator) * 0.25).clamp(-0.75, 0.75)
    lengths = (TOKENS * (1 + spread)).long()
    numbers = RowNumbers(
        row_id=row_id,
        group_id=row_id // RESPONSES,
        lengths=lengths,
        response_lengths=lengths - PROMPT,
        completion_lengths=lengths - PROMPT,
        weight_version=torch.ones_like(row_id),
        holder=(row_id // RESPONSES) % ranks,
        truncated=torch.zeros(count, dtype=torch.bool),
        rewards=torch.rand(count, generator=generator).round(),
    )
    return numbers.select(numbers.holder.argsort(stable=True)).table()


def rows_of(numbers: RowNumbers) -> RolloutBatch:
    """Return rows with these numbers."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(150_000, (numbers.tokens,), generator=generator)
    lengths = numbers.lengths
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    mask = torch.arange(numbers.tokens) - ends[:-1].repeat_interleave(lengths) >= PROMPT
    empty = batch_from_rows([], [])
    return shares.with_numbers(
        empty.with_fields(tokens=tokens, cu_seqlens=ends, response_mask=mask, rollout_logprobs=-0.5 * mask), numbers
    )


def measure(ranks: int, repeats: int) -> dict[str, Any]:
    """Return seconds and bytes of rank 0 of so many for one step."""
    table, settings = numbers_of_all(ranks), AlgorithmSection()
    known = from_table(table)
    known = known.select(known.row_id.argsort())
    held, others = rows_of(known.select(known.holder == 0)), Others(known)
    owner = assign_rows(known.lengths, ranks, None, 1, ATTENTION)
    comes = ((owner == 0) & (known.holder != 0)).nonzero().flatten()
    others.tell(row_exchange._by_rank(comes, known.holder[comes], torch.ones_like(comes, dtype=torch.bool)))
    del known
    row_exchange._transfer = others.transfer  # type: ignore[assignment]
    every, peaks = [], []
    folder = tempfile.TemporaryDirectory()
    prompts = Prompts(ranks, Path(folder.name))
    prompts.stream.draw(1)  # what is decoded once
    gc.collect()
    gc.freeze()  # as a run's start does
    for _ in range(repeats + 1):
        others.seconds = 0.0
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak begins here
        before = _resident("VmRSS")
        parts = prompts.step() | step(table, held, ranks, settings)
        peaks.append(_resident("VmHWM") - before)
        parts["tokens of own rows"] -= others.seconds
        every.append(parts)
    folder.cleanup()
    medians = {name: statistics.median(each[name] for each in every[1:]) for name in every[0]}
    return {
        "ranks": ranks,
        "seconds": sum(medians.values()),
        "seconds_of": medians,
        "bytes_of_rows": others.sent + others.received,
        "bytes_of_numbers": 2 * table.nbytes,
        "partners": others.partners,
        "MB": (max(peaks[1:]) + table.nbytes) / 1e6,
        "repeats": repeats,
    }


def step(table: Tensor, held: RolloutBatch, ranks: int, settings: AlgorithmSection) -> dict[str, float]:
    """Return seconds of each part of the bookkeeping of one step."""
    clock, taken = time.thread_time, dict[str, float]()
    began = clock()
    numbers = from_table(table)
    numbers = numbers.select(numbers.row_id.argsort())
    advantages = row_advantages(outcomes(numbers), settings)
    assert advantages is not None
    learned = rows_to_learn(numbers, advantages != 0, settings)
    weights = row_weights(numbers.response_lengths, settings.loss_aggregation)
    taken["numbers of all rows"] = clock() - began
    began = clock()
    parts = [learned.nonzero().flatten(), (~learned).nonzero().flatten()]
    # Whatever is learned is dealt here as one part: the messages are those of all rows.
    owner = assign_rows(numbers.lengths, ranks, [torch.cat(parts).sort().values], 1, ATTENTION)
    taken["plan of the exchange"] = clock() - began
    began = clock()
    home = Home((), tuple(range(ranks)), 0)
    [share] = shares.share_out(SpreadRows(numbers, held, 0), [(home, owner)])
    taken["tokens of own rows"] = clock() - began
    began = clock()
    _learn(share, advantages, weights, settings)
    taken["fields and micro-batches of own rows"] = clock() - began
    return taken


def _learn(share: Share, advantages: Tensor, weights: Tensor, settings: AlgorithmSection) -> None:
    batch = share.batch.with_fields(advantages=share.batch.spread(advantages[share.rows]))
    objective_fields(batch, settings, weights[share.rows])
    plan_micro_batches(batch.lengths.tolist(), BUDGET, attention=ATTENTION)


def among_processes(sizes: list[int], repeats: int) -> list[dict[str, Any]]:
    """Return seconds of the exchange between real processes, for each size of a replica; layouts take turns."""
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder)
        torch.multiprocessing.spawn(_process, (files, sizes, repeats), nprocs=PROCESSES)
        return torch.load(files / "by_size")  # type: ignore[no-any-return]


def _process(rank: int, folder: Path, sizes: list[int], repeats: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), PROCESSES)
    timeout = datetime.timedelta(minutes=5)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES, timeout=timeout)
    batches = [sampled_rows(rank, size) for size in sizes]
    taken: list[list[float]] = [[] for _ in sizes]
    for _ in range(repeats + 1):
        for batch, seconds in zip(batches, taken, strict=True):
            dist.barrier()
            began = time.perf_counter()
            rows = row_exchange.gather_rows(batch)
            home = Home((), tuple(range(PROCESSES)), rank)
            shares.share_out(rows, [(home, assign_rows(rows.numbers.lengths, PROCESSES))])
            dist.barrier()
            seconds.append(time.perf_counter() - began)
    if rank == 0:
        pairs = zip(sizes, taken, strict=True)
        by_size = [{"replica_ranks": size, "seconds": spread(seconds[1:])} for size, seconds in pairs]
        torch.save(by_size, folder / "by_size")
    dist.destroy_process_group()


def sampled_rows(rank: int, size: int) -> RolloutBatch:
    """Return the rows that a rank keeps of those that its replica of so many ranks has sampled."""
    replica = Replica(list(range(PROCESSES)), PROCESSES // size, rank // size, rank % size, size)
    prompt = Prompt(0, "", (1,) * (SHORT // 4), "", {})
    groups = [Group(prompt)] * (PROCESSES * ROWS // RESPONSES)
    response = [2] * (SHORT - SHORT // 4)
    own = [index for index in range(len(groups)) if index % replica.count == replica.index]
    with ThreadPoolExecutor(max_workers=1) as executor:
        packer = GroupPacker(executor, replica, groups)
        for index in own:
            first = index * RESPONSES
            rows = [
                Completion(row, response, [-0.5] * len(response), "stop", [1] * len(response))
                for row in range(first, first + RESPONSES)
            ]
            packer.begin(index, rows)
        return packer.batch(own)


def show_replicas(rows: list[dict[str, Any]]) -> None:
    """Print a table on stdout."""
    table = Table("ranks of a replica", "ms", "least", "most")
    for each in rows:
        milliseconds = [f"{each['seconds'][name] * 1e3:.1f}" for name in ("median", "min", "max")]
        table.add_row(str(each["replica_ranks"]), *milliseconds)
    Console().print(table)


def _resident(name: str) -> int:
    """Return bytes of this process by /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table on stdout."""
    table = Table("ranks", "seconds", *rows[0]["seconds_of"], "MB", "bytes of rows", "of numbers", "partners")
    for each in rows:
        seconds = [f"{value:.3f}" for value in (each["seconds"], *each["seconds_of"].values())]
        sizes = (f"{each['MB']:.0f}", each["bytes_of_rows"], each["bytes_of_numbers"], each["partners"])
        table.add_row(str(each["ranks"]), *seconds, *map(str, sizes))
    Console(width=160).print(table)


if __name__ == "__main__":
    sys.exit(main())
