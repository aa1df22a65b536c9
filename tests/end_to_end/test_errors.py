"""What a person reads when something is wrong: the real commands, one line that says what, where and what to do, no
traceback, a failing exit status; and a rank that dies takes all others with it at once."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow
import pyarrow.parquet
import pytest
import yaml

from end_to_end.commands import Finished, python, torchrun
from end_to_end.runs import SUPERVISED, TRAIN, make_model
from rlhf_megatron.rollout.vllm.process_environment import has_gpu

ROWS, LONG_ROW, BAD_ROW = 24, 5, 7
SECONDS_TO_END = 30.0
Row = dict[str, Any]

LEARNING: Row = {
    **SUPERVISED,
    "name": "errors",
    "steps": 1,
    "data": {"train_files": ["good.parquet"], "max_prompt_length": 48},
}
REINFORCED: Row = {
    **LEARNING,
    "loop": "rl",
    "batch": {"prompts_per_step": 4, "responses_per_prompt": 2},
    "rollout": {"max_response_length": 8},
}
REWARDS = """
import os, pathlib

def raises(data_source, solution_str, ground_truth, extra_info):
    raise ValueError("no unit in the answer")

def raises_on_rank_one(data_source, solution_str, ground_truth, extra_info):
    if os.environ["RANK"] == "1":
        pathlib.Path("raised").touch()
        raise KeyError("unit")
    return 1.0
"""

# vLLM's CPU build is installed on machines without a GPU only.
needs_cpu_engine = pytest.mark.skipif(has_gpu(), reason="the engine of this machine needs a GPU, which is hidden here")


def row(number: int, question: str = "Calculate {} + 1.") -> Row:
    return {
        "data_source": "some/sums",
        "prompt": [{"role": "user", "content": question.replace("{}", str(number))}],
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"index": number},
    }


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of one layer, data good and bad, and the recipes, all named by relative paths."""
    path = tmp_path_factory.mktemp("errors")
    make_model(path, layers=1)
    shutil.copytree(path / "model", path / "no_tokenizer", ignore=shutil.ignore_patterns("tokenizer*"))
    good = [row(number) for number in range(ROWS)]
    files = {
        "good": good,
        "long": [*good[:LONG_ROW], row(LONG_ROW, "Calculate {} + 1. " * 20), *good[LONG_ROW + 1 :]],
        "bad": [*good[:BAD_ROW], row(BAD_ROW) | {"reward_model": {"style": "rule"}}, *good[BAD_ROW + 1 :]],
    }
    for name, rows in files.items():
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path / f"{name}.parquet")
    (path / "sft.yaml").write_text(yaml.safe_dump(LEARNING))
    (path / "rl.yaml").write_text(yaml.safe_dump(REINFORCED))
    (path / "rewards.py").write_text(REWARDS)
    return path


@pytest.fixture
def train(folder: Path, tmp_path: Path) -> Callable[..., Finished]:
    """Run launch/train.py under torchrun to its end."""

    def run(ranks: int, recipe: str, *overrides: str) -> Finished:
        with torchrun(ranks, TRAIN, recipe, f"run_root={tmp_path}", *overrides, folder=folder) as command:
            return command.finish()

    return run


# ---- what is found before anything is loaded


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["nowhere.yaml"],
            "error: nowhere.yaml: cannot be read (No such file or directory); give a file, or a name that "
            "`rlhf-megatron recipes` lists",
        ),
        (
            ["sft.yaml", "actor.optimiser.learning_rate=1"],
            "error: sft.yaml: unknown key actor.optimiser; did you mean actor.optimizer?",
        ),
        (
            ["sft.yaml", "actor.layout.tensor=2", "--dry-run", "--world=3"],
            "error: actor.layout: tensor 2 does not divide 3 GPUs; change a degree, or run on a multiple of 2",
        ),
        (
            ["sft.yaml", "actor.layout.tensor=4", "--dry-run", "--world=4"],
            "error: actor.layout.tensor=4 does not divide the model's 2 attention heads (num_attention_heads); "
            "use a divisor of 2, or pipeline",
        ),
        (
            ["sft.yaml", "model.path=nowhere", "--dry-run"],
            "error: model.path: there is no nowhere/config.json; give the model's folder or its OWNER/NAME on the hub, "
            "or set model.config to a folder with its config.json",
        ),
    ],
)
def test_a_recipe_that_cannot_be_is_told_in_one_line(folder: Path, arguments: list[str], line: str) -> None:
    finished = python(TRAIN, *arguments, folder=folder)
    assert (finished.status, finished.err, finished.out) == (2, line + "\n", "")


