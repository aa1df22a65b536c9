"""The `data` section: which prompts are trained and evaluated on. Files have verl's columns."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_megatron.recipe.section import Section


class DataSection(Section):
    """Parquet files with the columns data_source, prompt, ability, reward_model and extra_info."""

    train_files: list[str] = Field(min_length=1)
    """Parquet files to train on."""
    validation_files: list[str] = Field(default=[])
    """Parquet files to evaluate on; their rows are never trained on."""
    max_prompt_length: int = Field(gt=0)
    """Longest prompt, in tokens with the chat template."""
    overlong_prompts: Literal["drop", "stop"] = "drop"
    """What happens to longer prompts: leave them out and count them, or stop with the row's place."""
    shuffle: bool = True
    """Take the rows of each epoch in an order drawn from the seed; else in the files' order."""
    chat_template: str | None = None
    """A jinja file that replaces the tokenizer's chat template."""
    response_column: str | None = None
    """For sft: the column that holds the text to learn; default: reward_model.ground_truth."""
