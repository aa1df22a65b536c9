"""A preflight, clocks and health of a run on real ranks: what differs, who is silent, where links hang, who stops."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
import torch.distributed as dist
import yaml

from end_to_end.commands import torchrun
from hugging_face import make_model
from parallel.ranks import run_ranks, write_result
from rlhf_megatron.preflight import machine
from rlhf_megatron.preflight import preflight as of_loops
from rlhf_megatron.preflight.rank_answers import answers_of_torchrun
from rlhf_megatron.recipe import load_recipe
from rlhf_megatron.recipe.health import HealthRuleSection, HealthSection
from rlhf_megatron.runtime.clocks import measure_clocks
from rlhf_megatron.runtime.finite import describe_nonfinite, nonfinite_gradients
from rlhf_megatron.runtime.health_rules import Health, HealthStop
from tiny_tokenizer import write_bpe_tokenizer

Result = dict[str, Any]
WORLD = 3
# A loop without rewards, whose scorers take a while to start.
QUICK = ("loop=sft", "batch.responses_per_prompt=1", "rollout=null")


def write_data(path: Path, rows: int) -> None:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "What is two plus three?"}],
        "reward_model": {"style": "rule", "ground_truth": "5"},
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * rows), path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a recipe with its model and data, and in other/ the same model beside data that differ."""
    path = tmp_path_factory.mktemp("preflight")
    write_bpe_tokenizer(make_model(path / "model", vocabulary=400))
    write_data(path / "train.parquet", rows=4)
    (path / "other").mkdir()
    (path / "other" / "model").symlink_to(path / "model")
    write_data(path / "other" / "train.parquet", rows=5)
    values = {
        "name": "checked",
        "loop": "rl",
        "steps": 1,
        "model": {"path": "model", "dtype": "float32"},
        "data": {"train_files": ["train.parquet"], "max_prompt_length": 64},
        "batch": {"prompts_per_step": 2, "responses_per_prompt": 2},
        "actor": {"tokens_per_gpu": 256, "optimizer": {"learning_rate": 1e-4}},
        "rollout": {"max_response_length": 8},
        "evaluation": {"at_start": False, "at_end": False},
        "checkpoint": {"save_interval": 1},
    }
    (path / "recipe.yaml").write_text(yaml.safe_dump(values))
    (path / "rewards.py").write_text(
        "def raises(data_source, solution_str, ground_truth, extra_info):\n    raise KeyError('unit')\n"
    )
    return path


# ---- on the ranks


def preflights(folder: str) -> None:
    """Run several preflights and health checks in one world; the last of them leaves the world in pieces."""
    os.chdir(folder)
    rank, results = dist.get_rank(), {}
    recipe = load_recipe("recipe.yaml")
    of_loops.GRACE_SECONDS, machine.WRITE_BYTES = 2.0, 1 << 20

    def preflight(name: str, *overrides: str, seconds: float = 60.0) -> bool:
        asked = load_recipe(f"{folder}/recipe.yaml", overrides)
        return of_loops.preflight(asked, seconds, Path(folder) / f"{name}.json" if rank == 0 else None)

    begin("sound")
    results["sound"] = preflight("sound")
    begin("differing")
    os.chdir(Path(folder) / "other" if rank == 2 else folder)
    results["differing"] = preflight("differing", *(["seed=2"] if rank == 2 else []))
    os.chdir(folder)
    results["gradients"] = gradients()
    results["health"] = health()
    results["clocks"] = clocks()
    begin("silent")
    answers = answers_of_torchrun()
    if rank == 1:  # gives its place, and then nothing
        answers.give("place", {"host": "the_silent_host", "node": 0})
        answers.hear("verdict", 60.0)
    else:
        results["silent"] = preflight("silent", *QUICK, seconds=8.0)
    begin("stuck")
    if rank == 1:  # sees to everything but the links
        answers = answers_of_torchrun()
        answers.give("place", {"host": "the_stuck_host", "node": 0})
        answers.give("alone", of_loops.see_alone(recipe, rank, WORLD, 8.0))
        answers.hear("verdict", 60.0)
    else:
        results["stuck"] = preflight("stuck", *QUICK, seconds=8.0)
    write_result(results)
    sys.stdout.flush()
    time.sleep(1.0)  # nobody ends while another still hears the verdict
    os._exit(0)  # a thread hangs in an all-reduce


def begin(name: str) -> None:
    """Give the next preflight keys of its own, as a restart by torchrun would, when all ranks are there."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = name
    dist.barrier()


def gradients() -> list[str]:
    """Return what all ranks say of one rank's and of all ranks' bad gradients."""
    layer = torch.nn.Linear(2, 2)
    layer.weight.grad, layer.bias.grad = torch.zeros(2, 2), torch.zeros(2)
    texts = [describe_nonfinite(nonfinite_gradients(layer.named_parameters()))]
    if dist.get_rank() == 1:
        layer.weight.grad[0, 1] = float("nan")
    texts.append(describe_nonfinite(nonfinite_gradients(layer.named_parameters())))
    layer.bias.grad[0] = float("inf")
    texts.append(describe_nonfinite(nonfinite_gradients(layer.named_parameters())))
    return texts


def health() -> Result:
    """Have a rule that speaks on one rank's memory stop all; rank 0 alone follows what is the same everywhere."""
    rank, told = dist.get_rank(), []
    rules = [
        HealthRuleSection(metric="reward/mean", when="below", value=0.5),
        HealthRuleSection(metric="memory/host_gb", when="above", value=10, steps=2, action="stop"),
    ]
    watched = Health(HealthSection(default_rules=False, rules=rules), "run", told.append)
    try:
        for step in range(1, 10):
            watched.after(step, {"reward/mean": 0.1, "memory/host_gb": 11.0 if rank == 2 and step > 2 else 1.0})
    except HealthStop as stop:
        return {"told": told, "stop": str(stop)}
    return {"told": told, "stop": None}


