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
        plot_comparison(dict(map(labelled, options.runs)), options.output, options.title)
    except MonitorError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(options.output)
    return 0


def labelled(text: str) -> tuple[str, Path]:
    """(label, metrics file) of an argument."""
    label, _, path = text.rpartition("=")
    place = Path(path)
    return label or place.stem, place / "metrics.jsonl" if place.is_dir() else place


if __name__ == "__main__":
    sys.exit(main())
