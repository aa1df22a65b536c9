"""The single checks of a preflight, on real files, tokenizers and reward functions; ranks are in tests/parallel."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from hugging_face import make_model
from rlhf_megatron.monitor.gpu import SLOWDOWNS, GpuState
from rlhf_megatron.planning.memory import checkpoint_bytes
from rlhf_megatron.planning.model_folders import planned_architectures
from rlhf_megatron.preflight import agreement, bandwidth, machine
from rlhf_megatron.preflight.check import (
    Check,
    NoAnswer,
    as_json,
    check_lines,
    mistakes_of,
    over_ranks,
    print_table,
    run_check,
    within,
)
from rlhf_megatron.preflight.file_checks import (
    data_checks,
    file_checks,
    models_checks,
    reward_check,
    tokenizer_check,
    turns_check,
)
from rlhf_megatron.preflight.rank_answers import RankAnswers
from rlhf_megatron.recipe import Recipe, make_recipe
from rlhf_megatron.runtime.ranks import named_ranks
from tiny_tokenizer import write_bpe_tokenizer

ROOT = Path(__file__).resolve().parents[2]
HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with a tokenizer, and data."""
    path = tmp_path_factory.mktemp("preflight")
    write_bpe_tokenizer(make_model(path / "model", vocabulary=400))
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"What is {number} plus three?"}],
            "reward_model": {"style": "rule", "ground_truth": str(number + 3)},
        }
        for number in range(6)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path / "train.parquet")
    return path


@pytest.fixture
def recipe_of(folder: Path) -> Callable[..., Recipe]:
    """Make a recipe over the folder's model and data, with some sections replaced."""

    def make(**sections: Any) -> Recipe:
        values = {
            "name": "preflight",
            "loop": "rl",
            "steps": 1,
            "model": {"path": str(folder / "model"), "dtype": "float32"},
            "data": {"train_files": [str(folder / "train.parquet")], "max_prompt_length": 64},
            "batch": {"prompts_per_step": 2, "responses_per_prompt": 2},
            "actor": {"tokens_per_gpu": 256, "optimizer": {"learning_rate": 1e-4}},
            "rollout": {"max_response_length": 8},
            "evaluation": {"at_start": False, "at_end": False},
        }
        return make_recipe({**values, **sections}, "test")

    return make


# Checks and how they are put together


def test_ranks_are_named_briefly() -> None:
    assert named_ranks([3]) == "rank 3"
    assert named_ranks([5, 0, 2, 1, 1]) == "ranks 0-2, 5"
    assert named_ranks([2, 1], HOSTS) == "ranks 1-2 (a, b)"
    many = named_ranks(range(1024), {rank: f"n{rank // 8}" for rank in range(1024)})
    assert many == "ranks 0-1023 (n0, n1, n2 and 125 more)"


