"""Make parquet files with verl's columns, for data.train_files and data.validation_files.

    python tools/prepare_data.py import --input questions.csv --prompt-field question --answer-field answer \\
        --data-source my_math --output train.parquet
    python tools/prepare_data.py gsm8k --input train.jsonl --output train.parquet
    python tools/prepare_data.py reasoning-gym --task chain_sum --size 2000 --seed 1 --set max_terms=3 \\
        --exclude test.parquet --output train.parquet
    python tools/prepare_data.py episodes --environment textarena/GuessTheNumber-v0 --size 2000 --output train.parquet
    python tools/prepare_data.py demonstrations --input train.parquet --worked 0.25 --output demonstrations.parquet
    python tools/prepare_data.py pairs --input demonstrations.parquet --column response --output pairs.parquet
    python tools/prepare_data.py distinct --input dapo-math-17k.parquet --output train.parquet

    python tools/prepare_data.py check train.parquet --tokenizer models/NAME --max-prompt-length 512

Here: the rows of each source and the command line. Not here: reading the files (rlhf_megatron/data/), scoring and what
is checked (rlhf_megatron/rewards/).
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import yaml
from rich.console import Console
from rich.progress import track

from rlhf_megatron.data.column_values import (
    column_value,
    parse_extra_info,
    parse_ground_truth,
    parse_messages,
    parse_turns,
    with_system_prompt,
)
from rlhf_megatron.data.demonstrations import demonstration_rows
from rlhf_megatron.data.foreign_files import card_of, data_files, read_jsonl, read_records, split_files
from rlhf_megatron.data.given_answers import DEFAULT_RESPONSE_COLUMN
from rlhf_megatron.data.pairs import pair_rows
from rlhf_megatron.data.parquet import UNREADABLE, RowLocation, python_rows
from rlhf_megatron.data.prompts import prompt_key
from rlhf_megatron.data.rows import ParquetRows
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.errors import DataError
from rlhf_megatron.hub import DEFAULT_REVISION, Repository, commit_of, files_of, folder_of, is_hub_name, local_folder
from rlhf_megatron.recipe import RewardSection
from rlhf_megatron.recipe.plain_yaml import parse_yaml
from rlhf_megatron.rewards import gsm8k, reasoning_gym
from rlhf_megatron.rewards.data_check import check_files, tables
from rlhf_megatron.runtime.command import ArgumentParser, command, path_argument
from rlhf_megatron.untrusted import kind_of, reason_of, shown

# The words that verl's own GSM8K files use, so that results can be compared.
GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
ROWS_PER_GROUP = 1024
# A procedural task repeats itself; after this many tries for each row asked for, it has no more distinct ones to give.
TRIES_PER_ROW = 50
MOST_ROWS = 10**7  # of a file
SECONDS_PER_ROW = 10  # rows take milliseconds, unless numbers of --set are without measure

CONSOLE = Console(stderr=True)

Row = dict[str, Any]


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

    math_words = commands.add_parser("gsm8k", parents=[shared], help="GSM8K's jsonl files")
    math_words.add_argument("--input", type=Path, required=True, help='jsonl of {"question", "answer": "... #### N"}')
    math_words.add_argument("--size", type=int, help="number of rows (default: all)")
    math_words.add_argument(
        "--prompt-template", default=f"{{question}} {GSM8K_INSTRUCTION}", help="must contain {question}"
    )
    math_words.set_defaults(make_rows=gsm8k_rows)

    given = commands.add_parser(
        "import",
        parents=[shared],
        help="jsonl, csv, parquet or arrow files, or a data set of the Hugging Face hub's form",
        description="Makes verl's columns of a field with the prompt (a text, or messages) and one with the right "
        "answer, and keeps the columns named by --keep as they are, such as messages, or chosen and rejected.",
    )
    given.add_argument(
        "--input", required=True, help="a file, a folder of files or of datasets' save_to_disk, or OWNER/NAME"
    )
    given.add_argument("--revision", help="of a data set on the hub (default: main)")
    given.add_argument("--prompt-field", metavar="FIELD", help="text, or messages; a path into structs such as a.b")
    given.add_argument("--answer-field", metavar="FIELD", help="the right answer (reward_model.ground_truth)")
    given.add_argument("--data-source", metavar="NAME", help="chooses the reward (default: the name of the input)")
    given.add_argument(
        "--keep", nargs="+", action="extend", default=[], metavar="FIELD", help="columns to keep as they are"
    )
    given.add_argument("--from-split", default="train", metavar="SPLIT", help="of a data set (default: train)")
    given.add_argument("--config", metavar="NAME", help="subset of a data set, where it has several")
    given.add_argument("--drop-images", action="store_true", help="import the text of rows that have images")
    given.add_argument("--size", type=int, help="number of rows (default: all)")
    given.add_argument(
        "--prompt-template", default="{question}", help="around a prompt of text; must contain {question}"
    )
    given.set_defaults(make_rows=imported_rows)

    tasks = commands.add_parser(
        "reasoning-gym",
        parents=[shared],
        help="any task of reasoning-gym",
        description="Distinct rows of one task. Row i is made from SEED + i, so files of near seeds overlap: make the "
        "held-out file first, and name it with --exclude when making the training file.",
    )
    tasks.add_argument("--task", required=True, help="name of the task, such as chain_sum")
    tasks.add_argument("--size", type=int, required=True, help="number of rows")
    tasks.add_argument("--seed", type=int, default=1, help="of the task's generator (default: 1)")
    tasks.add_argument(
        "--set",
        dest="settings",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="settings of the task, such as max_terms=3 max_digits=2",
    )
    tasks.add_argument("--prompt-template", default="{question}", help="must contain {question}")
    tasks.set_defaults(make_rows=reasoning_gym_rows)

    episodes = commands.add_parser(
        "episodes",
        help="rows of an environment that makes its episodes from seeds",
        description="Row i is the episode of SEED + i, so give the held-out file seeds that training never reaches.",
    )
    episodes.add_argument(
        "--environment", required=True, metavar="NAME", help="the data_source, such as textarena/GuessTheNumber-v0"
    )
    episodes.add_argument("--output", type=path_argument, required=True, help="parquet file to write")
    episodes.add_argument("--size", type=int, required=True, help="number of rows")
    episodes.add_argument("--seed", type=int, default=1, help="of the first row (default: 1)")
    episodes.add_argument(
        "--set", dest="settings", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="of the environment"
    )
    episodes.add_argument("--system", default="Play.", help="system message before what the environment says (Play.)")
    episodes.add_argument("--split", default=None, help="written to extra_info.split (default: the output's name)")
    episodes.set_defaults(make_rows=episode_rows, prompt_template="{question}")

    shown = commands.add_parser(
        "demonstrations",
        help="responses to learn from, for rows of chain_sum",
        description="Adds the column response: some rows are answered at once, others step by step. A model that "
        "learns both can find out by reinforcement learning which of them pays.",
    )
    shown.add_argument("--input", type=Path, required=True, help="parquet file made by reasoning-gym --task chain_sum")
    shown.add_argument("--output", type=path_argument, required=True, help="parquet file to write")
    shown.add_argument("--worked", type=float, default=0.5, help="fraction answered step by step (default: 0.5)")
    shown.add_argument("--tool", action="store_true", help="these call a calculator instead (recipes/tiny_tools.yaml)")
    shown.add_argument("--seed", type=int, default=1, help="chooses these rows (default: 1)")
    shown.set_defaults(
        make_rows=lambda options: demonstration_rows(options.input, options.worked, options.seed, options.tool)
    )

    paired = commands.add_parser(
        "pairs",
        help="chosen and rejected responses to train a reward model on",
        description="Each row's right response is chosen; the response of another row with another right answer is "
        "rejected.",
    )
    paired.add_argument("--input", type=Path, required=True, help="parquet file of any task with right answers")
    paired.add_argument("--output", type=path_argument, required=True, help="parquet file to write")
    paired.add_argument(
        "--column", default=DEFAULT_RESPONSE_COLUMN, help="column of the responses (default: the right answers)"
    )
    paired.add_argument("--seed", type=int, default=1, help="chooses the rejected responses (default: 1)")
    paired.set_defaults(make_rows=lambda options: pair_rows(options.input, options.column, options.seed))

    checked = commands.add_parser("check", help="whether files are fit for training; exit status 1 if they are not")
    checked.add_argument("files", type=Path, nargs="+", metavar="FILE", help="parquet file with verl's columns")
    checked.add_argument("--tokenizer", help="folder, .model file or OWNER/NAME on the hub to measure prompts with")
    checked.add_argument("--max-prompt-length", type=int, help="in tokens; longer prompts are counted")
    checked.add_argument("--system-prompt", metavar="TEXT", help="data.system_prompt of the recipe, to be measured too")
    checked.add_argument("--images", choices=["refuse", "drop"], default="refuse", help="data.images of the recipe")
    checked.add_argument("--reward-function", help="path/to/file.py:name (default: the rule of each data_source)")
    checked.add_argument("--sample", type=int, default=100, help="rows of each source to try the reward on (100)")
    checked.add_argument("--json", action="store_true", help="print one line of JSON instead of tables")
    checked.set_defaults(act=check)

    once = commands.add_parser(
        "distinct",
        help="the first of the rows with the same prompt, of any file",
        description="Keeps all columns, and of rows with the same prompt the first. Some published sets hold each row "
        "many times.",
    )
    once.add_argument("--input", type=Path, required=True, help="parquet file with verl's columns")
    once.add_argument("--output", type=path_argument, required=True, help="parquet file to write")
    once.set_defaults(act=distinct)
    return parser


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
    """The batches of a parquet file; raises DataError where it is damaged."""
    try:
        yield from batches
    except UNREADABLE as error:
        raise DataError(f"--input: {shown(file)} cannot be read ({reason_of(error)}); get it again") from error


def imported_rows(options: argparse.Namespace) -> list[Row]:
    """Return the rows of files of others.

    Raises:
        DataError: a file or row cannot be read, lacks a field, or has images; or there are too few rows.
    """
    check_request(options)
    if options.prompt_field is None and not options.keep:
        raise DataError("--prompt-field: name the field of the prompt, or columns to --keep as they are")
    excluded = read_questions(options.exclude)
    fields = [field for field in (options.prompt_field, options.answer_field, *options.keep) if field is not None]
    columns = [name for field in fields for name in (field, field.split(".")[0])]
    rows: list[Row] = []
    for file in input_files(options):
        for location, values in read_records(file, columns, options.drop_images):
            row = imported_row(options, values, location, len(rows))
            if not excluded or question_of(row, location) not in excluded:
                rows.append(row)
            if len(rows) == options.size:
                return rows
            if len(rows) > MOST_ROWS:
                raise DataError(f"--input: {shown(options.input)} has over {MOST_ROWS:,} rows; give --size")
    if not rows or options.size is not None:
        wanted = options.size or "some"
        raise DataError(f"{shown(options.input)}: {len(rows)} rows are left, {wanted} were asked for; lower --size")
    return rows


def input_files(options: argparse.Namespace) -> list[Path]:
    """Return the files to import; those of the hub are downloaded first. Raises DataError and HubError."""
    split, config = options.from_split, options.config
    if not is_hub_name(options.input):
        return data_files(Path(options.input), split, config)
    repository = Repository(options.input, options.revision or DEFAULT_REVISION, "--input", "dataset")
    commit = commit_of(repository)
    CONSOLE.print(f"{options.input} at {commit}", highlight=False, soft_wrap=True)
    card = card_of(folder_of(repository, commit, ["README.md"], []) / "README.md")
    chosen = split_files(sorted(files_of(repository, commit)), card, split, config, options.input)
    folder = folder_of(repository, commit, chosen, [])
    return [folder / name for name in chosen]


def imported_row(options: argparse.Namespace, values: Row, location: RowLocation, index: int) -> Row:
    """Return one row in verl's columns, with those that are kept; raises DataError where a field is missing."""
    row: Row = {}
    for column in options.keep:
        if column not in values:
            raise location.error(column, f"missing; the row has {shown(', '.join(map(str, values)))}")
        row[column] = values[column]
    info: Row = {"split": split_name(options), "index": index}
    source = options.data_source or (options.input if is_hub_name(options.input) else Path(options.input).stem)
    if options.prompt_field is None:
        return {"data_source": source, "extra_info": info, **row}
    prompt, answer = column_value(values, options.prompt_field), ""
    found = f"the row has {shown(', '.join(map(str, values)))}"
    if isinstance(prompt, str) and prompt.strip():
        info["question"] = prompt
        prompt = make_row(options, "", prompt, "", "", {})["prompt"]
    elif not isinstance(prompt, list):
        raise location.error(options.prompt_field, f"{shown(repr(prompt))} instead of a text or messages; {found}")
    messages = with_system_prompt(parse_turns(prompt, options.prompt_field, location), options.system)
    if options.answer_field is not None:
        given = column_value(values, options.answer_field)
        if given is None or given == "":
            raise location.error(options.answer_field, f"no answer; write one, or remove the row; {found}")
        answer = parse_ground_truth({"ground_truth": given}, location)
    described = {"data_source": source, "prompt": messages, "reward_model": {"style": "rule", "ground_truth": answer}}
    return {**described, "extra_info": info, **row}


