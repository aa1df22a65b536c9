"""Which checkpoints stay in a run's folder, and which are the newest and the best."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlhf_megatron.checkpoint import storage as checkpoint
from rlhf_megatron.checkpoint.manager import sound_checkpoints
from rlhf_megatron.checkpoint.storage import MetricValue, best_of, forget_best, list_checkpoints, publish, write_tensors
from rlhf_megatron.recipe import RecipeError, load_recipe
from rlhf_megatron.runtime.recovery import Origin, RecoveryLog

ROOT = Path(__file__).resolve().parents[2]


def save(
    folder: Path, step: int, value: float | None = None, mode: Any = "max", keep: int = 1, launch: str = ""
) -> None:
    made = folder / f"step-{step}"
    file = write_tensors(made, "rank-00000.safetensors", {"x": torch.ones(2)}, {})
    metric = MetricValue("eval/x", mode, value) if value is not None else None
    publish(made, [file], {"step": step, "launch": launch}, keep, metric)


def names(folder: Path) -> list[str]:
    return [path.name for path in list_checkpoints(folder)]


def test_the_best_is_kept_until_a_better_one_comes(tmp_path: Path) -> None:
    save(tmp_path, 1, 0.5)
    save(tmp_path, 2)  # was not evaluated
    assert names(tmp_path) == ["step-2", "step-1"]
    save(tmp_path, 3, 0.4)
    save(tmp_path, 4, math.nan)
    assert names(tmp_path) == ["step-4", "step-1"]
    save(tmp_path, 5, 0.6)
    assert names(tmp_path) == ["step-5"]
    save(tmp_path, 6, 0.6)
    assert names(tmp_path) == ["step-6", "step-5"], "of equals the first"
    assert json.loads((tmp_path / "best").read_text()) == {
        "checkpoint": "step-5", "metric": "eval/x", "mode": "max", "value": 0.6
    }  # fmt: skip


def test_less_can_be_better_and_another_metric_begins_anew(tmp_path: Path) -> None:
    save(tmp_path, 1, 2.0, "min")
    save(tmp_path, 2, 3.0, "min")
    assert names(tmp_path) == ["step-2", "step-1"]
    save(tmp_path, 3, 3.0, "max")
    assert names(tmp_path) == ["step-3"]


def test_a_step_that_is_saved_again_has_its_new_metric(tmp_path: Path) -> None:
    save(tmp_path, 1, 0.9)
    save(tmp_path, 1, 0.2)
    best = best_of(tmp_path)
    assert best is not None and best[1].value == 0.2


def test_the_best_may_be_lost_or_forgotten(tmp_path: Path) -> None:
    save(tmp_path, 1, 0.9)
    (tmp_path / "best").write_text('{"checkpoint": "step-7"}')
    assert best_of(tmp_path) is None
    save(tmp_path, 2, 0.1)
    assert names(tmp_path) == ["step-2"]
    forget_best(tmp_path)
    save(tmp_path, 3)
    assert names(tmp_path) == ["step-3"]


def test_a_run_that_begins_anew_keeps_its_own_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, 30, keep=2)
    save(tmp_path, 40, keep=2)
    save(tmp_path, 5, keep=2)  # --resume none
    assert names(tmp_path) == ["step-5", "step-40"]
    save(tmp_path, 10, keep=2)
    assert names(tmp_path) == ["step-10", "step-5"]


@pytest.fixture
def world() -> Iterator[None]:
    """Make a world of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_restart_takes_what_its_own_launch_has_saved(tmp_path: Path, world: None) -> None:
    told: list[str] = []
    folder = tmp_path / "checkpoints"

    def start(process: str) -> None:
        RecoveryLog(tmp_path, Origin(process)).begin(9)

    start("node 1 5")
    save(folder, 7, keep=9, launch="node 1 5")
    start("node 2 9")
    assert next(sound_checkpoints(folder, "auto", told.append), None) == folder / "step-7"
    assert next(sound_checkpoints(folder, "none", told.append), None) is None
    save(folder, 2, keep=9, launch="node 2 9")
    start("node 2 9")
    assert next(sound_checkpoints(folder, "none", told.append), None) == folder / "step-2"
    assert next(sound_checkpoints(folder, str(folder / "step-7"), told.append), None) == folder / "step-2"
    start("node 3 9")
    assert next(sound_checkpoints(folder, str(folder / "step-7"), told.append), None) == folder / "step-7"
    assert not told


def test_what_a_killed_process_has_left_is_cleared_up(tmp_path: Path, world: None) -> None:
    folder, told = tmp_path / "checkpoints", []
    save(folder, 5, keep=9)
    save(folder, 7, keep=9)
    shutil.copytree(folder / "step-7", folder / "step-7.replaced")  # killed before it was removed,
    (folder / "step-5").rename(folder / "step-5.replaced")  # or before the new one had its name
    (folder / "step-5.partial").mkdir()
    assert next(sound_checkpoints(folder, "auto", told.append), None) == folder / "step-7"
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-5", "step-7"]
    save(folder, 7, keep=9)
    assert names(folder) == ["step-7", "step-5"]


def test_a_checkpoint_that_cannot_be_read_is_passed_over(
    tmp_path: Path, world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, told = tmp_path / "checkpoints", []
    save(folder, 5, keep=9)
    save(folder, 7, keep=9)
    read = checkpoint._digest

    def with_errors(path: Path) -> str:
        if path.parent.name == "step-7":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))  # as of a failing disk
        return read(path)

    monkeypatch.setattr(checkpoint, "_digest", with_errors)
    assert next(sound_checkpoints(folder, "auto", told.append), None) == folder / "step-5"
    assert len(told) == 1 and "Input/output error" in told[0] and "step-7" in told[0]
    (folder / "latest").write_bytes(b"\xff\xfe")
    assert names(folder) == ["step-7", "step-5"]


def test_keep_best_needs_evaluations() -> None:
    with pytest.raises(RecipeError, match=r"checkpoint.keep_best compares .* give checkpoint.save_interval"):
        load_recipe(ROOT / "recipes" / "tiny_sft.yaml", ["checkpoint.keep_best={}", "checkpoint.save_interval=0"])


SCORED = ["reward.rule=none", "reward_model={path: somewhere, tokens_per_gpu: 64}"]


@pytest.mark.parametrize(
    ("recipe", "overrides", "metric", "has"),
    [
        ("tiny_sft", [], "eval/*/accuracy", "eval/loss"),
        ("tiny_sft", [], "eval/loss", None),
        ("tiny_reward_model", [], "eval/*/accuracy", "eval/accuracy, eval/margin, eval/loss"),
        ("tiny_reward_model", [], "eval/margin", None),
        ("tiny_grpo", [], "eval/*/maj@8", None),
        ("tiny_grpo", SCORED, "eval/*/accuracy", "eval/SOURCE/score"),
        ("tiny_grpo", SCORED, "eval/gsm8k/score", None),
    ],
)
def test_keep_best_names_what_evaluations_have(recipe: str, overrides: list[str], metric: str, has: str | None) -> None:
    path = ROOT / "recipes" / f"{recipe}.yaml"
    values = [*overrides, "checkpoint.save_interval=1", f"checkpoint.keep_best={{metric: '{metric}'}}"]
    if has is None:
        load_recipe(path, values)
        return
    with pytest.raises(RecipeError, match=rf"metric={re.escape(metric)}: evaluations of this recipe have {has};"):
        load_recipe(path, values)
