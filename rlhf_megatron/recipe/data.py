"""The ``data`` section: which prompts are trained and evaluated on, and in which order. Files have verl's columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, JsonValue, model_validator

from rlhf_megatron.recipe.section import Section
from rlhf_megatron.untrusted import MOST_LEVELS, is_within_levels

# What a chat template is given anyway.
_TEMPLATE_NAMES = frozenset(["messages", "add_generation_prompt", "tokenize", "chat_template"])


class MixturePart(Section):
    """A weighted set of training files."""

    name: str = Field(min_length=1)
    """Name in metrics: data/epoch/NAME."""
    files: list[str] = Field(min_length=1)
    """Parquet files."""
    weight: float = Field(gt=0)
    """Relative share of prompts."""


class CurriculumSection(Section):
    """Order of each epoch by a numeric column."""

    column: str = Field(min_length=1)
    """Numeric, such as extra_info.difficulty."""
    order: Literal["ascending", "descending"] = "ascending"
    """Lowest or highest values first."""
    bands: int | None = Field(default=None, gt=0)
    """Equal parts to shuffle within; default: ties only."""


class DataSection(Section):
    """Parquet files with verl's columns (docs/data.md)."""

    train_files: list[str] = Field(default=[])
    """This or mixture is required."""
    mixture: list[MixturePart] = Field(default=[])
    """Instead of train_files: weighted sets, each with its own epochs."""
    dataset: str | None = None
    """Instead of parquet: path/to/file.py:Class, called with the files."""
    validation_files: list[str] = Field(default=[])
    """Never trained on."""
    validation_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Instead of files: share of rows held out by a hash of the prompt."""
    max_prompt_length: int = Field(gt=0)
    """In tokens, chat template included."""
    min_prompt_length: int = Field(default=0, ge=0)
    """Counted alike."""
    max_response_length: int | None = Field(default=None, gt=0)
    """sft: of the response in tokens, end included; reward_modeling: of the conversation."""
    overlong_prompts: Literal["drop", "stop"] = "drop"
    """Rows outside: drop and count, or stop."""
    shuffle: bool = True
    """Each epoch, by the seed; else the files' order."""
    shuffle_window_mb: int = Field(default=128, gt=0)
    """Decoded, per set of files; larger data is shuffled in windows of row groups."""
    curriculum: CurriculumSection | None = None
    """Order each epoch by a column."""
    system_prompt: str | None = None
    """For conversations without one."""
    chat_template: str | None = None
    """Jinja file in place of the tokenizer's."""
    chat_template_kwargs: dict[str, JsonValue] = Field(default={})
    """Its variables, such as {enable_thinking: false}."""
    response_column: str | None = None
    """sft: responses; default: messages, completion, or reward_model.ground_truth."""
    learned_turns: Literal["all", "last"] = "all"
    """sft: the assistant's turns that the loss is on."""
    string_prompts: Literal["chat", "plain"] = "chat"
    """sft, reward_modeling: a text prompt is a user's message, or has no chat template."""
    images: Literal["refuse", "drop"] = "refuse"
    """Files with images, videos, sound: refuse, or read the text."""

    @property
    def parts(self) -> list[MixturePart]:
        """The sets of training files with their weights; train_files are a single one."""
        return self.mixture or [MixturePart(name="train", files=self.train_files, weight=1.0)]

    @property
    def training_files(self) -> list[str]:
        """All files to train on, those of all parts of a mixture."""
        return [file for part in self.parts for file in part.files]

    @property
    def evaluates(self) -> bool:
        """True if there is anything to evaluate on."""
        return bool(self.validation_files) or self.validation_fraction > 0

    @model_validator(mode="after")
    def _keys_agree(self) -> DataSection:
        for problem in self._problems():
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        """Yield settings that contradict each other, each with the remedy."""
        if not self.train_files and not self.mixture:
            yield "train_files: there is nothing to train on; name parquet files, or give a mixture"
        if self.train_files and self.mixture:
            yield "mixture: train_files are given too; name each file in one of them"
        names = [part.name for part in self.mixture]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated:
            yield f"mixture: two parts have the name {repeated!r}; give each its own"
        if self.validation_files and self.validation_fraction:
            yield f"validation_fraction={self.validation_fraction}: validation_files are given too; leave one out"
        shortest, longest = self.min_prompt_length, self.max_prompt_length
        if shortest > longest:
            yield f"min_prompt_length={shortest} is above max_prompt_length={longest}; lower it"
        if self.curriculum and self.curriculum.bands and not self.shuffle:
            yield "curriculum.bands: rows are shuffled within bands, which shuffle=false forbids; leave one out"
        if not is_within_levels(self.chat_template_kwargs):
            yield f"chat_template_kwargs: is nested too deeply; at most {MOST_LEVELS} levels are read"
        taken = sorted(_TEMPLATE_NAMES & set(self.chat_template_kwargs))
        if taken:
            yield f"chat_template_kwargs: {taken[0]} is given by the program; leave it out"
