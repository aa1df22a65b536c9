"""Make parquet files with verl's columns, for data.train_files and data.validation_files.

    python tools/prepare_data.py import --input questions.csv --prompt-field question --answer-field answer \\
        --data-source my_math --output train.parquet
    python tools/prepare_data.py gsm8k --input train.jsonl --output train.parquet
    python tools/prepare_data.py reasoning-gym --task chain_sum --size 2000 --seed 1 --set max_terms=3 \\
        --exclude test.parquet --output train.parquet
    python tools/prepare_data.py episodes --environment textarena/GuessTheNumber-v0 --size 2000 --output train.parquet
    python tools/prepare_data.py played --input train.parquet --environment game.py --moves a b --output moves.parquet
    python tools/prepare_data.py demonstrations --input train.parquet --worked 0.25 --output demonstrations.parquet
    python tools/prepare_data.py pairs --input demonstrations.parquet --column response --output pairs.parquet
    python tools/prepare_data.py distinct --input dapo-math-17k.parquet --output train.parquet

    python tools/prepare_data.py check train.parquet --tokenizer models/NAME --max-prompt-length 512

Here: the command line. Not here: the rows of each source (rlhf_megatron/data/imported_rows.py, demonstrations.py,
pairs.py, rlhf_megatron/rewards/task_rows.py, random_play.py), and what is checked (rewards/data_check.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import pyarrow
import pyarrow.parquet
from rich.console import Console
from rich.progress import track

from rlhf_megatron.data.column_values import parse_messages
from rlhf_megatron.data.demonstrations import demonstration_rows
from rlhf_megatron.data.given_answers import DEFAULT_RESPONSE_COLUMN
from rlhf_megatron.data.imported_rows import ImportRequest, imported_rows
from rlhf_megatron.data.pairs import pair_rows
from rlhf_megatron.data.parquet import UNREADABLE, python_rows
from rlhf_megatron.data.prepared_rows import CONSOLE, ROWS_PER_GROUP, RowRequest, replaced, write_rows
from rlhf_megatron.data.prompts import prompt_key
from rlhf_megatron.data.rows import ParquetRows
from rlhf_megatron.data.tokenizer_loading import load_tokenizer
from rlhf_megatron.errors import DataError
from rlhf_megatron.hub import local_folder
from rlhf_megatron.recipe import RewardSection
from rlhf_megatron.rewards.data_check import check_files, tables
from rlhf_megatron.rewards.random_play import played_rows
from rlhf_megatron.rewards.task_rows import (
    GSM8K_INSTRUCTION,
    EpisodeRequest,
    GSM8KRequest,
    TaskRequest,
    episode_rows,
    gsm8k_rows,
    reasoning_gym_rows,
)
from rlhf_megatron.runtime.command import ArgumentParser, command, path_argument
from rlhf_megatron.untrusted import reason_of, shown

Commands = argparse._SubParsersAction  # which argparse gives no public name
Request = TypeVar("Request", bound=RowRequest)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status (2: bad input, described in one line)."""
    options = build_parser().parse_args(arguments)
    if options.act is not None:
        status: int = options.act(options)
        return status
    rows = options.make_rows(options)
    write_rows(rows, options.output)
    CONSOLE.print(f"{options.output}: {len(rows)} rows", highlight=False, soft_wrap=True)
    return 0


