"""Whole runs whose trajectories a program plays with the openai client: what it heard is what is trained."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from make_tiny_model import make_talkative

from end_to_end.commands import Finished, torchrun
from end_to_end.runs import TRAIN, logged, make_model, make_sums, metrics_of, on_two_ranks, wait_for
from rlhf_megatron.rollout.vllm.process_environment import has_gpu

pytestmark = pytest.mark.skipif(has_gpu(), reason="the engine of this machine needs a GPU, which is hidden here")

RECIPE: dict[str, Any] = {
    "name": "whole",
    "loop": "rl",
    "steps": 2,
    "deterministic": True,
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train_files": ["train.parquet"], "max_prompt_length": 64},
    "batch": {"prompts_per_step": 2, "responses_per_prompt": 2},
    "actor": {"tokens_per_gpu": 512, "optimizer": {"learning_rate": 1e-3}},
    "rollout": {
        "max_response_length": 100,
        "scheduling": "static",
        "agent": {"function": "agent.py", "timeout_seconds": 300.0},
    },
    "reward": {"rule": "none"},
    "evaluation": {"at_start": False, "at_end": False},
    "checkpoint": {"save_interval": 1, "export_at_end": False},
    "monitor": {"plots": False, "rollouts": {"every": 1}},
}
# Two turns, an answer that is rewritten, and another turn. What was heard is written down.
AGENT = """
import json, os
import openai

def run(base_url, api_key, row):
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages, branches, length = list(row["prompt"]), [[]], 0
    for turn in range(3):
        answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=20).choices[0]
        branches[-1].append(answer.token_ids)
        length += len(answer.message.content)
        messages.append({"role": "assistant", "content": answer.message.content.strip()})
        if turn == 1:
            messages[-1]["content"] += " (so it is)"
            branches.append([])
        messages.append({"role": "user", "content": f"{turn}: {length}"})
    with open(os.path.join(os.path.dirname(__file__), "heard.jsonl"), "a") as file:
        file.write(json.dumps([branches, length % 5 / 4]) + "\\n")
    return length % 5 / 4
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("agents")
    (path / "agent.py").write_text(AGENT)
    (path / "agents.yaml").write_text(yaml.safe_dump(RECIPE))
    make_model(path, layers=2)
    make_talkative(path / "model")
    make_sums(path, 24, "--seed=1")
    return path


@pytest.fixture(scope="module")
def train(folder: Path) -> Callable[..., Finished]:
    return on_two_ranks(folder, "agents.yaml")


@pytest.fixture(scope="module")
def whole(folder: Path, train: Callable[..., Finished]) -> dict[int, dict[str, float]]:
    train().check()
    return metrics_of(folder / "runs" / "whole")


def sampled(row: dict[str, Any]) -> list[int]:
    pairs = zip(row["tokens"], row["sampled"], strict=True)
    return [token for token, own in pairs if own]


def joined(answers: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(token for answer in answers for token in answer)


def test_what_programs_heard_is_what_is_trained(folder: Path, whole: dict[int, dict[str, float]]) -> None:
    heard = [json.loads(line) for line in (folder / "heard.jsonl").read_text().splitlines()[:8]]
    wanted = sorted((joined(branch), reward) for branches, reward in heard for branch in branches)
    found = []
    for step, metrics in whole.items():
        assert metrics["rollout/agent_requests"] == 12 and metrics["rollout/agent_failures"] == 0
        assert metrics["rollout/agent_branches"] == 4 and metrics["rollout/agent_ends"] == 4
        # Where a logprob came from another place of the row, or of a token that was not sampled, these differ.
        assert metrics["train/mismatch_kl"] < 1e-9 and metrics["train/rollout_logprob_abs_diff"] < 1e-5
        rows = pq.read_table(folder / "runs" / "whole" / "rollouts" / f"step-{step}.parquet").to_pylist()
        assert len(rows) == 8 and all(row["reward_agent"] == row["reward"] for row in rows)
        found += [(tuple(sampled(row)), row["reward"]) for row in rows]
        assert metrics["reward/mean"] == pytest.approx(sum(row["reward"] for row in rows[::2]) / 4, rel=1e-6)
        for row, other in zip(rows[::2], rows[1::2], strict=True):
            assert row["advantage"] == pytest.approx(other["advantage"]) and "(so it is)" in other["prompt"]
    assert sorted(found) == wanted


@pytest.mark.grid
def test_a_killed_run_resumes_bit_for_bit(
    folder: Path, whole: dict[int, dict[str, float]], train: Callable[..., Finished]
) -> None:
    with torchrun(2, TRAIN, "agents.yaml", "name=killed", folder=folder) as command:
        wait_for(command, lambda: logged(folder / "runs" / "killed") >= 1)
        command.rank(1).kill()
        command.finish()
    train("name=killed").check()
    assert metrics_of(folder / "runs" / "killed") == whole


@pytest.mark.grid
def test_a_killed_run_does_not_play_again_what_has_ended(
    folder: Path, whole: dict[int, dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_MEGATRON_FAULT", "kill@update:2:1")
    before = len((folder / "heard.jsonl").read_text().splitlines())
    keys = ("name=journaled", "rollout.scheduling=queue", "deterministic=false")
    with torchrun(2, TRAIN, "agents.yaml", *keys, folder=folder, restarts=1) as command:
        command.finish().check()
    metrics = metrics_of(folder / "runs" / "journaled")
    assert [values["rollout/trajectories_replayed"] for values in metrics.values()] == [4, 4]
    heard = [json.loads(line) for line in (folder / "heard.jsonl").read_text().splitlines()[before:]]
    assert len(heard) == 8, "each trajectory is played once"
    found = []
    for step, values in metrics.items():
        assert values["train/mismatch_kl"] < 1e-9 and values["rollout/agent_divergences"] == 0
        rows = pq.read_table(folder / "runs" / "journaled" / "rollouts" / f"step-{step}.parquet").to_pylist()
        found += [(tuple(sampled(row)), row["reward"]) for row in rows]
    assert sorted(found) == sorted((joined(branch), reward) for branches, reward in heard for branch in branches)


@pytest.mark.grid
def test_a_replica_of_two_ranks_has_the_same_branches(
    folder: Path, whole: dict[int, dict[str, float]], train: Callable[..., Finished]
) -> None:
    train("name=pair", "rollout.layout.tensor=2", "actor.layout.tensor=2", "steps=1").check()
    (pair,) = metrics_of(folder / "runs" / "pair").values()
    for name in ("rollout/agent_branches", "rollout/response_length_mean", "reward/mean"):
        assert pair[name] == pytest.approx(whole[1][name], rel=1e-6), name
    assert pair["train/mismatch_kl"] < 1e-9 and pair["train/rollout_logprob_abs_diff"] < 1e-5
