"""Checkpoints on disk: a folder per step that appears whole or not at all, checked before it is trusted.

    checkpoints/step-40/rank-00000.safetensors ...   what each rank wrote
    checkpoints/step-40/manifest.json                written last: size and digest of every file, and the run's state
    checkpoints/latest                               the name of the newest one, for people and scripts
    checkpoints/best                                 the name and worth of the best one, in JSON, where one is kept

Nothing is pickled: tensors are safetensors, everything else is JSON. This file knows files only; the ranks' agreement
is in loops/checkpoints.py and what a role's tensors mean in roles/state.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf_megatron.errors import UserError
from rlhf_megatron.runtime import faults

FORMAT = 1
_MANIFEST, _LATEST, _BEST, _PARTIAL, _REPLACED = "manifest.json", "latest", "best", ".partial", ".replaced"
_NAME = re.compile(r"step-(\d+)")
_CHUNK_BYTES = 1 << 24


class CheckpointError(UserError):
    """A checkpoint that cannot be used, with the file and the reason."""


@dataclasses.dataclass(frozen=True)
class WrittenFile:
    """One finished file of a checkpoint."""

    name: str
    bytes: int
    digest: str  # blake2b, 32 bytes, hexadecimal


@dataclasses.dataclass(frozen=True)
class Worth:
    """What a checkpoint is worth: the value of a metric, of which more (max) or less (min) is better."""

    metric: str
    mode: Literal["max", "min"]
    value: float

    def is_better_than(self, other: Worth) -> bool:
        """Whether it is; values of another metric do not count any more."""
        if (self.metric, self.mode) != (other.metric, other.mode):
            return True
        return self.value > other.value if self.mode == "max" else self.value < other.value


def partial_folder(folder: Path) -> Path:
    """Where the files of ``folder`` are written until all are there."""
    return folder.with_name(folder.name + _PARTIAL)


def write_tensors(folder: Path, name: str, tensors: Mapping[str, Tensor], about: Any) -> WrittenFile:
    """Writes CPU tensors, with JSON ``about`` them, as a file of the unfinished checkpoint ``folder``; synced to disk.

    Raises OSError where the disk is full or not writable.
    """
    path = partial_folder(folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_safetensors(path, tensors, {"about": json.dumps(about)})
    _sync(path)
    return WrittenFile(name, path.stat().st_size, _digest(path))


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes CPU tensors as one file, which others may read as the umask says; raises OSError where the disk fails."""
    path.touch()  # safetensors alone would let nobody else read it
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, metadata=dict(metadata))
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(f"{path}: {error}") from error
    path.chmod(mode)


