"""``rlhf-megatron``: its commands, where it finds recipes, what shells complete, and the wheel outside the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import fastjsonschema
import pytest
import yaml

from rlhf_megatron.errors import UserError
from rlhf_megatron.recipe import load_recipe, resolved_yaml
from rlhf_megatron.recipe.arguments import choices_of, complete_override, complete_recipe
from rlhf_megatron.runtime.command import ArgumentParser
from rlhf_megatron.runtime.command_line import SUBCOMMANDS, launched, main, to_complete
from rlhf_megatron.shipped import SHIPPED, recipe_file, shipped_path, shipped_recipes

ROOT = Path(__file__).resolve().parents[2]
COMMAND_LINE = [sys.executable, "-P", "-m", "rlhf_megatron.runtime.command_line"]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
BUILT_FROM = (
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "rlhf_megatron",
    "kernels",
    "launch",
    "tools",
    "recipes",
)


def run(arguments: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the package as pip installs it, from a wheel that pip builds."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "bench", "chaos"))
        else:
            shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    done = run([*pip, "--no-compile", "--ignore-requires-python", "--target", str(site), str(source)], source)
    assert done.returncode == 0, done.stderr
    return site


def test_the_wheel_has_every_script_and_recipe(installed: Path) -> None:
    for folder in ("launch", "recipes"):
        files = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()}
        assert [
            str(file)
            for file in sorted(files)
            if file.suffix != ".pyc" and not (installed / "rlhf_megatron" / file).is_file()
        ] == []
    for each in SUBCOMMANDS.values():
        assert (installed / "rlhf_megatron" / each.script).is_file()
    assert [path.name for path in installed.iterdir() if path.is_dir() and path.suffix != ".dist-info"] in (
        ["bin", "rlhf_megatron"], ["rlhf_megatron", "bin"],
    )  # fmt: skip


def test_the_installed_command_plans_a_packaged_recipe_in_another_folder(installed: Path, tmp_path: Path) -> None:
    program = [sys.executable, "-P", str(installed / "bin" / "rlhf-megatron")]
    where = {"PYTHONPATH": str(installed)}
    planned = run([*program, "plan", "recipes/qwen7b_grpo.yaml", "--world", "8", "cluster.gpu=H100"], tmp_path, **where)
    assert planned.returncode == 0, planned.stderr
    assert "the first: actor.layout.tensor=" in planned.stdout
    job = run([*program, "submit", "smollm_grpo", "--nodes", "2", "--print"], tmp_path, **where)
    assert job.returncode == 0, job.stderr
    assert str(installed / "rlhf_megatron" / "launch" / "train.py") in job.stdout


@pytest.mark.parametrize("name", sorted(SUBCOMMANDS))
def test_each_command_is_a_script_at_the_top(name: str) -> None:
    assert (ROOT / SUBCOMMANDS[name].script).is_file()


def test_a_mistyped_command_gets_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rlhf-megatron", "plann"])
    assert main() == 2
    assert capsys.readouterr().err == "error: rlhf-megatron plann: no such command; did you mean plan?\n"


def test_a_command_runs_its_script_under_its_own_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rlhf-megatron", "recipes", "overlays/dapo"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(ArgumentParser, "program", None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().out == (ROOT / "recipes/overlays/dapo.yaml").read_text(encoding="utf-8")
    assert ArgumentParser.program == "rlhf-megatron recipes"


def test_commands_of_all_gpus_are_started_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    train = SUBCOMMANDS["train"].script
    script, arguments = launched(train, ["r.yaml", "--nproc-per-node", "2", "steps=3", "--max-restarts=1"])
    assert script == "launch/torchrun.py"
    assert arguments == ["--nproc-per-node", "2", "--max-restarts", "1", str(ROOT / train), "r.yaml", "steps=3"]
    assert launched(train, ["r.yaml", "--dry-run", "--world", "8"]) == (train, ["r.yaml", "--dry-run", "--world", "8"])
    monkeypatch.setenv("RANK", "0")
    assert launched(train, ["r.yaml"]) == (train, ["r.yaml"])
    with pytest.raises(UserError, match="--nproc-per-node: expected one argument"):
        launched(train, ["r.yaml", "--nproc-per-node"])


def test_recipes_are_found_by_path_and_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert SHIPPED == ROOT
    shipped = ROOT / "recipes" / "qwen7b_grpo.yaml"
    for name in ("qwen7b_grpo", "qwen7b_grpo.yaml", "recipes/qwen7b_grpo.yaml", "recipes/qwen7b_grpo"):
        assert recipe_file(name) == shipped
    assert recipe_file("overlays/dapo") == ROOT / "recipes" / "overlays" / "dapo.yaml"
    for unknown in ("nowhere", "../recipes/qwen7b_grpo", "x" * 5000, "a\0b"):
        assert recipe_file(unknown) == Path(unknown)
    for mistyped in ("qwen7b_grp", "recipes/qwen_7b_grpo.yaml"):
        with pytest.raises(
            UserError, match=r"cannot be read \(No such file or directory\); did you mean qwen7b_grpo\?"
        ):
            load_recipe(mistyped)
    Path("qwen7b_grpo.yaml").write_text("defaults: [qwen7b_lora, overlays/dapo]\nsteps: 7\n", encoding="utf-8")
    assert recipe_file("qwen7b_grpo.yaml") == Path("qwen7b_grpo.yaml")
    recipe = load_recipe("qwen7b_grpo.yaml")
    assert recipe.steps == 7 and recipe.actor.lora is not None
    assert recipe.model.config == str(ROOT / "recipes/models/qwen2.5-7b")


def test_shipped_files_are_found_where_the_folder_has_none_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    function = "recipes/rewards/last_number.py:compute_score"
    assert shipped_path(function) == str(ROOT / function)
    for text in ("recipes/nowhere.py", "models/recipes", "recipes/a\0b", str(tmp_path)):
        assert shipped_path(text) == text
    (tmp_path / "recipes" / "rewards").mkdir(parents=True)
    (tmp_path / "recipes" / "rewards" / "last_number.py").touch()
    assert shipped_path(function) == function


def test_recipes_and_keys_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smol.yaml").touch()
    (tmp_path / "smaller").mkdir()
    assert complete_recipe("sm") == ["smol.yaml", "smaller/", "smollm_grpo", "smollm_gsm8k_grpo", "smollm_gsm8k_sft"]
    assert complete_recipe("smaller/") == []
    assert len(complete_recipe("")) == len(shipped_recipes()) + 2
    assert complete_override("actor.optimizer.learning_r") == ["actor.optimizer.learning_rate="]
    assert "actor.optimizer=" not in complete_override("actor.")
    assert complete_override("model.dtype=") == [f"model.dtype={name}" for name in ("float32", "bfloat16", "float16")]
    assert choices_of("deterministic") == ["true", "false"]
    assert choices_of("steps") == choices_of("nowhere.at.all") == choices_of("") == []


@pytest.mark.parametrize(
    ("line", "answers"),
    [
        ("rlhf-megatron pre", ["preflight", "prepare"]),
        ("rlhf-megatron plan recipes/qwen7b_grpo.yaml model.dtype=fl", ["model.dtype=float32", "model.dtype=float16"]),
    ],
)
def test_a_shell_gets_completions(line: str, answers: list[str], tmp_path: Path) -> None:
    asked = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n"}
    file = tmp_path / "answers"
    done = run(COMMAND_LINE, ROOT, **asked, _ARGCOMPLETE_STDOUT_FILENAME=str(file))
    assert done.returncode == 0, done.stderr
    assert file.read_text(encoding="utf-8").split("\n") == answers


def test_the_first_word_alone_is_completed_as_a_command() -> None:
    for line, named in [("p tr", []), ("p train", []), ("p train ", ["train"]), ("p  train tr", ["train"]), ("p ", [])]:
        assert to_complete({"COMP_LINE": line, "COMP_POINT": str(len(line))}) == named


@pytest.fixture(scope="module")
def checked() -> Any:
    """Return the committed schema as a function that raises for what it refuses."""
    return fastjsonschema.compile(json.loads((ROOT / "recipes" / "schema.json").read_text(encoding="utf-8")))


@pytest.mark.parametrize("file", RECIPES, ids=lambda path: path.stem)
def test_the_schema_accepts_recipes_and_overlays(checked: Any, file: Path) -> None:
    checked(yaml.safe_load(file.read_text(encoding="utf-8")))
    if file.parent.name == "recipes":
        checked(yaml.safe_load(resolved_yaml(load_recipe(file))))


@pytest.mark.parametrize(
    ("values", "about"),
    [
        ({"rollout": {"max_respons_length": 3}}, "max_respons_length"),
        ({"actor": {"optimizer": {"learning_rate": "fast"}}}, "learning_rate"),
        ({"loop": "rlx"}, "loop"),
        ({"loop": "sft", "rollout": {"max_response_length": 3}}, "rollout"),
        ({"model": {"dtype": "int8"}}, "dtype"),
        ({"defaults": "a.yaml"}, "defaults"),
        ({"steps": -1}, "steps"),
    ],
)
def test_the_schema_refuses_what_the_code_refuses(checked: Any, values: dict[str, Any], about: str) -> None:
    with pytest.raises(fastjsonschema.JsonSchemaException, match=about):
        checked(values)
