"""Write a page of a run, or draw the curves of several into one picture.

    python tools/report.py runs/one                                            # runs/one/report.html
    python tools/report.py runs/one runs/other --output comparison.html
    python tools/report.py runs/one baseline=runs/other --output curves.png

A page has everything in one file: what became of the run, its curves, evaluations, answers, faults, recipe; of several
runs, where they and their recipes differ. A picture has the curves alone, and takes metrics files too. Runs are
labelled by their folders; NAME=PATH gives one a label of your own.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rlhf_megatron.errors import MonitorError
from rlhf_megatron.monitor.page import write_page
from rlhf_megatron.monitor.plots import plot_comparison, plot_run
from rlhf_megatron.monitor.run_choice import runs_by_label
from rlhf_megatron.runtime.command import ArgumentParser, command
from rlhf_megatron.untrusted import reason_of, shown


@command
def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 0 done, 2 for input that is not right."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder, or NAME=PATH")
    parser.add_argument("--output", type=Path, help="FILE.html or FILE.png; default: report.html of the only run")
    parser.add_argument("--title", default="", help="default: the labels")
    options = parser.parse_args(arguments)
    try:
        runs = runs_by_label(options.runs)
        output = options.output or default_output(list(runs.values()))
        if output.suffix == ".html":
            write_page({label: file.parent for label, file in runs.items()}, output, options.title)
        elif output.suffix == ".png":
            draw(runs, output, options.title)
        else:
            raise MonitorError(f"--output {output}: must end in .html or .png")
    except OSError as error:
        raise MonitorError(f"{shown(error.filename)}: {reason_of(error)}") from error
    print(output)
    return 0


def default_output(files: list[Path]) -> Path:
    """Return the page beside the metrics of the only run; raises MonitorError where there are several."""
    if len(files) > 1:
        raise MonitorError("--output: say where the page of several runs is to be, such as comparison.html")
    return files[0].parent / "report.html"


def draw(runs: dict[str, Path], output: Path, title: str) -> None:
    """Draw one run with its phases, or several in the same panels."""
    if len(runs) == 1:
        [(label, file)] = runs.items()
        plot_run(file, output, title or label)
    else:
        plot_comparison(runs, output, title)


if __name__ == "__main__":
    sys.exit(main())
