"""tools/tune.py: command lines and studies that it cannot search by."""

from __future__ import annotations

from pathlib import Path

import pytest
import tune
import yaml

RECIPE = {
    "name": "searched",
    "loop": "sft",
    "steps": 4,
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train_files": ["rows.parquet"], "max_prompt_length": 64},
    "batch": {"prompts_per_step": 8},
    "actor": {"tokens_per_gpu": 256, "optimizer": {"learning_rate": 1e-5}},
}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--search", "steps=1..1e999"], "write KEY=LOW..HIGH"),
        (["--search", f"steps=1..{'9' * 400}"], "write KEY=LOW..HIGH"),
        (["--search", "steps=\u0663..\u0665"], "write KEY=LOW..HIGH"),
        (["--search", "steps=1..2", "--search", "steps=3..4"], "name each key once"),
        (["--search", "name=a|b"], "neither name nor run_root"),
        (["--search", "steps=1..2", "--seed", "-1"], "--seed=-1: must be from 0"),
        (["--search", "steps=1..2", "--launch", 'a "'], "No closing quotation"),
        (["--search", "steps=1..2", "--launch", "/nonexistent -n 2"], "there is no such program"),
    ],
)
def test_what_cannot_be_searched_gets_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"run_root": str(tmp_path / "runs")}))
    assert tune.main([str(tmp_path / "recipe.yaml"), *arguments]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("error: ") and line in told
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("damage", ["garbage", "folder"])
def test_a_damaged_study_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"run_root": str(tmp_path)}))
    log = tmp_path / "searched-study" / "study.log"
    log.parent.mkdir()
    log.write_text("garbage\n") if damage == "garbage" else log.mkdir()
    assert tune.main([str(tmp_path / "recipe.yaml"), "--search", "steps=1..2"]) == 2
    assert "move it away to begin anew" in capsys.readouterr().err