def test_work_has_a_time_limit_and_its_errors_come_through() -> None:
    assert within(5.0, lambda: 7) == 7
    with pytest.raises(NoAnswer, match=r"no end within 0.05 s"):
        within(0.05, lambda: time.sleep(5))
    with pytest.raises(ZeroDivisionError):
        within(5.0, lambda: 1 // 0)


def test_a_check_that_hangs_or_raises_is_a_failure_with_its_reason() -> None:
    [late] = run_check("disk", 0.05, lambda: time.sleep(5))
    assert (late.result, late.seen) == ("fail", "disk: no end within 0.05 s")
    [raised] = run_check("disk", 5.0, lambda: [][1])
    assert (raised.result, raised.seen) == ("fail", "disk: IndexError: list index out of range")
    [unstarted] = run_check("disk", -1.0, lambda: Check("disk", "ok", ""))
    assert unstarted.result == "skipped"


def test_the_worst_of_all_ranks_counts_and_is_told_with_its_ranks() -> None:
    hot, fine = Check("heat", "warn", "91 C", "cool it"), Check("heat", "ok", "40 C")
    alone = Check("disk", "ok", "1 GB")
    merged = over_ranks({0: [fine, alone], 1: [hot], 2: [hot], 3: [hot._replace(seen="93 C")]}, HOSTS)
    assert merged == [Check("heat", "warn", "ranks 1-2 (a, b): 91 C; rank 3 (b): 93 C", "cool it"), alone]


def test_table_and_json_hold_every_check() -> None:
    checks = [Check("data", "ok", "2 files"), Check("links", "fail", "[red]slow[/red]", "look at it")]
    stream = io.StringIO()
    print_table(checks, "preflight", stream)
    assert "[red]slow[/red]" in stream.getvalue() and "look at it" in stream.getvalue()
    report = json.loads(as_json(checks, {"recipe": "r"}))
    assert report["recipe"] == "r" and report["passed"] is False
    assert report["checks"][1] == {
        "name": "links", "result": "fail", "seen": "[red]slow[/red]", "advice": "look at it"
    }  # fmt: skip


# Agreement


def test_what_differs_is_named_with_the_ranks_that_stand_apart() -> None:
    same = {rank: {"torch": "2.13", "numpy": "2.1"} for rank in range(4)}
    assert agreement.agree("versions", same, HOSTS) == Check("versions", "ok", "packages: 2, the same on 4 ranks")
    other = {**same, 2: {"torch": "2.11", "numpy": "2.1"}, 3: {"torch": "2.11"}}
    check = agreement.agree("versions", {**other, 4: same[0]}, HOSTS)
    assert check.result == "fail"
    assert check.seen == "torch: 2.13, but 2.11 on ranks 2-3 (b); numpy: 2.1, but missing on rank 3 (b)"
    assert agreement.agree("settings", other, HOSTS).result == "warn"


def test_files_are_told_apart_at_both_ends_and_when_they_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "data"
    seen = set()
    for content in (b"a" * 3_000_000, b"b" + b"a" * 2_999_999, b"a" * 2_999_999 + b"b", b"a" * 2_999_999, b"", b"a"):
        path.write_bytes(content)
        seen.add(agreement.fingerprint(path))
    assert len(seen) == 6
    missing = agreement.fingerprint(tmp_path / "none")
    assert missing == "missing (No such file or directory)"
    check = agreement.agree("data", {rank: {"none": missing} for rank in range(2)}, HOSTS)
    assert (check.result, check.seen) == ("fail", "none: missing (No such file or directory) on all ranks")


def test_facts_cover_code_recipe_data_model_and_rewards(recipe_of: Callable[..., Recipe], tmp_path: Path) -> None:
    function = tmp_path / "reward.py"
    function.write_text("def score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n")
    recipe = recipe_of(reward={"function": f"{function}:score"})
    facts = agreement.facts(recipe)
    sources = list((ROOT / "rlhf_megatron").rglob("*.py")) + list((ROOT / "kernels").rglob("*.py"))
    assert len(facts["code"]) == len(sources) + 1 and str(function) in facts["code"]
    assert set(facts["data"]) == set(recipe.data.train_files)
    assert {Path(path).name for path in facts["model"]} >= {"config.json", "model.safetensors", "tokenizer.json"}
    again = agreement.facts(recipe_of(reward={"function": f"{function}:score"}, seed=2))
    assert [key for key in facts["recipe"] if facts["recipe"][key] != again["recipe"][key]] == ["seed"]
    assert facts["versions"] == again["versions"] and facts["code"] == again["code"]


# The machine


def gpu(**more: Any) -> GpuState:
    healthy = {
        "name": "GPU", "memory_gb": 80.0, "free_gb": 79.0, "temperature": 45, "slowdown_temperature": 90,
        "clock_mhz": 1900, "most_clock_mhz": 1980, "uncorrected_errors": 0, "remap_pending": False,
        "remap_failed": False, "processes": (17,),
    }  # fmt: skip
    return GpuState(**(healthy | more))


@pytest.mark.parametrize(
    ("state", "judged"),
    [
        (gpu(), {}),
        (gpu(free_gb=70.0), {"gpu memory": "warn"}),
        (gpu(free_gb=9.0, processes=(17, 99)), {"gpu memory": "fail", "gpu processes": "warn"}),
        (gpu(uncorrected_errors=2), {"gpu errors": "fail"}),
        (gpu(remap_failed=True), {"gpu errors": "fail"}),
        (gpu(remap_pending=True), {"gpu errors": "warn"}),
        (gpu(temperature=86), {"gpu temperature": "warn"}),
        (gpu(temperature=90), {"gpu temperature": "fail"}),
        (gpu(slowdowns=(SLOWDOWNS["nvmlClocksEventReasonHwPowerBrakeSlowdown"],)), {"gpu clocks": "fail"}),
        (gpu(slowdowns=(SLOWDOWNS["nvmlClocksEventReasonSwThermalSlowdown"],)), {"gpu clocks": "warn"}),
        (gpu(clock_mhz=600), {"gpu clocks": "warn"}),
        # at the power limit clocks fall on healthy GPUs too
        (gpu(clock_mhz=1100, slowdowns=(SLOWDOWNS["nvmlClocksEventReasonSwPowerCap"],)), {}),
        (GpuState("old", 16.0, 16.0), {"gpu errors": "skipped", "gpu temperature": "skipped", "gpu clocks": "skipped"}),
    ],
)
def test_a_gpu_is_judged_by_what_the_driver_tells(state: GpuState, judged: dict[str, str]) -> None:
    checks = [*machine.judge_memory(state), *machine.judge_under_load(state)]
    assert {check.name: check.result for check in checks if check.result != "ok"} == judged
    assert all(check.advice for check in checks if check.result in ("warn", "fail"))
    assert len(checks) == 5


def test_rdma_ports_are_read_from_the_kernels_tree(tmp_path: Path) -> None:
    assert machine.rdma_check(False, tmp_path).result == "skipped"
    assert machine.rdma_check(True, tmp_path).result == "fail"
    for name, state in (("mlx5_0", "1: DOWN"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    check = machine.rdma_check(True, tmp_path)
    assert (check.result, check.seen) == ("fail", "no active port (mlx5_0:1, mlx5_1:1 are down)")
    (tmp_path / "mlx5_0" / "ports" / "1" / "state").write_text("4: ACTIVE\n")
    check = machine.rdma_check(True, tmp_path)
    assert (check.result, check.seen) == ("warn", "mlx5_0:1 (400 Gb/sec (4X NDR)); down: mlx5_1:1")
    (tmp_path / "mlx5_1" / "ports" / "1" / "state").write_text("4: ACTIVE\n")
    assert machine.rdma_check(True, tmp_path).result == "ok"


def test_the_disk_must_hold_the_runs_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "WRITE_BYTES", 1 << 20)
    run = tmp_path / "runs" / "name"
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    none = machine.Files(0, free * 9)
    assert machine.disk_check(run, machine.Files(3, 1000.0), none, 1.0).result == "ok"
    assert list(run.iterdir()) == []
    assert machine.disk_check(run, machine.Files(3, free / 2), none, 1e-6).result == "warn"  # one fits, three do not
    assert machine.disk_check(run, none, machine.Files(9, free / 8), 1e-6).result == "warn"
    assert machine.disk_check(run, machine.Files(1, free / 1.5), machine.Files(1, free / 2), 1e-6).result == "fail"
    assert "save less often" in machine.disk_check(run, machine.Files(1, free / 10), none, 1e9).advice  # hours for each
    (tmp_path / "file").write_text("")
    assert machine.disk_check(tmp_path / "file" / "name", none, none, 1.0).result == "fail"


def test_a_checkpoint_holds_three_float32_numbers_for_each_parameter(
    recipe_of: Callable[..., Recipe], folder: Path
) -> None:
    recipe = recipe_of()
    parameters = AutoModelForCausalLM.from_pretrained(folder / "model").num_parameters()
    assert checkpoint_bytes(recipe, planned_architectures(recipe)) == 12.0 * parameters


# Links


@given(st.lists(st.integers(0, 5), min_size=1, max_size=24))
def test_every_rank_meets_its_neighbours_and_is_never_busy_twice(nodes: list[int]) -> None:
    pairs = bandwidth.neighbours(nodes)
    assert len(pairs) == len(set(pairs)) and all(a < b < len(nodes) for a, b in pairs)
    for rank, node in enumerate(nodes):
        met = {a + b - rank for a, b in pairs if rank in (a, b)}
        assert nodes.count(node) == 1 or any(nodes[other] == node for other in met)
    planned = bandwidth.rounds(pairs)
    assert sorted(pair for stage in planned for pair in stage) == sorted(pairs)
    assert all(len({rank for pair in stage for rank in pair}) == 2 * len(stage) for stage in planned)


def test_each_gpu_reaches_its_own_kind_in_the_next_node() -> None:
    nodes = [0] * 4 + [1] * 4
    assert {pair for pair in bandwidth.neighbours(nodes) if nodes[pair[0]] != nodes[pair[1]]} == {
        (0, 4), (1, 5), (2, 6), (3, 7)
    }  # fmt: skip
    assert len(bandwidth.rounds(bandwidth.neighbours([rank // 8 for rank in range(1024)]))) <= 6


def measured(speeds: dict[tuple[int, int], float], bandwidth: float = 40.0) -> dict[int, dict[str, Any]]:
    ranks = sorted({rank for pair in speeds for rank in pair})
    return {
        rank: {
            "all_reduce": bandwidth - rank,
            "wrong": [],
            "pairs": [[*pair, speed] for pair, speed in speeds.items() if rank in pair],
        }
        for rank in ranks
    }


def test_slow_links_are_named_against_expectation_and_median() -> None:
    nodes = [0, 0, 1, 1]
    good = measured({(0, 1): 300.0, (2, 3): 290.0, (0, 2): 24.0, (1, 3): 23.0})
    checks = {check.name: check for check in bandwidth.judge(good, nodes, HOSTS, 25.0)}
    assert {check.result for check in checks.values()} == {"ok"}
    assert checks["all-reduce"].seen == "37.00 GB/s bus bandwidth, slowest on rank 3 (b), 25 expected"
    assert checks["pairs between nodes"].seen.startswith("23.00 GB/s on ranks 1, 3 (a, b), median 23.50 of 2")
    slow = measured({(0, 1): 300.0, (2, 3): 290.0, (0, 2): 24.0, (1, 3): 8.0}, bandwidth=18.0)
    results = {check.name: check.result for check in bandwidth.judge(slow, nodes, HOSTS, 25.0)}
    assert results == {"all-reduce": "warn", "pairs in a node": "ok", "pairs between nodes": "fail"}
    ring = measured({(0, 1): 300.0, (1, 2): 310.0, (2, 3): 100.0, (0, 3): 290.0})
    [_, pairs] = bandwidth.judge(ring, [0] * 4, HOSTS, 25.0)  # what the recipe expects is between nodes
    assert pairs.result == "warn" and pairs.seen == "100.00 on ranks 2-3 (b); median 295.00 GB/s of 4 pairs"


def test_silence_hangs_and_wrong_data_name_their_ranks() -> None:
    nodes, good = [0] * 4, measured({(0, 1): 1.0, (2, 3): 1.0})
    [check] = bandwidth.judge({rank: good[rank] for rank in (0, 1, 3)}, nodes, HOSTS, None)
    assert check.seen == "rank 2 (b) did not answer"
    stuck = {0: {"at": "pair 0-1"}, 1: {"at": "pair 1-2"}, 2: {"at": "pair 1-2"}, 3: {"at": "pair 0-3"}}
    [check] = bandwidth.judge(stuck, nodes, HOSTS, None)
    assert check.seen == "no end: ranks 1-2 (a, b) at pair 1-2"  # the others wait for these
    [check] = bandwidth.judge({**good, 1: {"at": "joining", "error": "refused"}}, nodes, HOSTS, None)
    assert check.seen == "no end: rank 1 (a) at joining (refused)"
    good[2]["wrong"] = ["pair 2-3"]
    [check] = bandwidth.judge(good, nodes, HOSTS, None)
    assert (check.result, check.seen) == ("fail", "wrong data from pair 2-3")


# Tokenizer and rewards


def test_the_tokenizer_renders_the_first_rows(recipe_of: Callable[..., Recipe], tmp_path: Path) -> None:
    check = tokenizer_check(recipe_of())
    assert check.result == "ok" and check.seen.startswith("4 rows of ")
    data = recipe_of().data.model_dump() | {"system_prompt": "Use digits."}
    assert tokenizer_check(recipe_of(data=data)).seen != check.seen
    data = recipe_of().data.model_dump() | {"max_prompt_length": 2}
    assert tokenizer_check(recipe_of(data=data)).result == "warn"
    template = tmp_path / "template.jinja"
    template.write_text("{{ raise_exception('no such role') }}")
    data = recipe_of().data.model_dump() | {"chat_template": str(template)}
    [check] = run_check("tokenizer", 60.0, lambda: tokenizer_check(recipe_of(data=data)))
    assert check.result == "fail" and "no such role" in check.seen


def test_right_answers_are_scored_by_rules_and_functions(recipe_of: Callable[..., Recipe], tmp_path: Path) -> None:
    assert reward_check(recipe_of()) == Check("rewards", "ok", "4 right answers: 1; empty ones: 0")
    header = "def {}(data_source, solution_str, ground_truth, extra_info):\n    "
    path = tmp_path / "reward.py"
    path.write_text(header.format("half") + "return 0.5\n\n" + header.format("bad") + "return ground_truth.length\n")
    half = reward_check(recipe_of(reward={"function": f"{path}:half"}))
    assert half == Check("rewards", "ok", "4 right answers: 0.5; empty ones: 0.5")
    [bad] = run_check("rewards", 60.0, lambda: reward_check(recipe_of(reward={"function": f"{path}:bad"})))
    assert bad.result == "fail" and "'str' object has no attribute 'length'" in bad.seen


def test_who_speaks_between_turns_is_tried(recipe_of: Callable[..., Recipe], tmp_path: Path) -> None:
    assert turns_check(recipe_of()) == []
    path = tmp_path / "talk.py"
    header = "def {}(messages, ground_truth, extra_info):\n    "
    path.write_text(
        header.format("respond")
        + "return None if ground_truth == '3' else {'role': 'user', 'content': 'sure?'}\n\n"
        + header.format("bad")
        + "return messages[-1]['text']\n\n"
        + header.format("tool")
        + "return 'ok'\n"
    )

    def check(name: str) -> Check:
        turns = {"max_response_length": 8, "multi_turn": {"function": f"{path}:{name}"}}
        [found] = run_check("turns", 60.0, lambda: turns_check(recipe_of(rollout=turns)))
        return found

    assert check("respond") == Check("turns", "ok", "4 right answers: 3 answered, 1 ended")
    assert check("bad").result == "fail" and "KeyError: 'text'" in check("bad").seen
    assert check("tool").result == "fail" and "unknown role tool" in check("tool").seen
    assert check("none").result == "fail" and "has no function none" in check("none").seen
    game = Path(__file__).resolve().parents[2] / "recipes" / "environments" / "guess.py"
    played = recipe_of(rollout={"max_response_length": 8, "multi_turn": {"environment": str(game)}})
    assert turns_check(played) == [Check("turns", "ok", "4 right answers: 0 answered, 4 ended")]


def test_a_row_of_test_cases_is_tried_with_a_program_that_knows_them(
    recipe_of: Callable[..., Recipe], tmp_path: Path
) -> None:
    row = {
        "data_source": "codeforces",
        "prompt": [{"role": "user", "content": "Add the numbers."}],
        "reward_model": {"style": "rule", "ground_truth": json.dumps({"inputs": ["1 2"], "outputs": ["3"]})},
    }
    data = tmp_path / "code.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), data)
    check = reward_check(recipe_of(data={"train_files": [str(data)], "max_prompt_length": 64}))
    assert check.result == "ok"
    assert check.seen.startswith("1 right answers: 1; empty ones: 0; programs: isolation full (files, memory, ")


def test_beside_a_reward_model_rewards_are_tried_where_there_are_any(
    recipe_of: Callable[..., Recipe], folder: Path
) -> None:
    judge = {"path": str(folder / "model"), "tokens_per_gpu": 256}
    scored = Check("rewards", "ok", "4 right answers: 1; empty ones: 0")
    assert reward_check(recipe_of(reward_model=judge)) == scored
    alone = reward_check(recipe_of(reward_model=judge, reward={"rule": "none"}))
    assert alone == Check("rewards", "skipped", "a model or an environment gives them")


def test_a_right_answer_without_reward_is_told(recipe_of: Callable[..., Recipe], tmp_path: Path) -> None:
    row = {
        "data_source": "math",
        "prompt": [{"role": "user", "content": "What is half?"}],
        "reward_model": {"style": "rule", "ground_truth": ""},
    }
    data = tmp_path / "unanswered.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), data)
    section = {"train_files": [str(data)], "max_prompt_length": 64}
    check = reward_check(recipe_of(data=section))
    assert check.result == "warn" and check.seen.endswith("row 0 (math) gains nothing by its right answer")
    [check] = run_check("rewards", 60.0, lambda: reward_check(recipe_of(data=section, reward={"rule": "gsm8k"})))
    assert check.result == "fail" and "ground_truth '' is not a number" in check.seen
    sft = recipe_of(loop="sft", batch={"prompts_per_step": 2}, rollout=None)
    assert reward_check(sft).result == "skipped"


# All of them together, as a dry run makes them


def test_a_dry_run_checks_what_the_recipe_names(recipe_of: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = recipe_of().model_copy(update={"run_root": str(tmp_path / "runs")})
    checks = file_checks(recipe)
    assert [(check.name, check.result) for check in checks] == [
        *(("trackers", "ok"), ("models", "ok"), ("rows", "ok"), ("rewards", "ok"), ("tokenizer", "ok"), ("disk", "ok"))
    ]
    assert check_lines(checks)[2] == "rows: 6 training rows" and mistakes_of(checks) == []
    assert not (tmp_path / "runs").exists(), "nothing is made"
    service = recipe_of(reward={"service": {"url": "http://127.0.0.1:9/never"}})
    asked = [check for check in file_checks(service) if check.name == "rewards"]
    assert asked == [Check("rewards", "skipped", "a service gives them, which tools/preflight.py asks")]


def test_all_mistakes_are_told_each_once(
    recipe_of: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    unanswered = tmp_path / "unanswered.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1 + 1"]}), unanswered)
    (tmp_path / "template.jinja").write_text("{% if")
    missing = str(tmp_path / "missing.parquet")
    recipe = recipe_of(
        data={
            "train_files": [str(unanswered)],
            "validation_files": [missing],
            "max_prompt_length": 64,
            "chat_template": str(tmp_path / "template.jinja"),
        },
        reward={"function": f"{tmp_path}/nowhere.py:score"},
        reference={"path": str(tmp_path / "no_model"), "tokens_per_gpu": 256},
        monitor={"trackers": ["jsonl", "wandb"]},
        checkpoint={"save_interval": 1},
        algorithm={"kl_coef": 0.1},
    )
    checks = file_checks(recipe)
    mistakes = mistakes_of(checks)
    for part in (
        "monitor.trackers: wandb not installed; pip install",
        f"reference.path: there is no {tmp_path}/no_model/config.json; download the model",
        f"{unanswered}, columns data_source, reward_model: missing",
        "nowhere.py",
        f"{missing}: there is no such file",
        "data.chat_template is not valid Jinja",
    ):
        assert sum(part in mistake for mistake in mistakes) == 1, (part, mistakes)
    assert len(mistakes) == 6 and all("\n" not in mistake for mistake in mistakes)


def test_rows_of_all_files_are_counted_and_roles_have_models(recipe_of: Callable[..., Recipe], folder: Path) -> None:
    data = {"train_files": [str(folder / "train.parquet")], "max_prompt_length": 64}
    both = recipe_of(data=data | {"validation_files": [str(folder / "train.parquet")]})
    assert data_checks(both) == [Check("rows", "ok", "6 training rows and 6 validation rows")]
    judge = {"path": str(folder / "model"), "tokens_per_gpu": 256}
    assert models_checks(recipe_of(reward_model=judge)) == [Check("models", "ok", "those of actor")]


def test_weights_that_are_not_there_are_told(recipe_of: Callable[..., Recipe], folder: Path, tmp_path: Path) -> None:
    def models(path: Path, **model: Any) -> list[Check]:
        return models_checks(recipe_of(model={"path": str(path), "dtype": "float32", **model}))

    shutil.copytree(folder / "model", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    [check] = models(tmp_path / "model")
    assert check.result == "warn" and "neither model.safetensors nor model.safetensors.index.json" in check.seen
    assert models(tmp_path / "model", random_weights=True)[0].result == "ok"
    files = {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (tmp_path / "model" / files["a"]).write_bytes(b"")
    [check] = models(tmp_path / "model")
    assert check.result == "warn" and check.seen.endswith(f"lacks 1 of 2 files of weights, such as {files['b']}")


def test_rank_0_which_serves_the_store_waits_until_its_word_is_heard() -> None:
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connected = dist.TCPStore("127.0.0.1", served.port, is_master=False, wait_for_workers=False)

    def listen_late() -> Any:
        time.sleep(0.5)
        return RankAnswers(connected, 1, 2).hear("verdict", 10.0)

    with ThreadPoolExecutor(1) as threads:
        heard = threads.submit(listen_late)
        lead = RankAnswers(served, 0, 2)
        lead.announce("verdict", True)
        lead.wait_until_heard("verdict", [1], 10.0)
        del lead, served  # as when rank 0 ends
        assert heard.result() is True
