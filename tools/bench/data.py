"""Measures the wait of training for its prompts, and their memory, over data larger than a run keeps in memory.

    python tools/bench/data.py [--rows 10000000] [--output docs/results/data.json]

Writes parquet files of made-up questions into a temporary folder, then opens them in a fresh process as a run does and
draws the prompts of many steps, with a pause for each that stands for its training. Amid them a new window of the
shuffle is read, which is where a step would have to wait. Nothing of a model is loaded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.compute
import pyarrow.parquet

from rlhf_megatron.data.opening import open_data
from rlhf_megatron.data.order import WindowOrder
from rlhf_megatron.data.prompts import PromptDataset
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.data.tokenizer_loading import load_tokenizer
from rlhf_megatron.recipe import DataSection

QUESTION = "State the final answer to the following arithmetic problem: "
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SOURCES = ["reasoning_gym/chain_sum", "reasoning_gym/long_sum"]
FILES = 10
ROW_GROUP = 100_000
# What a run is to keep to.
LIMITS = {"start_seconds": 10.0, "resident_mb": 2000.0, "wait_ms": 4.0}


def main() -> int:
    """Return 1 where a limit is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--prompts", type=int, default=256, help="of a step; default: %(default)s")
    parser.add_argument("--pause", type=float, default=0.2, help="seconds of training in a step; default: %(default)s")
    parser.add_argument("--output", type=Path, help="write the results there as JSON")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.steps, options.prompts, options.pause)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        write_files(Path(folder), options.rows)
        write_tokenizer(Path(folder) / "tokenizer")
        size = sum(file.stat().st_size for file in Path(folder).glob("*.parquet"))
        print(f"{options.rows:,} rows, {size / 1e6:,.0f} MB, made in {time.perf_counter() - started:.0f} s", flush=True)
        command = [sys.executable, "-P", __file__, f"--measure={folder}", f"--steps={options.steps}"]
        command += [f"--prompts={options.prompts}", f"--pause={options.pause}"]
        answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    row = {"name": "stream", "rows": options.rows, "files_mb": round(size / 1e6)} | json.loads(answer.splitlines()[-1])
    print(json.dumps(row, indent=1))
    if options.output:
        from reports import write_report  # loads torch, which the process that measures does without

        settings = f"{FILES} files, row groups of {ROW_GROUP} rows, the data section's defaults"
        write_report(options.output, {"settings": settings, "limits": LIMITS, "rows": [row]})
    missed = {
        "start_seconds": row["start_seconds"] > LIMITS["start_seconds"],
        "resident_mb": row["resident_mb_highest"] > LIMITS["resident_mb"],
        "wait_ms": row["wait_ms_p95"] > LIMITS["wait_ms"],
    }
    for name in (name for name, is_missed in missed.items() if is_missed):
        print(f"missed: {name} is above {LIMITS[name]}", file=sys.stderr)
    return int(any(missed.values()))


def measure(folder: Path, steps: int, prompts: int, pause: float) -> dict[str, float]:
    """Open the files and go through so many steps; times, and memory of this process in MB."""
    started = time.perf_counter()
    tokenizer = load_tokenizer(folder / "tokenizer")
    result = {"tokenizer_seconds": time.perf_counter() - started, "resident_mb_before": resident_mb()}
    section = DataSection(train_files=sorted(map(str, folder.glob("*.parquet"))), max_prompt_length=128)

    started = time.perf_counter()
    stream = open_data(section, tokenizer, seed=1).train
    result["open_seconds"] = time.perf_counter() - started
    assert sorted(stream.data_sources()) == SOURCES  # as the reward's check asks for
    drawn = len({prompt.row for prompt in stream.next(prompts)})
    result |= {"start_seconds": time.perf_counter() - started, "resident_mb_start": resident_mb()}

    state = stream.state()
    border = first_border(section, tokenizer, steps * prompts)
    stream.load(state | {"drawn": border, "positions": [border]})
    stream.next(prompts)
    waits = []
    for _ in range(steps):
        time.sleep(pause)
        begun = time.perf_counter()
        drawn += len({prompt.row for prompt in stream.next(prompts)})
        waits.append((time.perf_counter() - begun) * 1000.0)
    result |= {
        "resident_mb_end": resident_mb(),
        "resident_mb_highest": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "steps": steps,
        "prompts_per_step": prompts,
        "pause_seconds": pause,
        "first_row": border,
        "wait_ms_median": statistics.median(waits),
        "wait_ms_p95": sorted(waits)[int(len(waits) * 0.95)],
        "wait_ms_max": max(waits),
    }
    state = json.loads(json.dumps(stream.state()))
    expected = stream.next(prompts)
    started = time.perf_counter()
    stream.load(state)
    assert stream.next(prompts) == expected
    result["resume_seconds"] = time.perf_counter() - started
    return {name: round(value, 3) for name, value in result.items()} | {"distinct_prompts": drawn}


