"""Times a regathering, beside what the links and the memory allow and beside gathering whole tensors.

    python tools/bench/regather.py [--gpus 1 2 4] [--rounds 3] [--output docs/results/regather.json] [--plot FILE.png]

Shapes of real models with random weights, plain tensors for shards on both ends, and for each pair of layouts in one
run: this package's regathering; the floor, which is the bytes that a rank lacks over the measured bandwidth of a link,
or the bytes that it moves within itself over that of a copy, whichever takes longer; and the usual way
(``whole_tensors.py``). Both must leave the same bits. The ranks of each model (``regather_measure.py``) are processes
of their own, started anew for each round, since processes differ by more than the repeats within one; a row holds the
medians of its rounds. What was measured is written after each round, so that one failure costs no more than its round.
Rows of other models and numbers of GPUs in the output stay there.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from launching import run_on_ranks
from regather_measure import SHAPES
from reports import exit_status, missed_by, model_and_gpus, rows_of, write_report

SECONDS_FOR_ONE_ROUND = 75.0
TIMES_THE_FLOOR = 1.25
LARGE = ("7B", "32B", "30B-A3B")  # a fixed cost counts for little


def main() -> int:
    """Start the ranks of each model, round after round; return 1 where a target is missed or a round failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ranks = [torch.cuda.device_count() or 2]
    parser.add_argument("--gpus", type=int, nargs="+", default=ranks, help="numbers of ranks; default: %(default)s")
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), help="default: all, on a CPU the toys")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each model; default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("docs/results/regather.json"), help="default: %(default)s")
    parser.add_argument("--plot", type=Path, help="default: the output's name, as .png")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: must be at least 1")
    on_gpu = torch.cuda.is_available()
    models = options.models or [name for name in SHAPES if name.startswith("toy") != on_gpu]
    measured = [(model, gpus) for gpus in options.gpus for model in models]
    rows = [row for row in rows_of(options.output) if (row["model"], row["gpus"]) not in measured]
    found: list[dict[str, Any]] = []
    for model, gpus in measured:
        of_others, rounds = found, list[list[dict[str, Any]]]()
        for _ in range(options.rounds):
            rounds.append(one_round(model, gpus))
            found = [*of_others, *of_rounds(rounds)]
            write_report(options.output, {"rows": [*rows, *found]})
    status = exit_status(misses(found))
    drawn = [row for row in (*rows, *found) if "failed" not in row]
    draw(drawn, options.plot or options.output.with_suffix(".png"))
    return status


def one_round(model: str, gpus: int) -> list[dict[str, Any]]:
    """Return the rows of all pairs of layouts from ranks of their own, and one more with ``failed`` where these did not
    get to the end."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        arguments = [model, str(output)]
        failed = run_on_ranks(gpus, Path(__file__).with_name("regather_measure.py"), arguments, SECONDS_FOR_ONE_ROUND)
        return [*rows_of(output), *([{"model": model, "gpus": gpus, "failed": failed}] if failed else [])]


def of_rounds(rounds: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return one row for each pair of layouts, with the medians of its rounds and ``times_the_floor`` of each.

    A pair that failed in one of the rounds has that row.
    """
    of_pair: dict[str | None, list[Mapping[str, Any]]] = {}
    for row in (row for each in rounds for row in each):
        of_pair.setdefault(row.get("layouts"), []).append(row)
    merged = []
    for rows in of_pair.values():
        row = dict(next((row for row in rows if "failed" in row), rows[0]))
        if "failed" not in row:
            figures = [name for name, value in row.items() if isinstance(value, float)]
            row |= {name: statistics.median(each[name] for each in rows) for name in figures}
            row["times_the_floor_of_rounds"] = [each["times_the_floor"] for each in rows]
        merged.append(row)
    return merged


def misses(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return missed targets, in words."""

    def texts(row: Mapping[str, Any]) -> Iterator[str]:
        if row["equal"] and row["bytes_received"]:
            yield f"{row['bytes_received']} bytes cross a link between equal layouts"
        if not row["model"].startswith("toy") and row["times_the_floor"] > TIMES_THE_FLOOR:
            yield f"{row['times_the_floor']:.2f} times the floor, above {TIMES_THE_FLOOR:g}"
        if row["model"] not in LARGE:
            return
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