def question_of(row: Row, location: RowLocation) -> str:
    """Return what `read_questions` compares; "" of a row without a prompt."""
    question = row["extra_info"].get("question") or (row["prompt"][-1]["content"] if "prompt" in row else "")
    return str(question).strip()


def gsm8k_rows(options: argparse.Namespace) -> list[Row]:
    """Return the rows of a GSM8K jsonl file.

    Raises:
        DataError: the file or one of its lines cannot be used, or it holds too few rows.
    """
    check_request(options)
    excluded = read_questions(options.exclude)
    rows: list[Row] = []
    for number, record in read_jsonl(options.input):
        question, answer = record.get("question"), record.get("answer")
        if not isinstance(question, str) or not isinstance(answer, str) or not question.strip():
            raise DataError(f"{options.input}, line {number}: needs the texts question and answer; this is not GSM8K")
        truth = gsm8k.extract_answer(answer)
        if truth is None:
            raise DataError(f"{options.input}, line {number}, field answer: no number behind #### at its end")
        if question.strip() in excluded:
            continue
        info = {"split": split_name(options), "index": number - 1, "question": question, "answer": answer}
        rows.append(make_row(options, "openai/gsm8k", question, f"{truth:f}", "math", info))
        if options.size is not None and len(rows) == options.size:
            break
    if not rows or (options.size is not None and len(rows) < options.size):
        raise DataError(
            f"{options.input}: {len(rows)} rows are left after --exclude, {options.size or 'some'} were asked for; "
            "lower --size or exclude less"
        )
    return rows


