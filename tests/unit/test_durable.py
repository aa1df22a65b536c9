"""Files and folders appear whole or not at all, and only when they are on disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hugging_face import make_model
from rlhf_megatron.durable import tidy, whole_file, whole_folder, write_text
from rlhf_megatron.models.architecture import read_architecture
from rlhf_megatron.models.hf_export import Companions, write_checkpoint
from rlhf_megatron.models.lora import Adaptation
from rlhf_megatron.models.peft_files import write_peft


def content_of(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("is_there", [True, False])
def test_what_fails_leaves_what_was_there(tmp_path: Path, is_there: bool) -> None:
    if is_there:
        write_text(tmp_path / "file", "old")
        with whole_folder(tmp_path / "folder") as partial:
            (partial / "a").write_text("old")
    before = content_of(tmp_path)
    with pytest.raises(OSError, match="full"), whole_file(tmp_path / "file") as partial:
        partial.write_text("ne")
        raise OSError("the disk is full")
    with pytest.raises(OSError, match="full"), whole_folder(tmp_path / "folder") as partial:
        (partial / "a").write_text("ne")
        raise OSError("the disk is full")
    assert content_of(tmp_path) == before


def test_an_older_folder_comes_back_where_the_new_one_cannot_take_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a").write_text("old")
    rename = os.rename

    def fails(source: Any, target: Any) -> None:
        if str(source).endswith(".partial"):
            raise OSError("the server is away")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(OSError, match="away"), whole_folder(tmp_path / "folder") as partial:
        (partial / "a").write_text("new")
    assert content_of(tmp_path) == {"folder/a": "old"}


def on_disk_at_rename(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, set[str], set[str]]]:
    """Return (new name, files that are there, what has been synced) of each renaming of a folder to come."""
    synced: set[int] = set()
    seen: list[tuple[str, set[str], set[str]]] = []
    sync, rename = os.fsync, os.rename

    def note_sync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def note_rename(source: Any, target: Any) -> None:
        inside = [Path(source), *Path(source).rglob("*")]
        there, done = ({path.name for path in inside if keep(path)} for keep in (bool, is_synced))
        if Path(source).is_dir():
            seen.append((Path(target).name, there, done))
        rename(source, target)

    def is_synced(path: Path) -> bool:
        return path.stat().st_ino in synced

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "rename", note_rename)
    return seen


def test_exports_have_their_name_when_every_file_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture = read_architecture(make_model(tmp_path / "model"))
    seen = on_disk_at_rename(monkeypatch)
    tensors = [(f"model.{name}.weight", torch.ones(4, 4)) for name in "ab"]
    for _ in range(2):  # the second replaces the first
        write_checkpoint(tmp_path / "step-1", Companions(tmp_path / "model"), tensors, torch.float32, shard_bytes=64)
        write_peft(tmp_path / "adapter", tensors, architecture, Adaptation(2, 1.0, ("q_proj",)), "base")
    named = [each for each in seen if not each[0].endswith(".replaced")]
    assert [name for name, _, _ in named] == ["step-1", "adapter"] * 2
    for _, there, done in named:
        assert len(there) >= 3 and done == there
    assert {path.name for path in tmp_path.iterdir()} == {"model", "step-1", "adapter"}
    assert (tmp_path / "step-1/model-00002-of-00002.safetensors").exists()


def test_what_a_killed_process_has_left_is_cleared_up(tmp_path: Path) -> None:
    for name in (
        "one",
        "one.replaced",
        "two.replaced",
        "three.partial",
        "four.partial.partial",
        "five.partial.replaced",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text(name)
    (tmp_path / "six.partial").symlink_to(tmp_path / "one")
    (tmp_path / "latest.partial").write_text("x")
    os.mkfifo(tmp_path / "seven.replaced")
    tidy(tmp_path)
    assert content_of(tmp_path) == {"one/a": "one", "two/a": "two.replaced"}
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two"}
    tidy(tmp_path / "not there")
