"""Every model family beside transformers and vLLM, as its tests measure it: docs/results/models.md.

    python tools/bench/families.py [--folder docs/results]
    python tools/bench/families.py --draw                     # the page alone, from its files

On CPUs these are the tests of parity and rollout in tests/parallel with all of the grid, in some fifteen minutes, and
models.json; on a machine with a GPU those of tests/gpu, and models_gpu.json. The page beside them shows both.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from reports import exit_status, write_report

from rlhf_megatron.rollout.vllm.process_environment import has_gpu

TESTS = Path(__file__).resolve().parents[2] / "tests"
ON_CPU = tuple(
    f"parallel/test_{name}.py" for name in ("family_rollout", "family_parity", "parity", "published_configs")
)
ON_GPU = ("gpu/test_families_on_gpu.py",)
FILES = ("models.json", "models_gpu.json")
PACKAGES = ("torch", "megatron-core", "transformer-engine", "transformers", "vllm")
ABOUT = """
Small random models (four layers of 64, four heads of 32, two key-value heads, a vocabulary of 250) with the fields of
their families, as the tests measure them; every number is the largest difference, an empty cell was not run. [What is
read](../models.md).

- **trained**: parameters after two steps beside `torch.optim.AdamW`'s, over all layouts
- **rolled out**: logprobs of vLLM's samples beside the trainer's, after each of three updates, from the trainer's
  layout to that of a replica of vLLM
- **parity**: logprobs beside transformers', float32, over all layouts
- **export**: of the loaded model, its files beside those that it came from
- **layouts tried**: parity in each; from the second step on in the layout behind "then", by way of a checkpoint
"""


class Measurements:
    """A plugin of pytest: the property ``measured`` of each test, written to ``path`` as they end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what a test has measured, or why it has not."""
        name = report.nodeid.rpartition("/")[2]
        if report.failed:
            self.failed.append(name)
        measured = dict(report.user_properties).get("measured")
        if report.when != "call" or report.failed or not isinstance(measured, dict):
            return
        reason = {"skipped": str(report.longrepr[2])} if isinstance(report.longrepr, tuple) else {}
        self.rows.append({"test": name, **measured, **reason})
        write_report(self.path, {"rows": self.rows, "failed": self.failed})


def page(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return the page that shows the rows of ``reports``."""
    rows = [row | {"hardware": _device(report)} for report in reports for row in report["rows"]]
    configs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["compared"] != "published":
            configs.setdefault((row["model_type"], _fields(row["config"])), []).append(row)
    tried = [_config_cells(*key, configs[key]) for key in sorted(configs)]
    published = [
        (row["name"], f"`{row['model_type']}`", _figure(row["logprobs"]))
        for row in sorted(rows, key=lambda row: (row["model_type"], row.get("name", "")))
        if row["compared"] == "published"
    ]
    return "\n".join(
        [
            "# Model families\n" + ABOUT,
            *(f"- {_surroundings(report)}" for report in reports),
            "",
            *_table(("model", "config", "trained", "rolled out", "parity", "export", "layouts tried"), tried),
            "",
            "## Published configs",
            "",
            "Six layers and small widths, every other field as published; logprobs beside transformers', one rank.",
            "",
            *_table(("config", "model", "parity"), published),
            "",
        ]
    )


def _config_cells(model_type: str, fields: str, rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the cells of a config that was tried."""
    trained = [row for row in rows if row["compared"] == "trained"]
    layouts: dict[str, float] = {}
    for row in trained:
        layouts[row["layout"]] = max(layouts.get(row["layout"], 0.0), row["logprobs"])
    return (
        f"`{model_type}`",
        fields,
        _largest(row["parameters"] for row in trained),
        _rolled_out([row for row in rows if row["compared"] == "rolled out"]),
        _largest(layouts.values()),
        ", ".join(sorted({row["export"] for row in trained})),
        ", ".join(f"{_short(layout)} {_figure(value)}" for layout, value in layouts.items()),
    )


def _rolled_out(rows: Sequence[Mapping[str, Any]]) -> str:
    where: dict[str, list[str]] = {}
    for row in rows:
        where.setdefault(f"{row['hardware']} {row['dtype']}", []).append(_of_layout(row))
    return "; ".join(f"{name}: {', '.join(layouts)}" for name, layouts in where.items())


def _of_layout(row: Mapping[str, Any]) -> str:
    layout = _short(row["layout"]) + (" with CUDA graphs" if row.get("graphs") else "")
    if "skipped" in row:
        return f"{layout} not run ({row['skipped'].removeprefix('Skipped: ')})"
    typical = "" if row["dtype"] == "float32" else f" (median {_figure(row['median'])})"
    return f"{layout} {_figure(row['logprobs'])}{typical}"


def _short(layout: str) -> str:
    short = layout.removesuffix(" to one rank") if layout.startswith("one rank") else layout
    return short.replace("cp_comm_type=", "").replace("sequence_parallel=True", "SP")


def _fields(config: Mapping[str, Any], prefix: str = "") -> str:
    """Return the fields of a config, those of its objects behind a point."""
    parts = []
    for field, value in config.items():
        if isinstance(value, Mapping):
            parts.append(_fields(value, f"{prefix}{field}."))
        else:
            parts.append(f"{prefix}{field} {json.dumps(value)}")
    return ", ".join(part for part in parts if part)


def _device(report: Mapping[str, Any]) -> str:
    return "CPU" if "no GPU" in report["hardware"] else report["hardware"].removeprefix("NVIDIA ")


def _surroundings(report: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {report['versions'][name]}" for name in PACKAGES if report["versions"].get(name))
    failed = f"; failed: {', '.join(report['failed'])}" if report["failed"] else ""
    return f"`python {report['command']}`, {report['date']}, {report['hardware']}: {versions}{failed}"


def _largest(values: Iterable[float]) -> str:
    return _figure(max(values, default=None))


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]


def draw(folder: Path) -> None:
    """Write the page of the files in ``folder``."""
    files = [folder / name for name in FILES if (folder / name).exists()]
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    (folder / "models.md").write_text(page(reports), encoding="utf-8")


def main() -> int:
    """Run the tests and write their results; return 1 where one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, default=Path("docs/results"), help="of the results; default: %(default)s"
    )
    parser.add_argument("--workers", type=int, default=3, help="processes that test on CPUs; default: %(default)s")
    parser.add_argument("--draw", action="store_true", help="write models.md alone")
    options = parser.parse_args()
    failed: list[str] = []
    if not options.draw:
        on_gpu = has_gpu()
        measurements = Measurements(options.folder.resolve() / FILES[on_gpu])
        files = [str(TESTS / file) for file in (ON_GPU if on_gpu else ON_CPU)]
        several = options.workers > 1 and not on_gpu
        spread = [f"--numprocesses={options.workers}", "--dist=loadfile", "--no-loadscope-reorder"] if several else []
        status = pytest.main(["-m", "", *spread, *files], plugins=[measurements])
        failed = measurements.failed or ([] if status == pytest.ExitCode.OK else [f"pytest ended with {status!r}"])
    draw(options.folder)
    return exit_status(failed)


if __name__ == "__main__":
    sys.exit(main())
