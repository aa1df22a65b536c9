"""Whatever is written over the files of a run's folder, a restart goes on or is refused in one line."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_megatron.errors import UserError
from run_restart import make_run, restart, world_of_one

FILES = (
    "checkpoints/step-2/manifest.json",
    "checkpoints/step-2/rank-00000.safetensors",
    "checkpoints/step-1/manifest.json",
    "checkpoints/latest",
    "checkpoints/best",
    "metrics.jsonl",
    "metrics.csv",
    "recovery.jsonl",
    "trackers.json",
    "claim",
)
FRAGMENTS = (
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b'"',
    b"\\",
    b"0",
    b"-1",
    b"1e999",
    b"NaN",
    b"null",
    b"true",
    b"\0" * 64,
    b"\xff",
    b"\n",
    b'"step": ',
    b'"what": "start"',
    b'{"what": "fault", "step": null}\n',
    b"step-1",
    b"9" * 5000,
    b"[" * 5000,
)
noise = st.lists(st.sampled_from(FRAGMENTS), max_size=4).map(b"".join) | st.binary(max_size=8)


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    """Have this process alone, and nothing wait for the disk."""
    with pytest.MonkeyPatch.context() as patch, world_of_one():
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that has saved steps 1 and 2."""
    return make_run(tmp_path_factory.mktemp("runs") / "run")


@given(st.sampled_from(FILES), st.floats(0, 1), st.integers(0, 40), noise)
def test_any_bytes_in_any_file_are_survived_or_told(
    sound: Path, file: str, position: float, removed: int, inserted: bytes
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(shutil.copytree(sound, Path(folder) / "run"))
        content = (run / file).read_bytes() if (run / file).exists() else b""
        start = int(position * len(content))
        (run / file).write_bytes(content[:start] + inserted + content[start + removed :])
        try:
            restarted = restart(run)
        except UserError as error:
            assert str(error).isprintable() and len(str(error)) < 1500
        else:
            assert restarted.step in (1, 2) or file.startswith("checkpoints/step")
            assert restarted.step or restarted.told
