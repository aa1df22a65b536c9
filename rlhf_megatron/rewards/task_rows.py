"""Rows in verl's columns of known tasks, for tools/prepare_data.py: GSM8K, reasoning-gym, episodes of environments.

Not here: scoring them (gsm8k.py, reasoning_gym.py).
"""

from __future__ import annotations

import contextlib
import difflib
import json
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from rich.progress import track

from rlhf_megatron.data.foreign_files import read_jsonl
from rlhf_megatron.data.prepared_rows import (
    CONSOLE,
    Row,
    RowRequest,
    check_request,
    make_row,
    read_questions,
    split_name,
)
from rlhf_megatron.errors import DataError
from rlhf_megatron.recipe.plain_yaml import parse_yaml
from rlhf_megatron.rewards import gsm8k, reasoning_gym
from rlhf_megatron.untrusted import reason_of, shown

# The words that verl's own GSM8K files use, so that results can be compared.
GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
# A procedural task repeats itself; after this many tries for each row asked for, it has no more distinct ones to give.
TRIES_PER_ROW = 50
SECONDS_PER_ROW = 10  # rows take milliseconds, unless numbers of --set are without measure


@dataclass(frozen=True, kw_only=True)
class GSM8KRequest(RowRequest):
    """The options of ``gsm8k``: a jsonl file, and parquet files whose questions must not appear."""

    input: Path
    exclude: Sequence[Path]


@dataclass(frozen=True, kw_only=True)
class TaskRequest(RowRequest):
    """The options of ``reasoning-gym``: a task and its KEY=VALUE settings, the generator's seed, and parquet files
    whose questions must not appear."""

    size: int
    task: str
    seed: int
    settings: Sequence[str]
    exclude: Sequence[Path]


@dataclass(frozen=True, kw_only=True)
class EpisodeRequest(RowRequest):
    """The options of ``episodes``: an environment and its KEY=VALUE settings, and the seed of the first row."""

    size: int
    environment: str
    seed: int
    settings: Sequence[str]


def gsm8k_rows(options: GSM8KRequest) -> list[Row]:
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


def reasoning_gym_rows(options: TaskRequest) -> list[Row]:
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


def episode_rows(options: EpisodeRequest) -> list[Row]:
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
    """Raise DataError where the block takes longer than SECONDS_PER_ROW, or settings are such that it fails."""

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
