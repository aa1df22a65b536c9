"""The file that a benchmark leaves: what was found, by which command, on which hardware, with which versions.

Fit to be published: it names neither the machine nor its folders.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlhf_megatron.monitor.environment_report import hardware, package_versions

_PATH_OPTIONS = ("--output", "--work", "--folder")


def write_report(path: Path, result: Mapping[str, Any]) -> None:
    """Write ``result`` with its surroundings as JSON."""
    script = Path(sys.argv[0])
    record = {
        "name": path.stem,
        "command": " ".join([f"tools/bench/{script.name}", *_without_paths(sys.argv[1:])]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": hardware_name(),
        "versions": package_versions(),
        **result,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _without_paths(arguments: Sequence[str]) -> list[str]:
    """Return arguments but for where results go: that is nothing to repeat."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument not in _PATH_OPTIONS:
            kept.append(argument)
        skip = argument in _PATH_OPTIONS
    return kept


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def rows_with(path: Path, row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rows of the report at ``path``, if there is one, with ``row`` in place of that of its model and
    GPUs."""
    others = [old for old in rows_of(path) if (old["model"], old["gpus"]) != (row["model"], row["gpus"])]
    return [*others, row]


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of the report at ``path``; none if there is none."""
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    rows: list[dict[str, Any]] = report.get("rows", [])
    return rows


def missed_by(
    rows: Sequence[Mapping[str, Any]], name_of: Callable[[Any], str], texts_of: Callable[[Any], Iterable[str]]
) -> list[str]:
    """Return missed targets, in words: each row's name and its text, or why there are no figures of it."""
    return [
        f"{name_of(row)}: {text}" for row in rows for text in ([row["failed"]] if "failed" in row else texts_of(row))
    ]


def model_and_gpus(row: Mapping[str, Any]) -> str:
    """Return the name of a row that has these two."""
    return f"{row['model']} on {row['gpus']}"


def exit_status(missed: Sequence[str]) -> int:
    """Tell what was missed on stderr; 1 if anything was."""
    for text in missed:
        print(f"missed: {text}", file=sys.stderr)
    return int(bool(missed))


def hardware_name() -> str:
    """Return the GPU's name, or the CPU's and how many of its cores."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    machine = hardware()
    return f"{machine['cpu']}, {machine['cores']} cores, no GPU"