def clocks() -> list[Result]:
    """Check the clocks of ranks 1 and 2 as another host, whose clock is 5000 s ahead."""
    host, ahead = ("this", 0.0) if dist.get_rank() == 0 else ("other", 5000.0)
    return [dataclasses.asdict(clock) for clock in measure_clocks(host, lambda: time.perf_counter() + ahead)]


# ---- the tests


def checks_in(path: Path) -> dict[str, Result]:
    return {check["name"]: check for check in json.loads(path.read_text())["checks"]}


@pytest.fixture(scope="module")
def results(folder: Path) -> list[Result]:
    """Return what each rank found, from one start."""
    return run_ranks(preflights, WORLD, {"folder": str(folder)}, timeout=300.0)


def test_ranks_that_agree_pass_with_measured_links(folder: Path, results: list[Result]) -> None:
    assert [result["sound"] for result in results] == [True] * WORLD
    checks = checks_in(folder / "sound.json")
    not_ok = {name: check["result"] for name, check in checks.items() if check["result"] != "ok"}
    assert not_ok.pop("pairs in a node", "warn") == "warn"  # how fast links are is this machine's matter
    assert not_ok == {"gpu": "skipped", "rdma": "skipped"}
    assert {"versions", "code", "recipe", "data", "model", "disk", "tokenizer", "rewards"} < set(checks)
    assert checks["code"]["seen"].endswith("the same on 3 ranks")
    assert "GB/s bus bandwidth, slowest on rank" in checks["all-reduce"]["seen"]
    assert "of 3" in checks["pairs in a node"]["seen"]


def test_a_rank_with_another_recipe_and_other_data_is_named(folder: Path, results: list[Result]) -> None:
    assert [result["differing"] for result in results] == [False] * WORLD
    checks = checks_in(folder / "differing.json")
    found = [name for name, check in checks.items() if check["result"] not in ("ok", "skipped")]
    # How fast links are is this machine's matter.
    assert [name for name in found if not name.startswith("pairs")] == ["recipe", "data"]
    assert checks["recipe"]["seen"].startswith("seed: ") and "on rank 2 (" in checks["recipe"]["seen"]
    assert checks["data"]["seen"].startswith("train.parquet: ") and "on rank 2 (" in checks["data"]["seen"]


def test_a_rank_that_says_nothing_is_named_and_nobody_waits_for_it(folder: Path, results: list[Result]) -> None:
    assert [result.get("silent") for result in results] == [False, None, False]
    checks = checks_in(folder / "silent.json")
    assert checks["ranks"]["seen"] == "rank 1 (the_silent_host) did not answer within 10 s"
    assert checks["links"]["result"] == "skipped"


def test_a_rank_that_hangs_in_a_collective_is_named(folder: Path, results: list[Result]) -> None:
    assert [result.get("stuck") for result in results] == [False, None, False]
    checks = checks_in(folder / "stuck.json")
    assert checks["links"]["result"] == "fail"
    assert checks["links"]["seen"] == "rank 1 (the_stuck_host) did not answer"


def test_gradients_that_are_not_finite_are_named_by_parameter_and_rank(results: list[Result]) -> None:
    for result in results:
        none, one, all_ranks = result["gradients"]
        assert none == ""
        assert one == "weight (1 nan of 4) on rank 1"
        assert all_ranks == "bias (1 inf of 2) on ranks 0-2; weight (1 nan of 4) on rank 1"


def test_clocks_of_another_host_are_compared_with_rank_0s(results: list[Result]) -> None:
    own, *others = results[0]["clocks"]
    assert all(result["clocks"] == [own, *others] for result in results)
    assert own["ahead"] == own["uncertainty"] == 0.0
    for other in others:
        assert other["uncertainty"] > 0.0
        assert abs(other["ahead"] - 5000.0) <= other["uncertainty"]
    assert others[0] == others[1], "ranks of one host share a clock"


def test_one_ranks_rule_stops_all(results: list[Result]) -> None:
    memory = "step 4: memory/host_gb = 11 on rank 2: above 10, for 2 steps"
    assert [result["health"]["stop"] for result in results] == [f"health.rules stopped the run: {memory}"] * WORLD
    told = ["health: step 1: reward/mean = 0.1: below 0.5", f"health: {memory}"]
    assert [result["health"]["told"] for result in results] == [told, [], []]


@pytest.mark.parametrize(
    ("overrides", "status", "rewards", "own_store"),
    [
        ([], 0, "4 right answers: 1; empty ones: 0", "1"),  # as on several nodes
        (["reward.function=rewards.py:raises", "slurm.network=infiniband"], 1, "KeyError: 'unit'", "0"),
    ],
)
def test_the_command_shows_a_table_and_its_exit_status_tells(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    status: int,
    rewards: str,
    own_store: str,
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", own_store)
    report = tmp_path / "report.json"
    arguments = ["recipe.yaml", f"run_root={tmp_path}", *overrides, f"--json={report}"]
    with torchrun(2, "tools/preflight.py", *arguments, folder=folder) as command:
        finished = command.finish()
    assert finished.status == status, finished.err
    assert finished.out.startswith(f"preflight of checked: {'failed' if status else 'passed'}")
    assert finished.out.count("tokenizer") == 1
    assert json.loads(report.read_text())["passed"] is (status == 0)
    checks = checks_in(report)
    assert rewards in checks["rewards"]["seen"]
    assert (checks["rdma"]["result"] == "skipped") is (status == 0)