def reasoning_gym_rows(options: argparse.Namespace) -> list[Row]:
    """Return distinct rows of a reasoning-gym task, with all that its scorer needs in extra_info.

    Raises:
        DataError: unknown task or setting, or the task has too few distinct questions.
    """
    check_request(options)
    settings = parse_settings(options.settings)
    dataset = create_task(options.task, options.seed, options.size * TRIES_PER_ROW, settings)
    taken = read_questions(options.exclude)
    rows: list[Row] = []
    tries = track(
        range(len(dataset)), description=options.task, console=CONSOLE, transient=True, disable=not CONSOLE.is_terminal
    )
    for index in tries:
        with limited(f"task {options.task}: one row"):
            entry = dataset[index]
        question = entry["question"]
        if question.strip() in taken:
            continue
        taken.add(question.strip())
        info = {
            "split": split_name(options),
            "index": index,
            "question": question,
            "task": options.task,
            "config": reasoning_gym.encode(settings),
            "entry": reasoning_gym.encode(entry),
        }
        truth = entry["answer"] if isinstance(entry["answer"], str) else ""
        category = dataset.category
        rows.append(make_row(options, f"{reasoning_gym.PREFIX}{options.task}", question, truth, category, info))
        if len(rows) == options.size:
            return rows
    raise DataError(
        f"task {options.task}: only {len(rows)} of {options.size} distinct questions found in {len(dataset)} tries "
        "that are not in --exclude; lower --size, or widen the task with --set"
    )