def test_a_dry_run_tells_all_mistakes_at_once_and_what_its_checks_saw(folder: Path) -> None:
    fine = python(TRAIN, "rl.yaml", "reward.rule=gsm8k", "--dry-run", "--world=1", folder=folder).check()
    files = fine.out.partition("\nFiles\n")[2].splitlines()
    assert [line.split(":")[0].strip() for line in files] == [
        *("trackers", "models", "rows", "rewards", "tokenizer", "disk")
    ]
    assert f"rows: {ROWS} training rows" in fine.out and "right answers: 1; empty ones: 0" in fine.out
    mistakes = ["actor.layout.tensor=4", "rollout.layout.tensor=3", "data.train_files=[good.parquet, none.parquet]"]
    mistakes += ["reward.function=rewards.py:raises", "monitor.profile.steps=[1]", "monitor.profile.ranks=[9]"]
    refused = python(TRAIN, "rl.yaml", *mistakes, "--dry-run", "--world=4", folder=folder)
    assert (refused.status, refused.out) == (2, "")
    lines = refused.err.splitlines()
    assert all(line.startswith("error: ") for line in lines)
    for part in (
        "rollout.layout: tensor 3 does not divide 4 GPUs",
        "monitor.profile.ranks: there is no rank 9 of 4",
        "actor.layout.tensor=4 does not divide the model's 2 attention heads",
        "none.parquet: there is no such file",
    ):
        assert sum(part in line for line in lines) == 1, refused.err
    several = python(TRAIN, "rl.yaml", "stepz=3", "batch.prompts_per_step=0", "seed=true", "--dry-run", folder=folder)
    line = several.only_error()
    assert "unknown key stepz; did you mean steps?" in line
    assert "seed: must be a number; it is true" in line
    assert "batch.prompts_per_step: Input should be greater than 0; it is 0" in line


def test_a_run_without_torchrun_is_told_how_to_start_it(folder: Path) -> None:
    finished = python(TRAIN, "sft.yaml", folder=folder)
    assert finished.status == 2
    assert finished.only_error().startswith("error: this command runs under torchrun: torchrun --nproc-per-node N")


def test_what_a_loop_does_not_read_is_refused_in_a_run_and_by_a_dry_run(folder: Path) -> None:
    for more in ([], ["--dry-run", "--world=2"]):
        refused = python(TRAIN, "sft.yaml", "batch.epochs_per_step=2", *more, folder=folder)
        assert (refused.status, refused.out) == (2, "")
        assert refused.only_error().endswith("batch.epochs_per_step: loop sft does not read it; leave it out")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["tools/make_tiny_model.py", "--output=other", "--heads=3", "--kv-heads=2"],
            "error: --heads 3 is no multiple of --kv-heads 2: change one of them",
        ),
        (
            ["tools/prepare_data.py", "reasoning-gym", "--task=chain_sun", "--size=3", "--output=other.parquet"],
            "error: --task: reasoning-gym has no task chain_sun; did you mean chain_sum or decimal_chain_sum?",
        ),
        (
            ["tools/prepare_data.py", "demonstrations", "--input=nowhere.parquet", "--output=other.parquet"],
            "error: nowhere.parquet: there is no such file; make it with tools/prepare_data.py",
        ),
    ],
)
def test_tools_tell_bad_input_in_one_line(folder: Path, arguments: list[str], line: str) -> None:
    finished = python(*arguments, folder=folder)
    assert (finished.status, finished.err) == (2, line + "\n")


