"""Paths of the files of one run, and the start of a run in a folder that another one has used.

Only names and moves of files: what is written into them belongs to their writers (metrics.py, plots.py, the loops).
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from rlhf_megatron.errors import MonitorError
from rlhf_megatron.recipe.recipe import check_run_name
from rlhf_megatron.untrusted import kind_of, reason_of

# What is read or added to when a run goes on; whatever else is written replaces what was there.
_FILES = ("metrics.jsonl", "metrics.csv", "recovery.jsonl", "trackers.json")
_FOLDERS = (
    "samples",
    "rollouts",
    "plots",
    "checkpoints",
    "export",
    "tensorboard",
    "timeline",
    "profile",
    "logs",
    "journal",
)


class RunFolder:
    """The folder ``root/name`` of one run, with a path for everything that a run writes.

    Making the object touches no file, so every rank may hold one; ``prepare`` is called once, on one rank.
    """

    def __init__(self, root: str | Path, name: str) -> None:
        try:
            check_run_name(name)
        except ValueError as error:
            raise MonitorError(f"name: {error}") from None
        self.name = name
        self.path = Path(root) / name

    @property
    def recipe(self) -> Path:
        """recipe.yaml: the resolved recipe; earlier ones: see recipe_versions.py."""
        return self.path / "recipe.yaml"

    @property
    def environment(self) -> Path:
        """environment.json: versions, hardware, git state, command line."""
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        """metrics.jsonl: one object per step."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """tensorboard/: the folder of event files."""
        return self.path / "tensorboard"

    @property
    def trackers(self) -> Path:
        """trackers.json: what services of trackers call this run."""
        return self.path / "trackers.json"

    @property
    def samples(self) -> Path:
        """samples/: the folder of step-N.parquet."""
        return self.path / "samples"

    @property
    def plots(self) -> Path:
        """plots/: the folder of *.png."""
        return self.path / "plots"

    @property
    def report(self) -> Path:
        """report.html: the page of the run."""
        return self.path / "report.html"

    @property
    def draft_head(self) -> Path:
        """draft_head/: the folder of the config.json by which vLLM makes a head that drafts."""
        return self.path / "draft_head"

    @property
    def checkpoints(self) -> Path:
        """checkpoints/: the folder of step-N/ and ``latest``."""
        return self.path / "checkpoints"

    @property
    def journal(self) -> Path:
        """journal/: step-N/ of steps that are not saved yet, trajectories of several turns as they go."""
        return self.path / "journal"

    def sample_file(self, step: int) -> Path:
        """Return samples/step-N.parquet, the rows saved by the evaluation after step N."""
        return self.samples / f"step-{step}.parquet"

    def rollout_file(self, step: int) -> Path:
        """Return rollouts/step-N.parquet, rows that step N learned from."""
        return self.path / "rollouts" / f"step-{step}.parquet"

    def plot_file(self, name: str) -> Path:
        """Return plots/NAME.png."""
        return self.plots / f"{name}.png"

    def timeline_file(self, step: int) -> Path:
        """Return timeline/step-N.json, what all ranks did in step N; step 0 is the start of the run."""
        return self.path / "timeline" / f"step-{step}.json"

    def profile_file(self, step: int, phase: str, time: int, rank: int) -> Path:
        """Return profile/step-N-PHASE-rank-R.json.gz, the kernels of a phase; where it comes again, with its count."""
        again = f"-{time}" if time > 1 else ""
        return self.path / "profile" / f"step-{step}-{phase}{again}-rank-{rank}.json.gz"

    def checkpoint(self, step: int) -> Path:
        """Return checkpoints/step-N, the folder of the training state after step N."""
        return self.checkpoints / f"step-{step}"

    def export(self, step: int) -> Path:
        """Return export/step-N, the folder of the weights after step N in Hugging Face's format."""
        return self.path / "export" / f"step-{step}"

    def prepare(self, resume: bool = False) -> list[Path]:
        """Make the folder and its subfolders; return what an earlier run's metrics were moved to.

        With ``resume`` the metrics go on in the same file (a reader takes the last value of a step that was run twice).
        Without it those of an earlier run (metrics.jsonl, metrics.csv, tensorboard/, trackers.json) and its recipes are
        moved aside, as metrics.previous-K.jsonl and so on: two runs are never mixed and no number is lost.
        Raises MonitorError if the folder cannot be written, or has something else where a file or folder belongs.
        """
        self._check_kinds()
        try:
            for folder in (self.path, self.samples, self.plots):
                folder.mkdir(parents=True, exist_ok=True)
            return [] if resume else self._move_metrics_aside()
        except OSError as error:
            raise MonitorError(
                f"run_root: cannot write the run folder {self.path}: {error.strerror or error}; choose another run_root"
            ) from error

    def _check_kinds(self) -> None:
        """Refuse a pipe in place of a file, a file in place of a folder, and the like."""
        for name, wanted in [*((name, stat.S_IFREG) for name in _FILES), *((name, stat.S_IFDIR) for name in _FOLDERS)]:
            path = self.path / name
            if not os.path.lexists(path):
                continue
            try:
                mode = path.stat().st_mode
            except OSError as error:  # a link to nothing
                raise MonitorError(f"{path}: cannot be used ({reason_of(error)}); move it away") from error
            if stat.S_IFMT(mode) != wanted:
                kind = "a file" if stat.S_ISREG(mode) else kind_of(mode)
                belongs = "a folder" if wanted == stat.S_IFDIR else "a file"
                raise MonitorError(f"{path}: is {kind}, and {belongs} of the run belongs there; move it away")

    def move_aside(self, path: Path, number: int | None = None) -> Path:
        """Rename a file or folder of the run as NAME.previous-K, with the next K if ``number`` is none; return it."""
        number = self._next_number() if number is None else number
        moved = path.with_name(f"{path.stem}.previous-{number}{path.suffix}")
        os.rename(path, moved)
        return moved

    def _move_metrics_aside(self) -> list[Path]:
        recipes = sorted(path for path in self.path.glob("recipe*.yaml") if not _number_of(path))
        written = (self.metrics, self.metrics.with_suffix(".csv"), self.tensorboard, self.trackers, *recipes)
        number = self._next_number()
        return [self.move_aside(path, number) for path in written if path.exists()]

    def _next_number(self) -> int:
        return 1 + max((_number_of(path) for path in self.path.iterdir()), default=0)


def _number_of(path: Path) -> int:
    """Return K of NAME.previous-K, 0 for other names."""
    match = re.fullmatch(r"[\w.-]+\.previous-([0-9]+)(\.\w+)?", path.name)
    return int(match.group(1)) if match else 0
