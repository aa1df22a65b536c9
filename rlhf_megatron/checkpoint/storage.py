"""Checkpoints on disk: a folder per step that appears whole or not at all, checked before it is trusted.

    checkpoints/step-40/rank-00000.safetensors ...   what each rank wrote
    checkpoints/step-40/manifest.json                written last: size and digest of every file, and the run's state
    checkpoints/latest                               the name of the newest one, for people and scripts
    checkpoints/best                                 the name and metric of the best one, in JSON, where one is kept

Nothing is pickled: tensors are safetensors, everything else is JSON. This file knows files only; the ranks' agreement
is in checkpoint/manager.py and what a role's tensors mean in checkpoint/role_state.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlhf_megatron.checkpoint.manifest import NAME, WrittenFile, manifest_text, new_digest
from rlhf_megatron.checkpoint.manifest import read_manifest as read_manifest
from rlhf_megatron.durable import move_aside, remove, sync, take_name, write_text
from rlhf_megatron.durable import partial_of as partial_folder
from rlhf_megatron.errors import CheckpointError
from rlhf_megatron.models.hf_export import write_safetensors
from rlhf_megatron.runtime import faults
from rlhf_megatron.untrusted import kind_of, opened, parse_json, read_json, read_text, reason_of, shown

_LATEST, _BEST = "latest", "best"
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_CHUNK_BYTES = 1 << 24
_MOST_BYTES_OF_A_POINTER = 1 << 16
_MOST_DIGITS = 255  # as many as a file's name can have; Python converts no more than some thousands


@dataclasses.dataclass(frozen=True)
class MetricValue:
    """The value of a checkpoint by a metric, of which more (max) or less (min) is better."""

    metric: str
    mode: Literal["max", "min"]
    value: float

    def is_better_than(self, other: MetricValue) -> bool:
        """Return whether it is; values of another metric do not count any more."""
        if (self.metric, self.mode) != (other.metric, other.mode):
            return True
        return self.value > other.value if self.mode == "max" else self.value < other.value


def write_tensors(folder: Path, name: str, tensors: Mapping[str, Tensor], about: Any) -> WrittenFile:
    """Write CPU tensors, with JSON ``about`` them, as a file of the unfinished checkpoint ``folder``; synced to disk.

    Raises OSError where the disk is full or not writable.
    """
    path = partial_folder(folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_safetensors(path, tensors, {"about": json.dumps(about)})
    sync(path)
    return WrittenFile(name, path.stat().st_size, _digest(path))


def publish(
    folder: Path, files: list[WrittenFile], state: Mapping[str, Any], keep: int, metric: MetricValue | None = None
) -> None:
    """Make the finished checkpoint visible under its name, move ``latest``, and delete all but the ``keep`` newest.

    With ``metric`` it takes part in a comparison; the best one, which ``best`` names, is kept too.
    Call it on one rank, when every file is on disk. Raises OSError where the disk fails; then nothing is visible.
    """
    partial = partial_folder(folder)
    (partial / NAME).write_text(manifest_text(files, state), encoding="utf-8")
    sync(partial / NAME)
    sync(partial)
    take_name(partial, folder)  # where the step was run again after a resume from an earlier one, there is an older one
    faults.at("publish", step_of(folder))
    _point(folder.parent / _LATEST, folder.name)
    best = best_of(folder.parent)
    if metric and math.isfinite(metric.value) and (best is None or best[0] == folder or metric.is_better_than(best[1])):
        best = folder, metric
        _point(folder.parent / _BEST, json.dumps({"checkpoint": folder.name, **dataclasses.asdict(metric)}))
    for old in list_checkpoints(folder.parent)[keep:]:
        if best is None or old != best[0]:
            with contextlib.suppress(OSError):
                remove(old)


def _point(path: Path, text: str) -> None:
    """Have a small file say ``text``, whole or not at all."""
    if path.is_dir() and not path.is_symlink():  # a person's, perhaps
        move_aside(path)
    write_text(path, text + "\n")


def best_of(folder: Path) -> tuple[Path, MetricValue] | None:
    """Return the best checkpoint in ``folder`` and its metric, as the file ``best`` has it, if both are there."""
    with contextlib.suppress(CheckpointError):
        return _read_best(folder)
    return None


class _Best(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    checkpoint: str
    metric: str
    mode: Literal["max", "min"]
    value: float


def _read_best(folder: Path) -> tuple[Path, MetricValue] | None:
    path = folder / _BEST
    if not os.path.lexists(path):
        return None
    try:
        best = _Best.model_validate(read_json(path, CheckpointError, _MOST_BYTES_OF_A_POINTER))
    except ValidationError as error:
        raise CheckpointError(f"{path}: does not name a checkpoint, a metric, its mode and value") from error
    checkpoint = folder / best.checkpoint
    if checkpoint not in list_checkpoints(folder):
        raise CheckpointError(f"{path}: names {shown(best.checkpoint)}, which is not there")
    return checkpoint, MetricValue(best.metric, best.mode, best.value)


def _latest_step(folder: Path) -> int | None:
    """Return the step that ``latest`` names, None where there is no such file."""
    path = folder / _LATEST
    if not os.path.lexists(path):
        return None
    text = read_text(path, CheckpointError, _MOST_BYTES_OF_A_POINTER).strip()
    match = _STEP.fullmatch(text)
    if match is None:
        raise CheckpointError(f"{path}: does not name a checkpoint such as step-40")
    return _number(match)


def _number(match: re.Match[str]) -> int:
    return int(match.group(1)[:_MOST_DIGITS])


def problems_in(folder: Path) -> list[str]:
    """Return problems of ``folder``, a line each: pointers and names that are not as a run leaves them, and are passed
    over.

    Raises CheckpointError where ``folder`` is no folder: nothing could be saved there.
    """
    if not folder.is_dir():
        if os.path.lexists(folder):
            raise CheckpointError(f"{folder}: is not a folder, so nothing can be saved there; move it away")
        return []
    problems = []
    try:
        latest = _latest_step(folder)
        if latest is not None and latest not in map(step_of, list_checkpoints(folder)):
            problems.append(f"{folder / _LATEST}: names step-{latest}, which is not there")
    except CheckpointError as error:
        problems.append(f"{error}; it is passed over")
    try:
        _read_best(folder)
    except CheckpointError as error:
        problems.append(f"{error}; it is passed over")
    odd = [path.name for path in folder.iterdir() if path.name.startswith("step-") and not _STEP.fullmatch(path.name)]
    return problems + [f"{folder}: {shown(name)} is not a checkpoint's name; it is passed over" for name in sorted(odd)]


def forget_best(folder: Path) -> None:
    """Have the checkpoints of a run that begins anew compared among themselves."""
    path = folder / _BEST
    if path.is_dir() and not path.is_symlink():
        move_aside(path)
    path.unlink(missing_ok=True)


def discard(folder: Path) -> None:
    """Delete what an unfinished save has left."""
    with contextlib.suppress(OSError):
        remove(partial_folder(folder))


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder``, finished ones only, the newest step first.

    Steps beyond the one that ``latest`` names come last: they are of a run that was begun anew or gone back.
    """
    if not folder.is_dir():
        return []
    named = [(_number(match), path) for path in folder.iterdir() if (match := _STEP.fullmatch(path.name))]
    latest: float | None = None
    with contextlib.suppress(CheckpointError):
        latest = _latest_step(folder)
    newest = math.inf if latest is None else latest
    return [path for _, path in sorted(named, key=lambda each: (each[0] > newest, -each[0]))]


