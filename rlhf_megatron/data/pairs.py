"""Pairs of a right and a wrong response, to train a reward model on, made of any task with right answers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from rlhf_megatron.data.column_values import parse_ground_truth, parse_response
from rlhf_megatron.data.rows import ParquetRows
from rlhf_megatron.errors import DataError


def pair_rows(file: Path, column: str, seed: int) -> list[dict[str, Any]]:
    """Return the rows of a file with their right response (chosen) and one that is right elsewhere (rejected).

    Args:
        file: parquet file of a task.
        column: the column of the responses, or a path into a struct such as reward_model.ground_truth.
        seed: chooses the rejected responses.

    Raises:
        DataError: a row has no right answer or no response, or all rows have the same answer.
    """
    columns = list(dict.fromkeys(["data_source", "prompt", "reward_model", column.split(".")[0]]))
    source = ParquetRows([file], columns)
    rows: list[dict[str, Any]] = []
    truths: list[str] = []
    for first, part in source.scan(columns):
        for offset, row in enumerate(part):
            location = source.location(first + offset)
            truths.append(parse_ground_truth(row["reward_model"], location))
            chosen = parse_response(row, column, location)
            rows.append({"data_source": row["data_source"], "prompt": row["prompt"], "chosen": chosen})
    if len(set(truths)) == 1:
        raise DataError(f"{file}: every row has the same right answer, so none is wrong; give more rows")
    draw = random.Random(seed)
    for index, row in enumerate(rows):
        other = draw.randrange(len(rows))
        while truths[other] == truths[index]:
            other = draw.randrange(len(rows))
        row["rejected"] = rows[other]["chosen"]
    return rows