def episode_rows(options: argparse.Namespace) -> list[Row]:
    """Return rows that name an episode by its seed; the environment says what is asked.

    Raises:
        DataError: the number of rows, or a setting, is bad.
    """
    check_request(options)
    described = {
        "data_source": options.environment,
        "prompt": [{"role": "system", "content": options.system}],
        "reward_model": {"style": "rule", "ground_truth": ""},
    }
    info = {"split": split_name(options), "settings": json.dumps(parse_settings(options.settings))}
    return [
        described | {"extra_info": info | {"index": index, "seed": options.seed + index}}
        for index in range(options.size)
    ]


@contextlib.contextmanager
def limited(what: str) -> Iterator[None]:
    """Raises DataError where the block takes longer than SECONDS_PER_ROW, or settings are such that it fails."""

    def stop(*_: Any) -> None:
        raise DataError(f"{what} takes over {SECONDS_PER_ROW} s; make the task smaller with --set")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS_PER_ROW)
    try:
        yield
    except (ArithmeticError, LookupError, MemoryError, TypeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{what} cannot be made ({reason_of(error)}); change --set") from error
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def create_task(task: str, seed: int, size: int, settings: dict[str, Any]) -> Any:
    """Return a reasoning-gym dataset.

    Raises:
        DataError: the package is missing, or there is no such task or setting, or the settings contradict each other.
    """
    try:
        package = reasoning_gym.import_package()
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise DataError(f"reasoning-gym is not installed ({error}); pip install reasoning-gym==0.1.25") from error
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"tasks: {', '.join(sorted(DATASETS))}"
        raise DataError(f"--task: reasoning-gym has no task {shown(task)}; {hint}")
    known = {item.name for item in fields(DATASETS[task][1])} - {"seed", "size"}
    for key in settings:
        if key not in known:
            raise DataError(f"--set: the task {task} has no setting {key}; it has {', '.join(sorted(known))}")
    try:
        return package.create_dataset(task, seed=seed, size=size, **settings)
    except (AssertionError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        why = reason_of(error) if str(error) else "a check failed"
        raise DataError(f"--set: the task {task} refuses these settings: {why}") from error


def make_row(options: argparse.Namespace, data_source: str, question: str, truth: str, ability: str, info: Row) -> Row:
    """Return one row in verl's columns."""
    messages = [{"role": "user", "content": options.prompt_template.replace("{question}", question)}]
    if options.system:
        messages.insert(0, {"role": "system", "content": options.system})
    return {
        "data_source": data_source,
        "prompt": messages,
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": info,
    }


def check_request(options: argparse.Namespace) -> None:
    """Check what both sources share.

    Raises:
        DataError: the size is not positive, or the template has no place for the question.
    """
    if options.size is not None and options.size <= 0:
        raise DataError(f"--size: {options.size} rows cannot be made; give 1 or more")
    if options.size is not None and options.size > MOST_ROWS:
        raise DataError(f"--size: {options.size} rows are too many; give at most {MOST_ROWS:,}")
    if "{question}" not in options.prompt_template:
        raise DataError(f"--prompt-template: {options.prompt_template!r} has no {{question}}; put it where it belongs")


def parse_settings(settings: Iterable[str]) -> dict[str, Any]:
    """Return KEY=VALUE arguments as a dictionary, values read as YAML.

    Raises:
        DataError: an argument has no "=", or its value is not YAML.
    """
    parsed = {}
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator or not key:
            raise DataError(f"--set: {setting!r} is not KEY=VALUE")
        try:
            parsed[key] = parse_yaml(value)
            json.dumps(parsed[key], allow_nan=False)
        except (yaml.YAMLError, ValueError) as error:
            if not isinstance(error, yaml.YAMLError):
                raise DataError(f"--set: {shown(key)}={shown(value)}: must be finite") from error
            raise DataError(f"--set: the value of {shown(key)} is not YAML: {shown(repr(value))}") from error
    return parsed


def read_questions(files: Sequence[Path]) -> set[str]:
    """Return the questions of prepared files: extra_info.question, else the text of the last message of the prompt.

    The bare question is compared where it is known, so that another template does not hide a row that was held out.
    """
    questions: set[str] = set()
    if not files:
        return questions
    source = ParquetRows(files, ["prompt"], ["extra_info"])
    for first, rows in source.scan(["prompt", "extra_info"]):
        for offset, row in enumerate(rows):
            location = source.location(first + offset)
            question = parse_extra_info(row.get("extra_info"), location).get("question")
            if not isinstance(question, str):
                question = parse_messages(row.get("prompt"), location)[-1]["content"]
            questions.add(question.strip())
    return questions


def split_name(options: argparse.Namespace) -> str:
    """Return what extra_info.split says."""
    return str(options.split or options.output.stem)


def write_rows(rows: list[Row], output: Path) -> None:
    """Write the rows to a parquet file; raises DataError where that cannot be."""
    with replaced(output) as partial:
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, partial, row_group_size=ROWS_PER_GROUP, compression="zstd")


@contextlib.contextmanager
def replaced(output: Path) -> Iterator[Path]:
    """A path to write to, which takes the output's name when all is written, in the place of a file of that name.

    Raises:
        DataError: the file cannot be written, or there is something else than a file.
    """
    if output.exists() and not output.is_file():
        raise DataError(f"--output: {shown(output)} cannot be written ({kind_of(output.stat().st_mode)} is there)")
    partial = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.replace(output)
    except OSError as error:
        raise DataError(f"--output: {shown(output)} cannot be written ({reason_of(error)})") from error
    finally:
        partial.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
