"""Draw the curves of several runs into one picture.

    python tools/compare_runs.py runs/one runs/other --output comparison.png

Each run is a run folder or a metrics file; NAME=PATH gives it a label of your own.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlhf_megatron.monitor.errors import MonitorError
from rlhf_megatron.monitor.plots import plot_comparison


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 done, 2 for input that is not right."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder or metrics file, or NAME=PATH")
    parser.add_argument("--output", type=Path, required=True, help="PNG to write")
    parser.add_argument("--title", default="", help="default: the labels")
    options = parser.parse_args(arguments)
    try:
        plot_comparison(by_label(options.runs), options.output, options.title)
    except MonitorError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(options.output)
    return 0


def labelled(text: str) -> tuple[str, Path]:
    """(label, metrics file) of an argument. "=" may stand in names and paths: the longest path that exists is taken."""
    parts = text.split("=")
    splits = [("=".join(parts[:count]), Path("=".join(parts[count:]))) for count in range(len(parts))]
    label, place = next((split for split in splits if split[1].exists()), splits[-1])
    file = place / "metrics.jsonl" if place.is_dir() else place
    return label or (file.resolve().parent.name if file.name == "metrics.jsonl" else file.stem), file


def by_label(arguments: list[str]) -> dict[str, Path]:
    """label -> metrics file; raises MonitorError where two have the same label."""
    runs: dict[str, Path] = {}
    for label, file in map(labelled, arguments):
        if label in runs:
            raise MonitorError(f"{runs[label]} and {file} are both labelled {label}; give NAME=PATH for one of them")
        runs[label] = file
    return runs


if __name__ == "__main__":
    sys.exit(main())
