"""The benchmark beside peers: what they are asked to do, what a row says, and all of it where TRL is installed."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import peer as bench
import peer_learning
import peer_reward
import peer_settings
import peer_verl
import pyarrow
import pyarrow.parquet
import pytest
import yaml

from end_to_end.commands import ROOT, Command
from rlhf_megatron.errors import UserError
from rlhf_megatron.recipe import Recipe, load_recipe
from rlhf_megatron.rollout.vllm.process_environment import has_gpu

BENCH = ROOT / "tools" / "bench"
# Three rows of a prompt and a response of the longest length are 144 tokens.
SMALL = (
    *("batch.prompts_per_step=2", "batch.responses_per_prompt=3", "data.max_prompt_length=40"),
    *("rollout.max_response_length=8", "rollout.drawn_lengths.mean=8", "actor.tokens_per_gpu=144"),
)


def recipe_of(folder: Path, *overrides: str) -> Recipe:
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"defaults": [str(BENCH / "step_recipe.yaml")]}))
    return load_recipe(folder / "recipe.yaml", overrides)


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
@pytest.mark.skipif(has_gpu(), reason="the engines of this machine need a GPU, which is hidden here")
def test_both_sides_take_the_same_tokens(tmp_path: Path) -> None:
    output = tmp_path / "peer.json"
    options = ("--steps=2", "--warm-up=1", "--rounds=1", f"--output={output}", f"--work={tmp_path / 'work'}")
    with Command([sys.executable, str(BENCH / "peer.py"), *options, "--ours", *SMALL], tmp_path) as command:
        finished = command.finish(600.0)
    assert output.exists(), finished.err  # the status is 1 where the target is missed, which is no matter here
    record = json.loads(output.read_text())
    (row,) = record["rows"]
    assert "failed" not in row, "tokens are compared there"
    assert row["tokens_per_step"] == 6 * 48
    assert set(row["ratio"]) == {"trl", "trl_without_correction"}
    assert {len(side["seconds_of_rounds"][0]) for side in row["sides"].values()} == {1}
    assert record["versions"]["trl"]
    assert str(tmp_path) not in json.dumps(record["rows"])


@pytest.mark.parametrize("script", [bench, peer_learning])
def test_without_trl_one_line_says_what_to_install(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["peer.py"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert script.main() == 2
    assert capsys.readouterr().err == 'TRL is not installed: pip install -e ".[peer]"\n'


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--sides", "ours", "verl", "--models", "toy"],
            "toy has no settings for verl's fsdp2: give --models of 0.5B, 0.5B-80GB, 7B, 7B-80GB, or leave verl out",
        ),
        (["--sides", "verl_megatron", "--models", "0.5B"], "0.5B has no settings for verl's megatron"),
        (
            ["--sides", "ours", "verl", "--models", "7B", "--verl-python", "false"],
            "--verl-python false: cannot import verl (status 1); give the Python of",
        ),
        (
            ["--sides", "ours", "verl", "--models", "7B", "--verl-python", "/nowhere/python"],
            "--verl-python /nowhere/python: cannot be started (No such file or directory); give the Python of",
        ),
        (
            ["--sides", "ours", "verl", "--models", "7B", "--verl-python", f"{sys.executable} -S -P"],
            "cannot import verl (ModuleNotFoundError: No module named 'verl'); give",
        ),
        (["--sweep", "large", "ours", "actor.fp8"], "ours actor.fp8: give what is other in large, each as KEY=VALUE"),
        (["--sweep", "large", "ours"], "--sweep large ours: give what is other in large"),
        pytest.param(
            ["--sides", "ours", "--models", "7B"],
            "--models 7B needs a GPU, and torch finds none; on a CPU: --models toy --sides ours trl",
            marks=pytest.mark.skipif(has_gpu(), reason="there is a GPU"),
        ),
        (["--sides", "ours", "trl", "--lengths", "drawn"], "TRL has one length for all responses"),
        (["--sweep", "verl", "verl"], "--sweep verl verl: give a name of its own, then one of ours, trl"),
        (["--rounds", "0"], "--rounds 0: must be more than 0"),
        (["--seconds", "nan"], "--seconds nan: must be more than 0"),
        (["--warm-up", "6"], "--warm-up 6 of --steps 6: give at least 1, and fewer than the steps"),
    ],
)
def test_what_cannot_run_is_said_before_anything_runs(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["peer.py", *arguments])
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: name)
    try:
        status = bench.main()
    except SystemExit as ended:  # argparse
        status = ended.code
    assert status == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("ours", ("actor.fp9=blockwise",), "--sweep large: .*unknown key actor.fp9"),
        ("trl", ("optim=adamw_torch",), "--sweep large: optim=adamw_torch: must be KEY=JSON, such as optim="),
    ],
)
def test_values_of_a_sweep_are_read_before_weights_are_written(
    name: str, values: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    side = dataclasses.replace(bench.SIDES[name], overrides=values)
    recipe = recipe_of(tmp_path, *SMALL)
    with pytest.raises(UserError, match=said):
        bench.settings_of("large", side, recipe, "toy", tmp_path)


def test_trl_is_asked_for_the_work_of_the_recipe(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, *SMALL, "model.dtype=float32", "steps=5")
    settings = peer_settings.trl_settings(recipe, "toy", [], on_gpu=False)
    asked = settings["arguments"]
    assert (asked["per_device_train_batch_size"], asked["gradient_accumulation_steps"]) == (3, 2)
    assert asked["num_generations"] == 3 and asked["max_steps"] == 5
    assert (settings["prompt_length"], asked["max_completion_length"], asked["vllm_max_model_length"]) == (40, 8, 48)
    assert asked["generation_kwargs"] == {"ignore_eos": True}
    assert (asked["bf16"], settings["engine"]["dtype"]) == (False, "float32")
    assert (asked["learning_rate"], asked["loss_type"], asked["scale_rewards"]) == (1e-6, "dapo", "group")
    assert not asked["gradient_checkpointing"]
    changed = peer_settings.trl_settings(recipe, "toy", ["optim=null", "per_device_train_batch_size=6"], on_gpu=False)
    assert changed["arguments"] == asked | {
        "optim": None, "per_device_train_batch_size": 6, "gradient_accumulation_steps": 1
    }  # fmt: skip


def test_both_learn_with_the_same_hyper_parameters(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": str(number)}], "number": number} for number in range(12)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    changed = [f"data.train_files=[{tmp_path}/train.parquet]", f"model.path={tmp_path}", "batch.prompts_per_step=8"]
    changed.append("batch.minibatch_prompts=8")
    options = argparse.Namespace(recipe=ROOT / "recipes/tiny_grpo.yaml", set=changed, steps=2, work=tmp_path)
    tasks = [peer_learning.task_of(options, seed) for seed in (1, 2)]
    orders = [pyarrow.parquet.read_table(task.recipe.data.train_files[0])["number"].to_pylist() for task in tasks]
    assert [len(set(order)) for order in orders] == [12, 12] and [len(order) for order in orders] == [16, 16]
    assert orders[0] != orders[1]
    recipe, asked = tasks[0].recipe, tasks[0].settings("trl")["arguments"]
    assert recipe.batch.minibatch_prompts == 8 and asked["gradient_accumulation_steps"] * 64 == 64
    assert (recipe.algorithm.kl_coef, asked["beta"]) == (0.0, 0.0)
    assert asked["learning_rate"] == recipe.actor.optimizer.learning_rate == 2e-4
    assert asked["lr_scheduler_type"] == recipe.actor.optimizer.schedule == "constant"
    assert (asked["adam_beta2"], asked["epsilon_high"]) == (0.99, 0.28)
    assert asked["generation_kwargs"] == {} and asked["model_init_kwargs"] == {"dtype": "float32"}


def test_a_summary_says_what_was_gained_in_a_minute() -> None:
    runs = [
        {
            "side": "ours",
            "seed": seed,
            "held_out": {"accuracy": accuracy},
            "start_seconds": 30.0,
            "step_seconds": [15.0] * 2,
        }
        for seed, accuracy in ((1, 0.75), (2, 1.0))
    ]
    rows = peer_learning.rows_beside([*runs, {"side": "trl", "seed": 1, "failed": "no"}], runs[0])
    assert [(row["side"], row["seed"]) for row in rows] == [("ours", 1), ("ours", 2), ("trl", 1)]
    assert peer_learning.summary(rows, {"accuracy": 0.5}) == {
        "ours": {
            "seeds": 2, "accuracy": 0.875, "accuracy_min": 0.75, "accuracy_max": 1.0,
            "minutes": 1.0, "minutes_of_steps": 0.5, "points_per_minute": 37.5,
        }
    }  # fmt: skip


def test_on_a_gpu_trl_runs_as_it_comes(tmp_path: Path) -> None:
    overrides = ("actor.recompute.granularity=full", "batch.prompts_per_step=16", "actor.tokens_per_gpu=4608")
    settings = peer_settings.trl_settings(recipe_of(tmp_path, *overrides), "7B", [], on_gpu=True)
    asked = settings["arguments"]
    assert settings["engine"] == {}
    assert asked["gradient_checkpointing"] and asked["bf16"] and asked["vllm_enable_sleep_mode"]
    assert asked["model_init_kwargs"] == {"dtype": "bfloat16"}


def test_a_micro_batch_has_as_many_rows_as_fit_and_divide_the_step() -> None:
    assert peer_settings.rows_at_once(32, 96, 1024) == 8
    assert peer_settings.rows_at_once(128, 1536, 4608) == 2
    assert peer_settings.rows_at_once(6, 48, 10_000) == 6
    assert peer_settings.rows_at_once(5, 96, 10) == 1


def test_every_shape_of_one_gpu_is_a_recipe_with_equal_responses(tmp_path: Path) -> None:
    shapes = bench.shapes_of_one_gpu()
    assert {shape["model"] for shape in shapes} == {"toy", *peer_settings.ENGINE_MEMORY}
    for shape in shapes:
        recipe = bench.prepare(shape, tmp_path, 3, ["seed=7"])
        assert load_recipe(tmp_path / "recipe.yaml") == recipe and recipe.seed == 7
        assert recipe.rollout is not None and recipe.rollout.drawn_lengths is not None
        length = recipe.rollout.max_response_length
        assert {recipe.rollout.drawn_lengths.of_row(row) for row in range(9)} == {length}
        assert peer_settings.tokens_per_step(recipe) % (recipe.data.max_prompt_length + length) == 0


def test_a_row_says_what_the_rounds_say() -> None:
    def of(*seconds: float) -> dict[str, Any]:
        return {
            "seconds": [99.0, *seconds], "cpu_seconds": [9.0, *seconds], "tokens": [100] * (len(seconds) + 1),
            "start_seconds": 120.0,
        }  # fmt: skip

    rounds = {
        "ours": [of(1.0, 2.0), of(3.0)],
        "trl": [of(5.0, 4.0), of(6.0)],
        "trl_without_correction": [of(3.0), of(3.0)],
    }
    row = bench.summary(rounds, tokens=100, warm_up=1)
    ours = row["sides"]["ours"]
    assert ours["step_seconds"] == {"median": 2.0, "min": 1.0, "max": 3.0} == ours["cpu_seconds"]
    assert (ours["tokens_per_second"], ours["mean_tokens_per_second"]) == (50.0, 50.0)
    assert ours["seconds_of_rounds"] == [[1.0, 2.0], [3.0]]
    assert row["ratio"] == {"trl": 2.5, "trl_without_correction": 1.5}
    assert bench.misses([{"model": "7B", "gpus": 1, **row}]) == [
        "7B on 1: 1.50 times the tokens per second of trl_without_correction, below 2"
    ]
    assert ours["start_seconds"]["median"] == 120.0
    verl = of(2.0) | {"mfu": [0.1, 0.4], "phases": {"gen": [9.0, 1.5]}}
    with_verl = bench.summary({**rounds, "verl": [verl], "verl_64k": [{"failed": "no memory"}]}, tokens=100, warm_up=1)
    assert with_verl["ratio"]["verl"] == 1.0 and with_verl["sides"]["verl_64k"] == {"failed": "no memory"}
    assert with_verl["sides"]["verl"]["phase_seconds"]["gen"]["max"] == 1.5
    assert with_verl["sides"]["verl"]["mfu"]["min"] == 0.4
    assert "7B on 1: 1.00 times the tokens per second of verl, below 1.5" in bench.misses(
        [{"model": "7B", "gpus": 1, **with_verl}]
    )
    rounds["trl"][1]["tokens"][0] = 90
    failed = bench.summary(rounds, tokens=100, warm_up=1)
    assert failed == {"failed": "trl: steps of 90 tokens"}
    assert bench.misses([{"model": "toy", "gpus": 1, **failed}]) == ["toy on 1: trl: steps of 90 tokens"]


def test_what_a_killed_run_has_measured_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run_side(side: str, _: Any, __: Any, folder: Path, output: Path, options: argparse.Namespace) -> str:
        ran.append(side)
        if side == "trl" and len(ran) == 2:
            return "killed"
        figures = {"seconds": [9.0, 1.0], "cpu_seconds": [9.0, 1.0], "tokens": [tokens] * 2, "start_seconds": 9.0}
        output.write_text(json.dumps(figures))
        return ""

    monkeypatch.setattr(bench, "run_side", run_side)
    shape = next(shape for shape in bench.shapes_of_one_gpu() if shape["model"] == "toy")
    sides = {name: bench.SIDES[name] for name in ("ours", "trl", "trl_without_correction")}
    options = argparse.Namespace(
        work=tmp_path, steps=2, warm_up=1, rounds=1, ours=SMALL, sides=sides, lengths="equal", resume=False
    )
    tokens = 6 * 48
    row = bench.measured(shape, options)
    assert row["sides"]["trl"] == {"failed": "killed"} and row["ratio"] == {"trl_without_correction": 1.0}
    options.resume = True
    assert bench.measured(shape, options)["ratio"] == {"trl": 1.0, "trl_without_correction": 1.0}
    assert ran == ["ours", "trl", "trl_without_correction", "trl"]
    options.resume = False
    bench.measured(shape, options)
    assert ran[4:] == list(sides)


def test_verl_is_asked_for_the_work_of_the_recipe(tmp_path: Path) -> None:
    lengths = ("rollout.drawn_lengths.mean=6", "rollout.drawn_lengths.sigma=0.6")
    recipe = recipe_of(tmp_path, *SMALL, *lengths, "steps=5")
    swept = dataclasses.replace(bench.SIDES["verl_bypass"], overrides=("actor_rollout_ref.rollout.max_num_seqs=64",))
    settings = peer_settings.verl_settings(recipe, "7B", swept.engine, swept.overrides, "/work", "/reward.py")
    assert settings["config"] == "ppo_trainer"
    asked = dict(override.split("=", 1) for override in settings["overrides"])
    assert (asked["data.train_batch_size"], asked["actor_rollout_ref.rollout.n"]) == ("2", "3")
    assert asked["actor_rollout_ref.rollout.max_num_seqs"] == "64", "the last of two counts, in hydra too"
    assert asked["trainer.total_training_steps"] == "5"
    assert recipe.rollout.drawn_lengths is not None
    drawn = [recipe.rollout.drawn_lengths.of_row(row) for row in range(6)]
    asked_for = [length for of_prompt in settings["lengths"] for length in of_prompt]
    assert asked_for == [min(length, 8) for length in drawn]
    assert peer_settings.tokens_per_step(recipe) == 6 * 40 + sum(asked_for)
    published = peer_settings.without_folders(settings, "/work", "/bench")
    assert not [override for override in published["overrides"] if "/work" in override]
    megatron = peer_settings.verl_settings(recipe, "7B", "megatron", (), "/work", "/reward.py")
    assert megatron["config"] == "ppo_megatron_trainer"


def test_verls_inputs_have_the_lengths_of_their_responses(tmp_path: Path) -> None:
    prompts = [{"prompt": [{"role": "user", "content": str(number)}]} for number in range(5)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(prompts), tmp_path / "prompts.parquet")
    peer_verl.write_inputs({"prompts": tmp_path / "prompts.parquet", "lengths": [[3, 4], [5, 6]]}, tmp_path)
    rows = pyarrow.parquet.read_table(tmp_path / "verl.parquet").to_pylist()
    assert [row["response_lengths"] for row in rows] == ["3,4", "5,6", "3,4", "5,6", "3,4"]


def test_verls_log_is_read_as_it_grows(tmp_path: Path) -> None:
    log = peer_verl.MetricsLog(tmp_path / "steps.jsonl")
    log.start()
    for step in range(3):
        with (tmp_path / "steps.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "data": {"perf/total_num_tokens": 7, "timing_s/gen": step}}) + "\n")
            file.write('{"step": 9, "da')
            file.flush()
            file.seek(0, 2)
        content = (tmp_path / "steps.jsonl").read_bytes().removesuffix(b'{"step": 9, "da')
        (tmp_path / "steps.jsonl").write_bytes(content)
    log.close()
    assert [step["timing_s/gen"] for step in log.steps] == [0, 1, 2]
    assert log.opened <= log.ends[0] <= log.ends[-1]


def test_the_reward_differs_between_responses() -> None:
    scores = [peer_reward.compute_score("", "x" * length, "", {}) for length in range(5)]
    assert scores == [0.0, 0.25, 0.5, 0.75, 1.0]