def publish(
    folder: Path, files: list[WrittenFile], state: Mapping[str, Any], keep: int, worth: Worth | None = None
) -> None:
    """Makes the finished checkpoint visible under its name, moves ``latest``, and deletes all but the ``keep`` newest.

    With ``worth`` it takes part in a comparison; the best one, which ``best`` names, is kept too.
    Call it on one rank, when every file is on disk. Raises OSError where the disk fails; then nothing is visible.
    """
    partial = partial_folder(folder)
    manifest = {"format": FORMAT, "files": [dataclasses.asdict(file) for file in files], "state": state}
    (partial / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    _sync(partial / _MANIFEST)
    _sync(partial)
    replaced = folder.with_name(folder.name + _REPLACED)
    if folder.exists():  # the step was run again after a resume from an earlier one
        os.rename(folder, replaced)
    os.rename(partial, folder)
    faults.at("publish", step_of(folder))
    shutil.rmtree(replaced, ignore_errors=True)
    _point(folder.parent / _LATEST, folder.name)
    best = best_of(folder.parent)
    if worth and math.isfinite(worth.value) and (best is None or best[0] == folder or worth.is_better_than(best[1])):
        best = folder, worth
        _point(folder.parent / _BEST, json.dumps({"checkpoint": folder.name, **dataclasses.asdict(worth)}))
    for old in found(folder.parent)[keep:]:
        if best is None or old != best[0]:
            shutil.rmtree(old, ignore_errors=True)


def _point(path: Path, text: str) -> None:
    """Has a small file say ``text``, whole or not at all."""
    written = path.with_name(path.name + _PARTIAL)
    written.write_text(text + "\n", encoding="utf-8")
    _sync(written)
    os.replace(written, path)
    _sync(path.parent)


def best_of(folder: Path) -> tuple[Path, Worth] | None:
    """The best checkpoint in ``folder`` and its worth, as the file ``best`` has it, if both are there."""
    try:
        content = json.loads((folder / _BEST).read_text(encoding="utf-8"))
        checkpoint = folder / content.pop("checkpoint")
        worth = Worth(**content)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (checkpoint, worth) if checkpoint in found(folder) else None


def forget_best(folder: Path) -> None:
    """Has the checkpoints of a run that begins anew compared among themselves."""
    (folder / _BEST).unlink(missing_ok=True)


def discard(folder: Path) -> None:
    """Deletes what an unfinished save has left."""
    shutil.rmtree(partial_folder(folder), ignore_errors=True)


def tidy(folder: Path) -> None:
    """Clears up in ``folder`` after a process that was killed; only while nothing else writes there.

    Half-written checkpoints go. One that was just being replaced comes back, unless the new one has its name.
    """
    for left in sorted(folder.glob(f"*{_PARTIAL}")) + sorted(folder.glob(f"*{_REPLACED}")):
        name = left.with_suffix("")
        if left.suffix == _REPLACED and not name.exists():
            os.rename(left, name)
        elif left.is_dir():
            shutil.rmtree(left, ignore_errors=True)


def found(folder: Path) -> list[Path]:
    """The checkpoints in ``folder``, finished ones only, the newest step first.

    Steps beyond the one that ``latest`` names come last: they are of a run that was begun anew or gone back.
    """
    if not folder.is_dir():
        return []
    named = [(int(match.group(1)), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    pointer = folder / _LATEST
    text = pointer.read_text(encoding="utf-8", errors="replace").strip() if pointer.exists() else ""
    match = _NAME.fullmatch(text)
    latest = int(match.group(1)) if match else math.inf
    return [path for _, path in sorted(named, key=lambda each: (each[0] > latest, -each[0]))]


def step_of(folder: Path) -> int:
    """The step in a checkpoint's name; raises CheckpointError for another name."""
    match = _NAME.fullmatch(folder.name)
    if match is None:
        raise CheckpointError(f"{folder}: a checkpoint's folder is called step-N; name one in checkpoints/")
    return int(match.group(1))


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a finished checkpoint says about itself."""

    files: list[WrittenFile]
    state: dict[str, Any]


def read_manifest(folder: Path) -> Manifest:
    """Reads a checkpoint's manifest; raises CheckpointError where it is missing, broken or of another format."""
    path = folder / _MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise CheckpointError(f"{path}: format {content['format']}; this version reads {FORMAT}")
        files = [WrittenFile(**file) for file in content["files"]]
        outside = next((file.name for file in files if Path(file.name).name != file.name), None)
        if outside is not None:
            raise CheckpointError(f"{path}: names the file {outside!r}, which does not lie in this folder")
        return Manifest(files, content["state"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: cannot be read ({type(error).__name__}: {error}); the checkpoint is not "
                              "complete") from error  # fmt: skip


def damage(folder: Path, files: list[WrittenFile]) -> str | None:
    """What is wrong with these files of a checkpoint, in words, or None; reads them whole."""
    for file in files:
        path = folder / file.name
        if not path.is_file():
            return f"{path}: is missing"
        if path.stat().st_size != file.bytes:
            return f"{path}: has {path.stat().st_size} bytes and was written with {file.bytes}"
        if _digest(path) != file.digest:
            return f"{path}: its content has changed since it was written"
    return None


class TensorFile:
    """Reads one file of a checkpoint without loading all of it; a context manager."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError where the file cannot be opened."""
        try:
            self._file: Any = safe_open(path, framework="pt")
            self._open = self._file.__enter__()
            self.about: Any = json.loads((self._open.metadata() or {})["about"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read ({type(error).__name__}: {error})") from error

    def tensor(self, name: str) -> Tensor:
        """One tensor, copied to memory of its own."""
        value: Tensor = self._open.get_tensor(name)
        return value

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *details: Any) -> None:
        self._file.__exit__(*details)


def split_tensors(tree: Any, prefix: str = "") -> tuple[Any, dict[str, Tensor]]:
    """(the same tree of dicts and lists with each tensor replaced by {"tensor": key}, the tensors by key)."""
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
    """Undoes ``split_tensors`` with the file that holds the tensors."""
    if isinstance(tree, dict):
        if set(tree) == {"tensor"}:
            return file.tensor(tree["tensor"])
        return {key: join_tensors(value, file) for key, value in tree.items()}
    return tree


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=32)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Has the file's or folder's content on disk, not only in the system's memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def random_state() -> dict[str, Tensor]:
    """The states of torch's generators of this process, as uint8 tensors."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_state(states: Mapping[str, Tensor]) -> None:
    """Undoes what was drawn since ``random_state``; a state of a device that is not here is left out."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
