"""The columns that each loop reads of its files: those of prompts alone, of one response, or of a pair.

Not here: the meaning of their values (column_values.py, given_answers.py).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from rlhf_megatron.data.given_answers import COMPLETION_COLUMN, TOOLS_COLUMN, demonstration_columns, pair_columns
from rlhf_megatron.data.own_rows import Rows, open_rows
from rlhf_megatron.data.parquet import VERL_COLUMNS
from rlhf_megatron.recipe import DataSection

MARGIN_COLUMN = "margin"
Responses = Literal["none", "one", "pair"]
# What each loop learns from.
RESPONSES: Mapping[str, Responses] = {"rl": "none", "sft": "one", "reward_modeling": "pair"}

# What is read, where a file lacks a column.
_FORMS: Mapping[Responses, str] = {
    "none": VERL_COLUMNS,
    "one": "loop: sft reads messages, prompt and completion, prompt and data.response_column, or verl's prompt and "
    "reward_model (docs/sft.md)",
    "pair": "loop: reward_modeling reads chosen and rejected, with or without prompt (docs/reward_models.md)",
}


def open_columns(files: Sequence[str | Path], section: DataSection, responses: Responses) -> Rows:
    """Return the rows of files with the columns that a ``PromptDataset`` reads.

    Raises:
        DataError: a file cannot be read or lacks a column, or has images that the recipe does not drop.
    """
    described = ["data_source", "reward_model", "extra_info"]
    texts = [COMPLETION_COLUMN] if responses == "one" else []
    optional = described if responses == "none" else [*texts, TOOLS_COLUMN, *described, MARGIN_COLUMN]
    rows = open_rows(files, section, functools.partial(_required, section, responses), optional, _FORMS[responses])
    if section.images == "refuse":
        rows.refuse_media()
    return rows


def _required(section: DataSection, responses: Responses, names: Sequence[str]) -> list[str]:
    """Return the top-level columns that a file with columns of these names must have."""
    if responses == "one":
        return demonstration_columns(section, names)
    return pair_columns(names) if responses == "pair" else ["prompt", "data_source", "reward_model"]
