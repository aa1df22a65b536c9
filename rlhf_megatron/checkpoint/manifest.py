"""The manifest of a checkpoint: which files it has, the run's state as JSON, and a digest of all that it says itself.

    {"format": 2, "files": [{"name": "rank-00000.safetensors", "bytes": 4096, "digest": "..."}, ...],
     "state": {"step": 40, "launch": "...", "roles": {...}, "parts": {...}}, "digest": "..."}

Format 1, of earlier versions, has no digest of itself and is read as well. What a role's state means is checked in
checkpoint/saved_role.py, that of a part where it is loaded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlhf_megatron.errors import CheckpointError
from rlhf_megatron.untrusted import parse_json, read_text, shown

FORMAT = 2
NAME = "manifest.json"
_DIGEST_BYTES = 32
_Digest = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * _DIGEST_BYTES}}}$")]


@dataclasses.dataclass(frozen=True)
class WrittenFile:
    """One finished file of a checkpoint."""

    name: str
    bytes: int
    digest: str  # blake2b, 32 bytes, hexadecimal


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The description of a finished checkpoint, which is one of its files."""

    files: list[WrittenFile]
    state: dict[str, Any]
    format: int = FORMAT


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)


class _File(_Strict):
    name: str
    bytes: int = Field(ge=1)
    digest: _Digest


class _State(_Strict):
    model_config = ConfigDict(extra="allow")

    step: int = Field(ge=0)
    launch: str = ""
    roles: dict[str, dict[str, Any]] = {}
    parts: dict[str, dict[str, Any]] = {}


class _Content(_Strict):
    format: Literal[1, 2]
    files: list[_File] = Field(min_length=1)
    state: dict[str, Any]
    digest: _Digest | None = None


def file_of_rank(rank: int) -> str:
    """Return the name of what a rank writes into a checkpoint."""
    return f"rank-{rank:05d}.safetensors"


def new_digest() -> hashlib.blake2b:
    """Return the digest of nothing yet, of the kind that manifests have."""
    return hashlib.blake2b(digest_size=_DIGEST_BYTES)


def digest_of(content: Mapping[str, Any]) -> str:
    """Return the digest of a manifest's JSON values, whatever their order and spacing in the file."""
    digest = new_digest()
    digest.update(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
    return digest.hexdigest()


def manifest_text(files: Sequence[WrittenFile], state: Mapping[str, Any]) -> str:
    """Return the text of a manifest, with the digest of itself."""
    written = {"format": FORMAT, "files": [dataclasses.asdict(file) for file in files], "state": state}
    content = json.loads(json.dumps(written))  # as it will be read
    return json.dumps(content | {"digest": digest_of(content)})


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint ``folder``, called step-N.

    Raises CheckpointError, in one line, where it is missing, damaged, of another format or of another step.
    """
    path = folder / NAME
    if not os.path.lexists(path):
        raise CheckpointError(f"{shown(path)}: cannot be read (there is no such file); the checkpoint is not complete")
    content = parse_json(read_text(path, CheckpointError), str(path), CheckpointError, finite=False)
    version = content.get("format") if isinstance(content, dict) else None
    if type(version) is not int:  # Python takes True for 1
        raise CheckpointError(f"{path}: is damaged (says no format)")
    if version > FORMAT:
        raise CheckpointError(f"{path}: format {shown(version, 20)}; this version reads up to {FORMAT}")
    try:
        checked = _Content.model_validate(content)
        files = [WrittenFile(**file.model_dump()) for file in checked.files]
        _check_names(path, files)
        _check_digest(path, content, checked)
        state = _State.model_validate(checked.state)
    except ValidationError as error:
        raise CheckpointError(f"{path}: is damaged ({first_problem(error)})") from error
    if folder.name != f"step-{state.step}":
        raise CheckpointError(f"{path}: is of step {state.step} and not of {shown(folder.name)}")
    return Manifest(files, checked.state, checked.format)


def _check_names(path: Path, files: Sequence[WrittenFile]) -> None:
    for rank, file in enumerate(files):
        if Path(file.name).name != file.name or file.name in ("", ".."):
            raise CheckpointError(f"{path}: names the file {shown(repr(file.name))}, which does not lie in this folder")
        if file.name != file_of_rank(rank):
            raise CheckpointError(f"{path}: is damaged (rank {rank}'s file is called {shown(file.name)})")


def _check_digest(path: Path, content: Mapping[str, Any], checked: _Content) -> None:
    """Check the digest; format 1 has none."""
    own = digest_of({key: value for key, value in content.items() if key != "digest"}) if checked.format > 1 else None
    if checked.digest != own:
        raise CheckpointError(f"{path}: is damaged (its content has changed since it was written)")


def first_problem(error: ValidationError) -> str:
    """Return what is wrong with JSON that does not fit its model, in a few words."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return shown(f"{where}: {first['msg']}" if where else first["msg"])