def first_border(section: DataSection, tokenizer: Tokenizer, rows: int) -> int:
    """Return the row to start at so that a new window of the shuffle is read amid so many rows; 0 where all is one
    window."""
    blocks = PromptDataset(section.train_files, tokenizer, section).rows.blocks
    starts = WindowOrder(blocks, section.shuffle_window_mb, seed=1).window_starts(0)
    return max(0, starts[1] - rows // 2) if len(starts) > 2 else 0


def resident_mb() -> float:
    """Return memory of this process that is in use now, in MB of 2**20 bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def write_files(folder: Path, rows: int) -> None:
    """Write FILES parquet files of sums, of about 100 bytes each."""
    draw = numpy.random.default_rng(0)
    edges = [rows * index // FILES for index in range(FILES + 1)]
    for index, (first, last) in enumerate(itertools.pairwise(edges)):
        with pyarrow.parquet.ParquetWriter(folder / f"part-{index:02}.parquet", table(draw, 0, 0).schema) as writer:
            for start in range(first, last, ROW_GROUP):
                writer.write_table(table(draw, start, min(start + ROW_GROUP, last)))


def table(draw: numpy.random.Generator, first: int, last: int) -> pyarrow.Table:
    """Return rows first .. last - 1 with verl's columns."""
    count = last - first
    terms = draw.integers(2, 9, count)
    numbers = draw.integers(10, 9999, (count, 8))
    numbers[numpy.arange(8) >= terms[:, None]] = 0
    joined = [texts(numbers[:, column]) for column in range(8)]
    content = pyarrow.compute.binary_join_element_wise(
        constant(QUESTION, count), pyarrow.compute.binary_join_element_wise(*joined, " + "), constant(" =", count), ""
    )
    message = pyarrow.StructArray.from_arrays([constant("user", count), content], ["role", "content"])
    offsets = pyarrow.array(numpy.arange(count + 1), pyarrow.int32())
    truth = [constant("rule", count), texts(numbers.sum(1))]
    info = [constant("train", count), pyarrow.array(numpy.arange(first, last)), pyarrow.array(terms), content]
    return pyarrow.table(
        {
            "data_source": pyarrow.array(SOURCES).take(pyarrow.array((terms > 4).astype(numpy.int64))),
            "prompt": pyarrow.ListArray.from_arrays(offsets, message),
            "ability": constant("math", count),
            "reward_model": pyarrow.StructArray.from_arrays(truth, ["style", "ground_truth"]),
            "extra_info": pyarrow.StructArray.from_arrays(info, ["split", "index", "difficulty", "question"]),
        }
    )


def constant(text: str, count: int) -> pyarrow.Array:
    """Return the same text in all rows."""
    return pyarrow.array([text]).take(pyarrow.array(numpy.zeros(count, numpy.int64)))


def texts(numbers: Any) -> pyarrow.Array:
    """Return numbers as text."""
    return pyarrow.array(numbers).cast(pyarrow.string())


def write_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE with a chat template, and save it as a Hugging Face folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=control, initial_alphabet=alphabet, show_progress=False
    )
    lines = [f"{QUESTION}{number} + {number * 7} =" for number in range(2000)]
    inner.train_from_iterator(lines, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=control[0], additional_special_tokens=control[1:]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(str(folder))


if __name__ == "__main__":
    sys.exit(main())
