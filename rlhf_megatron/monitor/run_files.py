"""Files of a run's folder beside its metrics, as far as they can be read: a page is made of what there is."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import yaml

from rlhf_megatron.errors import MonitorError
from rlhf_megatron.untrusted import is_within_levels, opened, parse_json, read_bytes, reason_of, shown

_SAMPLE_COLUMNS = ("prompt", "response", "ground_truth", "score", "truncated", "unscored")
_SAMPLE_FILE = re.compile(r"step-([0-9]{1,15})\.parquet")
# A resolved recipe has no more levels, and some ten kilobytes.
_MOST_LEVELS, _MOST_BYTES = 12, 1 << 22


class _PlainLoader(yaml.SafeLoader):
    """YAML without aliases, which no resolved recipe has and which can stand for far more than the file holds."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("has an alias")
        return super().compose_node(parent, index)


class FilesOfRun:
    """Reader of the files of one run; what is there and cannot be read is a line of ``problems``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.problems: list[str] = []

    def text(self, name: str) -> str:
        """Return a file's text for people, empty where there is none or it cannot be read."""
        try:
            return read_bytes(self._folder / name, MonitorError, _MOST_BYTES).decode("utf-8", errors="replace")
        except MonitorError as error:
            if os.path.lexists(self._folder / name):
                self._note(str(error))
            return ""

    def recipe(self, name: str = "recipe.yaml") -> dict[str, Any]:
        """Return a file's recipe, empty where it is none."""
        try:
            content = yaml.load(self.text(name), _PlainLoader)  # a safe loader
        except (ValueError, RecursionError, yaml.YAMLError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else reason_of(error)
            self._note(f"{self._folder / name}: is no recipe ({reason})")
            return {}
        return self._mapping(name, content)

    def environment(self) -> dict[str, Any]:
        """Return environment.json, empty where it is none."""
        path, text = self._folder / "environment.json", self.text("environment.json")
        try:
            return self._mapping("environment.json", parse_json(text, str(path), MonitorError) if text else None)
        except MonitorError as error:
            self._note(str(error))
            return {}

    def _mapping(self, name: str, value: Any) -> dict[str, Any]:
        if isinstance(value, dict) and is_within_levels(value, _MOST_LEVELS):
            return value
        if value is not None:
            self._note(f"{self._folder / name}: is not a mapping of keys to values")
        return {}

    def events(self) -> list[dict[str, Any]]:
        """Return the lines of recovery.jsonl, without those that are damaged."""
        events, damaged = [], 0
        for line in self.text("recovery.jsonl").splitlines():
            try:
                event = parse_json(line, "", MonitorError)
            except MonitorError:
                event = None
            if isinstance(event, dict) and isinstance(event.get("what"), str):
                events.append(event)
            else:
                damaged += bool(line.strip())
        if damaged:
            self._note(f"{self._folder / 'recovery.jsonl'}: {damaged} damaged lines")
        return events

    def newest_samples(self, count: int) -> tuple[list[dict[str, Any]], int | None]:
        """Return up to so many rows of the newest file of samples and its step; none where it cannot be read."""
        samples = self._folder / "samples"
        names = os.listdir(samples) if samples.is_dir() else []
        steps = {int(match.group(1)): name for name in names if (match := _SAMPLE_FILE.fullmatch(name))}
        if not steps:
            return [], None
        path = samples / steps[max(steps)]
        try:
            with opened(path, MonitorError) as file:
                batches = pyarrow.parquet.ParquetFile(file).iter_batches(count, columns=list(_SAMPLE_COLUMNS))
                rows = next(iter(batches), None)
                answers = rows.to_pylist() if rows is not None else []
        except (MonitorError, pyarrow.ArrowException, ValueError, OverflowError) as error:
            self._note(str(error) if isinstance(error, MonitorError) else f"{path}: is no parquet ({reason_of(error)})")
            return [], None
        if any(row.keys() != set(_SAMPLE_COLUMNS) for row in answers):
            self._note(f"{path}: has not the columns {', '.join(_SAMPLE_COLUMNS)}")
            return [], None
        return answers, max(steps)

    def _note(self, problem: str) -> None:
        line = shown(problem, 500)
        if line not in self.problems:
            self.problems.append(line)


def section_of(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the mapping under a key, empty where there is none."""
    value = values.get(key)
    return value if isinstance(value, dict) else {}