# ---- what is found when the ranks are there: one line, though all of them find it


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["actor.layout.data=3"], "error: actor.layout: tensor 1 x data 3 = 3 is not 2 GPUs; change a degree, or "),
        (["model.path=nowhere"], "error: nowhere/config.json: no such file; model.path must be a folder in Hugging "),
        (
            ["actor.transformer_implementation=transformer_engine"],
            "error: actor.transformer_implementation needs Transformer Engine; ",
        ),
        (
            ["actor.transformer_implementation=transformer_engine", "actor.layout={context: 2}"],
            "error: actor.transformer_implementation: Transformer Engine has no context parallelism in float32; ",
        ),
    ],
)
def test_an_error_of_all_ranks_is_told_once(train: Callable[..., Finished], overrides: list[str], line: str) -> None:
    finished = train(2, "sft.yaml", *overrides)
    assert finished.only_error().removeprefix("[rank 1] ").startswith(line)
    closing = [f"traceback : {rank}{line}" in finished.err for rank in ("", "[rank 1] ")]
    assert any(closing), "torchrun's closing box has it too"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["model.path=no_tokenizer"],
            "error: tokenizer: no_tokenizer cannot be loaded: it has no tokenizer.json (nor vocab.json, vocab.txt, "
            "*.model, *.tiktoken); copy the tokenizer's files there, or set model.tokenizer to the folder that has "
            "them",
        ),
        (
            ["data.train_files=[good.parquet, bad.parquet]"],
            f"error: bad.parquet, row {BAD_ROW}, column reward_model: ground_truth is missing; write the right answer "
            "there, or remove the row",
        ),
        (
            ["data.train_files=[long.parquet]", "data.overlong_prompts=stop"],
            f"error: long.parquet, row {LONG_ROW}, column prompt: 106 tokens, over data.max_prompt_length = 48; "
            "raise it, or set data.overlong_prompts: drop",
        ),
    ],
)
def test_bad_data_is_told_with_its_place(train: Callable[..., Finished], overrides: list[str], line: str) -> None:
    assert train(1, "rl.yaml", *overrides).only_error() == line


def test_overlong_prompts_that_are_dropped_are_counted(train: Callable[..., Finished]) -> None:
    finished = train(1, "sft.yaml", "data.train_files=[long.parquet]", "data.validation_files=[good.parquet]")
    assert finished.status == 0, finished.err
    said = finished.out.splitlines()
    assert said[0] == f"1 of {ROWS} training rows are left out: longer than data.max_prompt_length=48 tokens"
    assert said[1].startswith(f"warning: {ROWS - 1} of {ROWS} validation prompts are also in data.train_files; ")
    assert finished.error_lines() == []


# ---- what ends a run that goes well


@needs_cpu_engine
def test_a_reward_function_that_raises_is_told_with_its_sample_and_line(train: Callable[..., Finished]) -> None:
    # The answers to a longer prompt are asked for first.
    assert train(1, "rl.yaml", "reward.function=rewards.py:raises").only_error() == (
        "error: sample of row 2 (data_source some/sums): reward.function rewards.py:raises: raises raised ValueError: "
        "no unit in the answer (rewards.py line 5); fix it, or have it return a number for such a sample"
    )


@needs_cpu_engine
def test_an_error_of_one_rank_ends_all_with_its_line(train: Callable[..., Finished], folder: Path) -> None:
    # Split, so that rank 1 has rows whichever replica is faster.
    finished = train(2, "rl.yaml", "reward.function=rewards.py:raises_on_rank_one", "rollout.scheduling=static")
    assert re.match(r"\[rank 1\] error: sample of row \d \(data_source some/sums\): ", finished.only_error())
    assert "raised KeyError: 'unit'" in finished.only_error()
    assert finished.ended - (folder / "raised").stat().st_mtime < SECONDS_TO_END


def test_a_rank_that_is_killed_ends_all(folder: Path, tmp_path: Path) -> None:
    with torchrun(2, TRAIN, "sft.yaml", f"run_root={tmp_path}", "steps=100000", folder=folder) as command:
        metrics = tmp_path / "errors" / "metrics.jsonl"
        while command.is_running() and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.05)
        family = command.family()
        command.rank(1).kill()
        finished = command.finish(SECONDS_TO_END)
        _, left = psutil.wait_procs(family, timeout=5.0)
    assert not left
    assert finished.status != 0
    assert "exitcode  : -9" in finished.err.partition("Root Cause")[2], "torchrun names the rank that died"
    assert "Traceback" not in finished.err.partition("torch/distributed/elastic")[0], (
        "others keep their lost connection"
    )
