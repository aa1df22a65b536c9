"""Hosts that vanish in a phase of reinforcement learning: power and cable go at once, and nothing says goodbye.

Others notice by their watchdog (retry.hang_seconds). Where the host comes back the run resumes; where the one with the
rendezvous is lost, the others end (docs/recovery.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from end_to_end.commands import ROOT, Command
from end_to_end.hosts import CABLE, Hosts, hosts_of
from end_to_end.runs import LENGTH_REWARD, TRAIN, decisions, make_model, make_sums, steps_of, wait_for

HANG_SECONDS, LOST_SECONDS = 10, 12
# Until all have said where they were: the watchdog's intervals, and twice its wait for those that are silent.
NOTICED = HANG_SECONDS + 25
# By then torchrun has long noticed; it waits for its ranks, and writes what they have said.
GIVEN_UP = NOTICED + LOST_SECONDS + 15
PHASES = ("generate", "score", "exchange", "logprobs", "update", "regather", "save")
CHANGES: dict[str, Any] = {
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train_files": ["train.parquet"], "max_prompt_length": 64},
    "batch": {"prompts_per_step": 2, "responses_per_prompt": 2, "minibatch_prompts": 1},
    "reward": {"function": "reward.py"},
    "evaluation": {"at_start": False, "at_end": False},
    "checkpoint": {"save_interval": 1, "export_at_end": False},
    "retry": {"hang_seconds": HANG_SECONDS, "hang_seconds_at_start": 300},
    "monitor": {"plots": False, "rollouts": {"every": 0}},
    "cluster": {"gpus_per_node": 1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the demo's recipe with a small model and few rows; all hosts see it."""
    path = tmp_path_factory.mktemp("lost")
    demo = yaml.safe_load((ROOT / "recipes" / "tiny_grpo.yaml").read_text())
    recipe = demo | CHANGES | {"rollout": {"max_response_length": 8, "scheduling": "static"}}
    (path / "grpo.yaml").write_text(yaml.safe_dump(recipe))
    (path / "reward.py").write_text(LENGTH_REWARD)
    make_model(path, layers=1)
    make_sums(path, 60)
    return path


@pytest.fixture(autouse=True)
def cable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what ranks of several hosts need in their environment."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", CABLE)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


def begun(hosts: Hosts, host: int, folder: Path, name: str, steps: int, restarts: int = 0, ours: str = "") -> Command:
    """Start torchrun on a host."""
    keys = (f"name={name}", f"steps={steps}")
    return hosts.start(host, folder, 1, TRAIN, "grpo.yaml", *keys, restarts=restarts, ours=ours)


def is_stopped(command: Command) -> bool:
    """Return True once its rank has stopped in the phase that RLHF_MEGATRON_FAULT names."""
    return "RLHF_MEGATRON_FAULT: stop" in command.so_far().err


@pytest.mark.parametrize(
    "phases",
    [("exchange", "update"), pytest.param(PHASES, marks=pytest.mark.grid)],
    ids=lambda phases: str(len(phases)),
)
def test_a_host_that_vanishes_and_comes_back_costs_a_restart(
    phases: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, steps = f"back-{len(phases)}", 3 + len(phases)
    run = folder / "runs" / name
    with hosts_of(2) as hosts, begun(hosts, 0, folder, name, steps, restarts=len(phases)) as first:
        for number, phase in enumerate(phases):
            monkeypatch.setenv("RLHF_MEGATRON_FAULT", f"stop@{phase}:{3 + number}:1")
            hosts.plug(1, "up")
            with begun(hosts, 1, folder, name, steps) as second:
                wait_for(first, lambda: is_stopped(second))
                vanished = hosts.vanish(1, second)
            wait_for(first, lambda: sum(line["what"] == "hang" for line in decisions(run)) == number + 1)  # noqa: B023
            assert decisions(run)[-1]["why"].endswith("; rank 1 said nothing")
            assert (run / "recovery.jsonl").stat().st_mtime - vanished < NOTICED
        monkeypatch.delenv("RLHF_MEGATRON_FAULT")
        hosts.plug(1, "up")
        with begun(hosts, 1, folder, name, steps) as second:
            assert [command.finish().status for command in (first, second)] == [0, 0]
    told = [line["what"] for line in decisions(run) if line["what"] != "fault"]
    assert told == ["start", *["hang", "restart", "resume"] * len(phases), "done"]
    assert sorted(steps_of(run)) == list(range(1, steps + 1))


@pytest.mark.parametrize(
    "phase", ["logprobs", *(pytest.param(each, marks=pytest.mark.grid) for each in PHASES if each != "logprobs")]
)
def test_without_the_host_of_the_rendezvous_the_others_end(
    phase: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_MEGATRON_FAULT", f"stop@{phase}:2:0")
    name = f"first-{phase}"
    ours = f"lost_seconds={LOST_SECONDS}"
    with hosts_of(2) as hosts:
        first, second = (begun(hosts, host, folder, name, 4, restarts=host, ours=ours) for host in range(2))
        with first, second:
            wait_for(second, lambda: is_stopped(first))
            vanished = hosts.vanish(0, first)
            finished = second.finish()
    assert finished.status == 1
    assert f":29500 has not answered for {LOST_SECONDS} s; this node ends with it" in finished.err
    assert finished.ended - vanished < GIVEN_UP
