"""Opens a run's data: the stream of training prompts, the prompts of its evaluation, and notes about both.

Data of ordinary size is checked as a whole, so that a bad row stops a run before a GPU-hour is spent; of larger data,
the first rows of each file are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rlhf_megatron.data.drawn_prompts import Readers
from rlhf_megatron.data.order import WindowOrder
from rlhf_megatron.data.prompt_columns import Responses
from rlhf_megatron.data.prompts import READ_ROWS, LeftOut, Prompt, PromptDataset, prompt_key
from rlhf_megatron.data.stream import PromptStream
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.errors import DataError
from rlhf_megatron.recipe import DataSection

# Training rows that are all checked before a run starts, and how many of each file are where there are more.
CHECKED_ROWS = 50_000
SAMPLED_ROWS = 100

# The held-out rows are the same for all seeds of a run.
_VALIDATION_SEED = 0


@dataclass(frozen=True)
class Data:
    """The data of a run.

    Attributes:
        train: the training prompts.
        validation: what is evaluated on, in its order; None where the recipe has nothing.
        notes: lines for the person who watches.
        rows: training rows of an epoch: those that can be used, where all were checked; else all that are not held out.
    """

    train: PromptStream
    validation: list[Prompt] | None
    notes: list[str]
    rows: float


@dataclass(frozen=True)
class Validation:
    """Prompts to evaluate on, and how many rows were left out for their length while they were looked for."""

    prompts: list[Prompt]
    left_out: int


def open_data(
    section: DataSection,
    tokenizer: Tokenizer,
    seed: int,
    responses: Responses = "none",
    max_prompts: int | None = None,
    readers: Readers | None = None,
) -> Data:
    """Open and check training and validation data.

    Args:
        section: the recipe's data section.
        tokenizer: the actor's.
        seed: of the order.
        responses: see ``PromptDataset``.
        max_prompts: evaluate on so many prompts at most.
        readers: see ``PromptStream``.

    Raises:
        DataError: a file, column or row is bad, or nothing is left to train or to evaluate on.
    """
    datasets = [PromptDataset(part.files, tokenizer, section, responses=responses) for part in section.parts]
    total = sum(map(len, datasets))
    notes = []
    keys: set[int] = set()
    rows = total * (1 - section.validation_fraction)
    if total <= CHECKED_ROWS:
        left_out = rows = 0
        for dataset in datasets:
            usable, too_long = _sort_out(dataset.read_all())
            if not usable:
                raise dataset.none_left(len(dataset))
            left_out += too_long
            rows += len(usable)
            keys.update(usable)
        notes += _left_out_note(section, "training", left_out, total)
    else:
        for dataset in datasets:
            _sort_out(dataset.read_heads(SAMPLED_ROWS))
        notes.append(
            f"{total:,} training rows: the first {SAMPLED_ROWS} of each file are checked now, the others when they are "
            "read; those outside the limits of length are left out and counted as data/rows_left_out"
        )
    validation = open_validation(section, tokenizer, responses, max_prompts) if section.evaluates else None
    if validation:
        seen = len(validation.prompts)
        notes += _left_out_note(section, "validation", validation.left_out, seen + validation.left_out)
        shared = sum(prompt_key(prompt.messages) in keys for prompt in validation.prompts)
        differs_by_environment = rows > 1 and len(keys) == 1  # it asks, and all rows begin alike
        if shared and not differs_by_environment:
            notes.append(
                f"warning: {shared} of {seen} validation prompts are also in data.train_files; take them out there, or "
                "the evaluation says nothing about new prompts"
            )
    stream = PromptStream(datasets, section, seed, readers)
    return Data(stream, validation.prompts if validation else None, notes, rows)


def open_validation(
    section: DataSection, tokenizer: Tokenizer, responses: Responses = "none", max_prompts: int | None = None
) -> Validation:
    """Read the prompts to evaluate on: the first ones of the validation files, or some that are held out.

    Raises:
        DataError: a row is bad, no prompt is left, or large data would have to be searched to its end.
    """
    if section.validation_files:
        dataset = PromptDataset(section.validation_files, tokenizer, section, responses=responses)
        rows = dataset.read_all()
    else:
        dataset = PromptDataset(section.training_files, tokenizer, section, responses=responses, held_out=True)
        if max_prompts is None and len(dataset) > CHECKED_ROWS:
            raise DataError(
                f"data.validation_fraction={section.validation_fraction} of {len(dataset):,} rows: finding all of them "
                "takes long; set evaluation.max_prompts"
            )
        rows = _shuffled(dataset, section.shuffle_window_mb)
    prompts: list[Prompt] = []
    left_out = 0
    for item in rows:
        if isinstance(item, Prompt):
            prompts.append(item)
            if len(prompts) == max_prompts:
                break
        else:
            left_out += item is LeftOut.LENGTH
    if not prompts:
        raise dataset.none_left(len(dataset))
    return Validation(prompts, left_out)


def _shuffled(dataset: PromptDataset, memory_mb: int) -> Iterator[Prompt | LeftOut]:
    """Yield all rows once, so that the first ones stand for the whole."""
    order = WindowOrder(dataset.rows.blocks, memory_mb, _VALIDATION_SEED)
    for first in range(0, len(dataset), READ_ROWS):
        yield from dataset.read(order.rows(first, min(READ_ROWS, len(dataset) - first)).tolist())


def _sort_out(rows: Iterable[Prompt | LeftOut]) -> tuple[list[int], int]:
    """Return the keys of the prompts, and the number of rows left out for their length."""
    usable, too_long = [], 0
    for item in rows:
        if isinstance(item, Prompt):
            usable.append(prompt_key(item.messages))
        else:
            too_long += item is LeftOut.LENGTH
    return usable, too_long


def _left_out_note(section: DataSection, name: str, left_out: int, total: int) -> list[str]:
    if not left_out:
        return []
    why = [f"longer than data.max_prompt_length={section.max_prompt_length} tokens"]
    if section.min_prompt_length:
        why.append(f"shorter than data.min_prompt_length={section.min_prompt_length}")
    if section.max_response_length is not None:
        why.append(f"or with a response over data.max_response_length={section.max_response_length}")
    return [f"{left_out} of {total} {name} rows are left out: {', '.join(why)}"]