def step_of(folder: Path) -> int:
    """Return the step in a checkpoint's name; raises CheckpointError for another name."""
    match = _STEP.fullmatch(folder.name)
    if match is None:
        raise CheckpointError(f"{shown(folder)}: a checkpoint's folder is called step-N; name one in checkpoints/")
    return _number(match)


def damage(folder: Path, files: list[WrittenFile], reads: bool = True) -> str | None:
    """Describe what is wrong with these files of a checkpoint, or returns None; ``reads`` them whole for that."""
    for file in files:
        path = folder / file.name
        if not path.exists():
            return f"{path}: is missing"
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return f"{path}: is not a regular file ({kind_of(status.st_mode)})"
        if status.st_size != file.bytes:
            return f"{path}: has {status.st_size} bytes and was written with {file.bytes}"
        if reads and _digest(path) != file.digest:
            return f"{path}: its content has changed since it was written"
        try:
            with TensorFile(path) as opened_file:
                _ = opened_file.about
        except CheckpointError as error:  # written so
            return str(error)
    return None


class TensorFile:
    """Reader of one file of a checkpoint without loading all of it; a context manager.

    It is opened when it is first asked for something: a rank needs few of the files of many ranks. Every method raises
    CheckpointError where the file cannot be opened, or does not say in JSON what it is about.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stack = contextlib.ExitStack()

    @functools.cached_property
    def _open(self) -> Any:
        try:
            with opened(self.path, CheckpointError):  # no pipe or device, which safetensors would read
                pass
            return self._stack.enter_context(safe_open(self.path, framework="pt"))
        except (OSError, SafetensorError, ValueError) as error:
            raise self._unreadable(error) from error

    @functools.cached_property
    def about(self) -> dict[str, Any]:
        """The description that it was written with."""
        try:
            text = (self._open.metadata() or {})["about"]
        except KeyError as error:
            raise self._unreadable(error) from error
        about = parse_json(text, f"{self.path}: its description", CheckpointError)
        if not isinstance(about, dict):
            raise CheckpointError(f"{self.path}: its description is not a JSON object")
        return about

    def _unreadable(self, error: Exception) -> CheckpointError:
        if isinstance(error, CheckpointError):
            return error
        return CheckpointError(f"{self.path}: cannot be read ({type(error).__name__}: {reason_of(error)})")

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, which is not read; raises CheckpointError where it is not there."""
        with self._missing_tensor_refused(name):
            return tuple(self._open.get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """Return one tensor, copied to memory of its own; raises CheckpointError where it is not there."""
        with self._missing_tensor_refused(name):
            value: Tensor = self._open.get_tensor(name)
            return value

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements ``start`` to ``stop`` of a tensor of one dimension; no others are read."""
        with self._missing_tensor_refused(name):
            value: Tensor = self._open.get_slice(name)[start:stop]
            return value

    @contextlib.contextmanager
    def _missing_tensor_refused(self, name: str) -> Iterator[None]:
        try:
            yield
        except SafetensorError as error:
            raise CheckpointError(f"{self.path}: has no tensor {shown(name)} ({reason_of(error)})") from error

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *details: Any) -> None:
        self._stack.close()


def split_tensors(tree: Any, prefix: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Return (the same tree of dicts and lists with each tensor replaced by {"tensor": key}, the tensors by key)."""
    if isinstance(tree, Tensor):
        return {"tensor": prefix}, {prefix: tree.detach().to("cpu", copy=True).contiguous()}
    if isinstance(tree, dict):
        tensors: dict[str, Tensor] = {}
        plain = {}
        for key, value in tree.items():
            plain[key], inside = split_tensors(value, f"{prefix}/{key}")
            tensors |= inside
        return plain, tensors
    return tree, {}


def join_tensors(tree: Any, file: TensorFile) -> Any:
    """Undo ``split_tensors`` with the file that holds the tensors; raises CheckpointError where it lacks one."""
    if isinstance(tree, dict):
        if set(tree) == {"tensor"} and isinstance(tree["tensor"], str):
            return file.tensor(tree["tensor"])
        return {key: join_tensors(value, file) for key, value in tree.items()}
    return tree


def _digest(path: Path) -> str:
    digest = new_digest()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def random_state() -> dict[str, Tensor]:
    """Return the states of torch's generators of this process, as uint8 tensors."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_state(states: Mapping[str, Tensor]) -> None:
    """Undo what was drawn since ``random_state``; a state of a device that is not here is left out.

    Raises CheckpointError for what is no state of a generator.
    """
    try:
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
    except (KeyError, TypeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {reason_of(error)}"
        raise CheckpointError(f"the checkpoint holds no state of torch's random generators ({reason})") from error