def check(options: argparse.Namespace) -> int:
    """Print what is found out about some files; return 1 if they are not fit for training. Raises UserError."""
    if options.max_prompt_length is not None and options.tokenizer is None:
        raise DataError("--max-prompt-length: needs --tokenizer to count tokens")
    if options.sample < 1:
        raise DataError(f"--sample: {options.sample} rows try no reward; give 1 or more")
    tokenizer = None if options.tokenizer is None else load_tokenizer(local_folder(options.tokenizer, "--tokenizer"))
    reward = RewardSection(function=options.reward_function)
    findings = check_files(
        options.files,
        reward,
        tokenizer,
        options.max_prompt_length,
        options.sample,
        system_prompt=options.system_prompt,
        images=options.images,
    )
    if options.json:
        print(json.dumps(findings.as_json(), ensure_ascii=False))
    else:
        Console().print(*tables(findings))
        if findings.repeated:
            print(f"{findings.repeated} rows have the prompt of another; `prepare_data.py distinct` keeps one of each")
        for line in [*findings.problems, *(f"not fit: {fault}" for fault in findings.faults())] or ["fit for training"]:
            print(line)
    return 1 if findings.faults() else 0


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of the tool."""
    parser = ArgumentParser(description="Make parquet files with verl's columns.")
    parser.set_defaults(act=None)
    commands = parser.add_subparsers(required=True, metavar="SOURCE")
    shared = ArgumentParser(add_help=False)
    shared.add_argument("--output", type=path_argument, required=True, help="parquet file to write")
    shared.add_argument(
        "--exclude",
        type=Path,
        action="append",
        default=[],
        help="parquet file whose questions must not appear in the output; may be given several times",
    )
    shared.add_argument("--system", help="system message put before each question")
    shared.add_argument("--split", default=None, help="written to extra_info.split (default: the output's name)")
    add_gsm8k(commands, shared)
    add_import(commands, shared)
    add_reasoning_gym(commands, shared)
    add_episodes(commands)
    add_played(commands)
    add_demonstrations(commands)
    add_pairs(commands)
    add_check(commands)
    add_distinct(commands)
    return parser


def asked(kind: type[Request], options: argparse.Namespace) -> Request:
    """Return the options of a source by their names."""
    return kind(**{field.name: getattr(options, field.name) for field in fields(kind)})


def add_gsm8k(commands: Commands, shared: argparse.ArgumentParser) -> None:
    """Add the parser of ``gsm8k``."""
    parser = commands.add_parser("gsm8k", parents=[shared], help="GSM8K's jsonl files")
    parser.add_argument("--input", type=Path, required=True, help='jsonl of {"question", "answer": "... #### N"}')
    parser.add_argument("--size", type=int, help="number of rows (default: all)")
    parser.add_argument(
        "--prompt-template", default=f"{{question}} {GSM8K_INSTRUCTION}", help="must contain {question}"
    )
    parser.set_defaults(make_rows=lambda options: gsm8k_rows(asked(GSM8KRequest, options)))


def add_import(commands: Commands, shared: argparse.ArgumentParser) -> None:
    """Add the parser of ``import``."""
    parser = commands.add_parser(
        "import",
        parents=[shared],
        help="jsonl, JSON, csv, tsv, parquet or arrow files, or a data set of the Hugging Face hub's form",
        description="Makes verl's columns of a field with the prompt (a text, or messages) and one with the right "
        "answer, and keeps the columns named by --keep as they are, such as messages, or chosen and rejected. Where "
        "rows have no messages, --keep messages makes them of ShareGPT's conversations.",
    )
    parser.add_argument(
        "--input", required=True, help="a file, a folder of files or of datasets' save_to_disk, or OWNER/NAME"
    )
    parser.add_argument("--revision", help="of a data set on the hub (default: main)")
    parser.add_argument("--prompt-field", metavar="FIELD", help="text, or messages; a path into structs such as a.b")
    parser.add_argument("--answer-field", metavar="FIELD", help="the right answer (reward_model.ground_truth)")
    parser.add_argument("--data-source", metavar="NAME", help="chooses the reward (default: the name of the input)")
    parser.add_argument(
        "--keep", nargs="+", action="extend", default=[], metavar="FIELD", help="columns to keep as they are"
    )
    parser.add_argument("--from-split", default="train", metavar="SPLIT", help="of a data set (default: train)")
    parser.add_argument("--config", metavar="NAME", help="subset of a data set, where it has several")
    parser.add_argument("--drop-images", action="store_true", help="import the text of rows that have images")
    parser.add_argument("--size", type=int, help="number of rows (default: all)")
    parser.add_argument(
        "--prompt-template", default="{question}", help="around a prompt of text; must contain {question}"
    )
    parser.set_defaults(make_rows=lambda options: imported_rows(asked(ImportRequest, options)))


def add_reasoning_gym(commands: Commands, shared: argparse.ArgumentParser) -> None:
    """Add the parser of ``reasoning-gym``."""
    parser = commands.add_parser(
        "reasoning-gym",
        parents=[shared],
        help="any task of reasoning-gym",
        description="Distinct rows of one task. Row i is made from SEED + i, so files of near seeds overlap: make the "
        "held-out file first, and name it with --exclude when making the training file.",
    )
    parser.add_argument("--task", required=True, help="name of the task, such as chain_sum")
    parser.add_argument("--size", type=int, required=True, help="number of rows")
    parser.add_argument("--seed", type=int, default=1, help="of the task's generator (default: 1)")
    parser.add_argument(
        "--set",
        dest="settings",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="settings of the task, such as max_terms=3 max_digits=2",
    )
    parser.add_argument("--prompt-template", default="{question}", help="must contain {question}")
    parser.set_defaults(make_rows=lambda options: reasoning_gym_rows(asked(TaskRequest, options)))


def add_episodes(commands: Commands) -> None:
    """Add the parser of ``episodes``."""
    parser = commands.add_parser(
        "episodes",
        help="rows of an environment that makes its episodes from seeds",
        description="Row i is the episode of SEED + i, so give the held-out file seeds that training never reaches.",
    )
    parser.add_argument(
        "--environment", required=True, metavar="NAME", help="the data_source, such as textarena/GuessTheNumber-v0"
    )
    parser.add_argument("--output", type=path_argument, required=True, help="parquet file to write")
    parser.add_argument("--size", type=int, required=True, help="number of rows")
    parser.add_argument("--seed", type=int, default=1, help="of the first row (default: 1)")
    parser.add_argument(
        "--set", dest="settings", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="of the environment"
    )
    parser.add_argument("--system", default="Play.", help="system message before what the environment says (Play.)")
    parser.add_argument("--split", default=None, help="written to extra_info.split (default: the output's name)")
    parser.set_defaults(
        make_rows=lambda options: episode_rows(asked(EpisodeRequest, options)), prompt_template="{question}"
    )


def add_played(commands: Commands) -> None:
    """Add the parser of ``played``."""
    parser = commands.add_parser(
        "played",
        help="episodes played by random moves, for a model to learn the form of a move",
        description="Adds the column messages. Each move is made at most once, in random order, until an episode ends.",
    )
    parser.add_argument("--input", type=Path, required=True, help="parquet file of episodes")
    parser.add_argument("--environment", required=True, metavar="FILE", help="rollout.multi_turn.environment")
    parser.add_argument("--moves", nargs="+", required=True, metavar="TEXT", help="what the model could say")
    parser.add_argument("--seed", type=int, default=1, help="of the order (default: 1)")
    parser.add_argument("--output", type=path_argument, required=True, help="parquet file to write")
    parser.set_defaults(
        make_rows=lambda options: played_rows(options.input, options.environment, options.moves, options.seed)
    )


def add_demonstrations(commands: Commands) -> None:
    """Add the parser of ``demonstrations``."""
    parser = commands.add_parser(
        "demonstrations",
        help="responses to learn from, for rows of chain_sum",
        description="Adds the column response: some rows are answered at once, others step by step. A model that "
        "learns both can find out by reinforcement learning which of them pays.",
    )
    parser.add_argument("--input", type=Path, required=True, help="parquet file made by reasoning-gym --task chain_sum")
    parser.add_argument("--output", type=path_argument, required=True, help="parquet file to write")
    parser.add_argument("--worked", type=float, default=0.5, help="fraction answered step by step (default: 0.5)")
    parser.add_argument("--tool", action="store_true", help="these call a calculator instead (recipes/tiny_tools.yaml)")
    parser.add_argument("--seed", type=int, default=1, help="chooses these rows (default: 1)")
    parser.set_defaults(
        make_rows=lambda options: demonstration_rows(options.input, options.worked, options.seed, options.tool)
    )


def add_pairs(commands: Commands) -> None:
    """Add the parser of ``pairs``."""
    parser = commands.add_parser(
        "pairs",
        help="chosen and rejected responses to train a reward model on",
        description="Each row's right response is chosen; the response of another row with another right answer is "
        "rejected.",
    )
    parser.add_argument("--input", type=Path, required=True, help="parquet file of any task with right answers")
    parser.add_argument("--output", type=path_argument, required=True, help="parquet file to write")
    parser.add_argument(
        "--column", default=DEFAULT_RESPONSE_COLUMN, help="column of the responses (default: the right answers)"
    )
    parser.add_argument("--seed", type=int, default=1, help="chooses the rejected responses (default: 1)")
    parser.set_defaults(make_rows=lambda options: pair_rows(options.input, options.column, options.seed))


def add_check(commands: Commands) -> None:
    """Add the parser of ``check``."""
    parser = commands.add_parser("check", help="whether files are fit for training; exit status 1 if they are not")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="parquet file with verl's columns")
    parser.add_argument("--tokenizer", help="folder, .model file or OWNER/NAME on the hub to measure prompts with")
    parser.add_argument("--max-prompt-length", type=int, help="in tokens; longer prompts are counted")
    parser.add_argument("--system-prompt", metavar="TEXT", help="data.system_prompt of the recipe, to be measured too")
    parser.add_argument("--images", choices=["refuse", "drop"], default="refuse", help="data.images of the recipe")
    parser.add_argument("--reward-function", help="path/to/file.py:name (default: the rule of each data_source)")
    parser.add_argument("--sample", type=int, default=100, help="rows of each source to try the reward on (100)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of tables")
    parser.set_defaults(act=check)


def add_distinct(commands: Commands) -> None:
    """Add the parser of ``distinct``."""
    parser = commands.add_parser(
        "distinct",
        help="the first of the rows with the same prompt, of any file",
        description="Keeps all columns, and of rows with the same prompt the first. Some published sets hold each row "
        "many times.",
    )
    parser.add_argument("--input", type=Path, required=True, help="parquet file with verl's columns")
    parser.add_argument("--output", type=path_argument, required=True, help="parquet file to write")
    parser.set_defaults(act=distinct)


def distinct(options: argparse.Namespace) -> int:
    """Write the rows of a file whose prompt no row before them has, with all columns; return 0. Raises DataError."""
    source = ParquetRows([options.input], ["prompt"])
    seen: set[int] = set()
    read = written = 0
    with pyarrow.parquet.ParquetFile(options.input) as file, replaced(options.output) as partial:
        parts = -(-file.metadata.num_rows // ROWS_PER_GROUP)
        batches = track(
            file.iter_batches(ROWS_PER_GROUP), "distinct", parts, console=CONSOLE, transient=True,
            disable=not CONSOLE.is_terminal,
        )  # fmt: skip
        with pyarrow.parquet.ParquetWriter(partial, file.schema_arrow, compression="zstd") as writer:
            for batch in readable(batches, options.input):
                kept = []
                prompts = pyarrow.table({"prompt": batch.column("prompt")})
                for values in python_rows(prompts, lambda row, first=read: source.location(first + row)):  # type: ignore[misc]
                    key = prompt_key(parse_messages(values["prompt"], source.location(read)))
                    kept.append(key not in seen)
                    seen.add(key)
                    read += 1
                writer.write_batch(batch.filter(pyarrow.array(kept, pyarrow.bool_())))
                written += sum(kept)
    CONSOLE.print(f"{options.output}: {written} rows of {read}", highlight=False, soft_wrap=True)
    return 0


def readable(batches: Iterable[Any], file: Path) -> Iterator[Any]:
    """Yield the batches of a parquet file; raises DataError where it is damaged."""
    try:
        yield from batches
    except UNREADABLE as error:
        raise DataError(f"--input: {shown(file)} cannot be read ({reason_of(error)}); get it again") from error


if __name__ == "__main__":
    sys.exit(main())
