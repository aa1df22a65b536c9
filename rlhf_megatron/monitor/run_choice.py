"""Runs as people name them on a command line, RUN or NAME=PATH, and their labels."""

from __future__ import annotations

import os
from pathlib import Path

from rlhf_megatron.errors import MonitorError


def labelled(text: str) -> tuple[str, Path]:
    """Return (label, metrics file) of an argument. "=" may stand in names and paths: the longest path that exists is
    taken."""
    parts = text.split("=")
    splits = [("=".join(parts[:count]), Path("=".join(parts[count:]))) for count in range(len(parts))]
    label, path = next((split for split in splits if os.path.exists(split[1])), splits[-1])
    file = path if os.path.isfile(path) else path / "metrics.jsonl"
    is_of_a_run = file.name == "metrics.jsonl" and os.path.isdir(file.parent)
    return label or (Path(os.path.realpath(file.parent)).name if is_of_a_run else file.stem), file


def runs_by_label(arguments: list[str]) -> dict[str, Path]:
    """Return label -> metrics file; raises MonitorError where two have the same label."""
    runs: dict[str, Path] = {}
    for label, file in map(labelled, arguments):
        if label in runs:
            raise MonitorError(f"{runs[label]} and {file} are both labelled {label}; give NAME=PATH for one of them")
        runs[label] = file
    return runs
