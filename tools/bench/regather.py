"""Times a regathering, beside what the links and the memory allow and beside gathering whole tensors.

    python tools/bench/regather.py [--gpus 1 2 4] [--output docs/results/regather.json] [--plot FILE.png]

Shapes of real models with random weights, plain tensors for shards on both ends, and for each pair of layouts in one
run: this package's regathering; the floor, which is the bytes that a rank lacks over the measured bandwidth of a link,
or the bytes that it moves within itself over that of a copy, whichever takes longer; and the usual way
(``whole_tensors.py``). Both must leave the same bits. The ranks of each model (``regather_measure.py``) are processes
of their own, and what was measured is written after each pair, so that one failure costs no more than its model. Rows
of other models and numbers of GPUs in the output stay there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from launching import run_on_ranks
from regather_measure import SHAPES, append
from reports import exit_status, missed_by, model_and_gpus, rows_of, write_report

SECONDS_FOR_ONE_MODEL = 75.0
HELD_TO_TARGETS = ("7B", "32B", "30B-A3B")


def main() -> int:
    """Start the ranks of each model, one after the other; return 1 where a target is missed or a model failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ranks = [torch.cuda.device_count() or 2]
    parser.add_argument("--gpus", type=int, nargs="+", default=ranks, help="numbers of ranks; default: %(default)s")
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), help="default: all, on a CPU the toys")
    parser.add_argument("--output", type=Path, default=Path("docs/results/regather.json"), help="default: %(default)s")
    parser.add_argument("--plot", type=Path, help="default: the output's name, as .png")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    models = options.models or [name for name in SHAPES if name.startswith("toy") != on_gpu]
    measured = [(model, gpus) for gpus in options.gpus for model in models]
    rows = rows_of(options.output)
    write_report(options.output, {"rows": [row for row in rows if (row["model"], row["gpus"]) not in measured]})
    script = Path(__file__).with_name("regather_measure.py")
    for model, gpus in measured:
        arguments = [model, str(options.output)]
        failed = run_on_ranks(gpus, script, arguments, SECONDS_FOR_ONE_MODEL)
        if failed:
            append(options.output, {"model": model, "gpus": gpus, "failed": failed})
    rows = rows_of(options.output)
    status = exit_status(misses([row for row in rows if (row["model"], row["gpus"]) in measured]))
    draw([row for row in rows if "failed" not in row], options.plot or options.output.with_suffix(".png"))
    return status


def misses(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return missed targets, in words."""

    def texts(row: Mapping[str, Any]) -> Iterator[str]:
        if row["equal"] and row["bytes_received"]:
            yield f"{row['bytes_received']} bytes cross a link between equal layouts"
        if row["model"] not in HELD_TO_TARGETS:
            return
        if row["times_the_floor"] > 1.3:
            yield f"{row['times_the_floor']:.2f} times the floor, above 1.3"
        if row["bytes_received"] and row["times_faster"] < 10:
            yield f"{row['times_faster']:.1f} times as fast as whole tensors, below 10"
        if row["extra_mb"] > 256 + row["rollout_bytes"] / 2**20 / 100:
            yield f"{row['extra_mb']:.0f} MB on top, above 256 MB + 1%"

    return missed_by(rows, lambda row: f"{model_and_gpus(row)} {row.get('layouts', '')}".strip(), texts)


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw bars of seconds, on a logarithmic axis: floor, regathering, whole tensors."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.45 * max(1, len(rows))))
    kinds = {"floor": "#94a3b8", "regather": "#ec4899", "whole_tensors": "#2563eb"}
    for number, (kind, colour) in enumerate(kinds.items()):
        seconds = [row[f"{kind}_seconds"] * 1000 for row in rows]
        positions = [index + 0.27 * (number - 1) for index in range(len(rows))]
        axes.barh(positions, seconds, height=0.25, color=colour, label=kind.replace("_", " "))
    names = [f"{row['model']}, {row['gpus']} GPU{'s' * (row['gpus'] > 1)}:  {row['layouts']}" for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("ms")
    figure.legend(loc="upper right", ncols=len(kinds), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.3 / figure.get_figheight()))
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
