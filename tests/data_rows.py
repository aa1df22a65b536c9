"""Small data files of good and bad rows. Used by tests only; no test lives here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from rlhf_megatron.data.prompts import LeftOut, Prompt, PromptDataset
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.recipe import DataSection

Row = dict[str, Any]


def row(content: Any = "What is 1 + 1?", **values: Any) -> Row:
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": content}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 0},
        **values,
    }


def table(*rows: Row) -> pyarrow.Table:
    return pyarrow.Table.from_pylist(list(rows or [row(), row("What is 1 + 2?")]))


def written(path: Path, content: pyarrow.Table, **options: Any) -> Path:
    pyarrow.parquet.write_table(content, path, **options)
    return path


def opened(tokenizer: Tokenizer, *files: Path | str, **values: Any) -> list[Prompt | LeftOut]:
    """Return what all rows of files are, as a run finds out when it starts."""
    section = DataSection(train_files=["x"], max_prompt_length=200, **values)
    return list(PromptDataset(files, tokenizer, section).read_all())
