"""The `data` section: which prompts are trained and evaluated on, and in which order. Files have verl's columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, JsonValue, model_validator

from rlhf_megatron.recipe.section import Section
from rlhf_megatron.untrusted import MOST_LEVELS, is_within_levels

# What a chat template is given anyway.
_TEMPLATE_NAMES = frozenset(["messages", "add_generation_prompt", "tokenize", "chat_template"])


class MixturePart(Section):
    """One of several sets of training files that are drawn from side by side."""

    name: str = Field(min_length=1)
    """Names the part in metrics: data/epoch/NAME."""
    files: list[str] = Field(min_length=1)
    """Its parquet files."""
    weight: float = Field(gt=0)
    """Its share of the prompts, divided by the sum of all weights; it does not depend on how many rows there are."""


class CurriculumSection(Section):
    """The prompts of each epoch in the order of a numeric column."""

    column: str = Field(min_length=1)
    """A column of numbers, or a path into structs such as extra_info.difficulty."""
    order: Literal["ascending", "descending"] = "ascending"
    """Rows that come first: those with the lowest numbers, or the highest."""
    bands: int | None = Field(default=None, gt=0)
    """Cut the rows, in their order, into so many bands of equal size and shuffle within each; default: only rows with
    the same number are shuffled."""


class DataSection(Section):
    """Parquet files with the columns data_source, prompt, ability, reward_model and extra_info."""

    train_files: list[str] = Field(default=[])
    """Parquet files to train on; this or mixture is needed."""
    mixture: list[MixturePart] = Field(default=[])
    """Instead of train_files: several sets of files with weights. Each goes through epochs of its own."""
    validation_files: list[str] = Field(default=[])
    """Parquet files to evaluate on; their rows are never trained on."""
    validation_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Instead of validation_files: hold out this share of the training rows, chosen by a hash of the prompt, so that
    equal prompts are all on one side."""
    max_prompt_length: int = Field(gt=0)
    """Longest prompt, in tokens with the chat template."""
    min_prompt_length: int = Field(default=0, ge=0)
    """Shortest prompt, counted in the same way."""
    max_response_length: int | None = Field(default=None, gt=0)
    """For sft: longest response in tokens, its end included; for reward_modeling: longest conversation. (rl has
    rollout.max_response_length.)"""
    overlong_prompts: Literal["drop", "stop"] = "drop"
    """Treatment of rows outside these lengths: leave them out and count them, or stop with the row's position."""
    shuffle: bool = True
    """Take the rows of each epoch in an order drawn from the seed; else in the files' order."""
    shuffle_window_mb: int = Field(default=128, gt=0)
    """Memory for decoded rows of each set of files, in MB as the parquet footers count. Data within it is shuffled as a
    whole; of larger data, row groups are drawn until it is full, and shuffled together."""
    curriculum: CurriculumSection | None = None
    """Order the rows of each epoch by a column."""
    system_prompt: str | None = None
    """A system message for the conversations that have none."""
    chat_template: str | None = None
    """A jinja file that replaces the tokenizer's chat template."""
    chat_template_kwargs: dict[str, JsonValue] = Field(default={})
    """Names that the chat template reads, such as {enable_thinking: false}."""
    response_column: str | None = None
    """For sft: the column that holds the text to learn; default: reward_model.ground_truth. (reward_modeling reads the
    columns chosen, rejected and, where there is one, margin.)"""

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
        """Settings that contradict each other, each with the remedy."""
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
