"""The demo's reinforcement learning on hosts that are network namespaces: bytes between them against the plan, a slow
link in metrics and page, and hosts that vanish.

Bytes are those that the kernel counts at each host's cable, less the headers of Ethernet, IP and TCP. Runs of different
numbers of steps are subtracted, so that the start and the end cancel.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from end_to_end.commands import ROOT, python
from end_to_end.hosts import CABLE, Hosts, hosts_of
from end_to_end.runs import TRAIN, make_sums, steps_of
from rlhf_megatron.monitor.page import view_of
from rlhf_megatron.planning.report import plan_text
from rlhf_megatron.recipe import load_recipe

PROMPT_TOKENS, RESPONSE_TOKENS = 11, 16
SLOW_MBIT = 40
CHANGES: dict[str, Any] = {
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train_files": ["train.parquet"], "max_prompt_length": PROMPT_TOKENS},
    "batch": {"prompts_per_step": 4, "responses_per_prompt": 4, "minibatch_prompts": 2},
    "evaluation": {"at_start": False, "at_end": False},
    "checkpoint": {"export_at_end": False},
    "monitor": {"plots": False, "rollouts": {"every": 0}},
    "cluster": {"gpus_per_node": 1, "link_gb_per_sec": 1.0},
    "health": {"rules": [{"metric": "network/busy_fraction", "when": "above", "value": 0.3, "steps": 2}]},
}
# All responses of one length, so that the plan knows it.
LENGTHS = {"max_response_length": RESPONSE_TOKENS, "drawn_lengths": {"mean": RESPONSE_TOKENS, "sigma": 0}}
OUTPUT = re.compile(r"Between hosts in one step.*\n.* = ([\d.,]+)\n.*\n  over gloo.* = ([\d.,]+)\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the demo's recipe with a model of random weights and few rows; all hosts see it."""
    path = tmp_path_factory.mktemp("demo")
    demo = yaml.safe_load((ROOT / "recipes" / "tiny_grpo.yaml").read_text())
    recipe = demo | CHANGES | {"rollout": demo["rollout"] | LENGTHS}
    (path / "grpo.yaml").write_text(yaml.safe_dump(recipe))
    python("tools/make_tiny_model.py", "--output=model", folder=path).check()
    make_sums(path, 60)
    return path


@pytest.fixture(autouse=True)
def cable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what ranks of several hosts need in their environment."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", CABLE)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


def trained(hosts: Hosts, folder: Path, name: str, steps: int, layout: str) -> tuple[int, list[str]]:
    """Train with a rank on each host; return the bytes that all have sent, and what the first one wrote."""
    before = hosts.sent_without_headers()
    keys = (f"name={name}", f"steps={steps}", f"actor.layout={layout}")
    with ExitStack() as stack:
        commands = [
            stack.enter_context(hosts.start(host, folder, 1, TRAIN, "grpo.yaml", *keys))
            for host in range(len(hosts.names))
        ]
        finished = [command.finish().check() for command in commands]
    return hosts.sent_without_headers() - before, [finished[0].out, finished[0].err]


def planned(folder: Path, world: int, layout: str, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return bytes that all hosts send in a step, by what --dry-run prints for gloo."""
    monkeypatch.chdir(folder)
    found = OUTPUT.search(plan_text(load_recipe("grpo.yaml", [f"actor.layout={layout}"]), world))
    assert found
    return float(found[2].replace(",", "")) * 2**20


@pytest.mark.parametrize(
    ("count", "layout"),
    [
        (2, "{tensor: 1}"),
        pytest.param(2, "{tensor: 2}", marks=pytest.mark.grid),
        pytest.param(4, "{tensor: 2}", marks=pytest.mark.grid),
    ],
)
def test_bytes_between_hosts_are_those_of_the_plan_and_a_slow_link_is_named(
    count: int, layout: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{speed}-{count}-{layout[-2]}" for speed in ("fast", "slow")]
    with hosts_of(count) as hosts:
        few, _ = trained(hosts, folder, names[0], 2, layout)
        hosts.shape(SLOW_MBIT)
        many, said = trained(hosts, folder, names[1], 4, layout)
    step = planned(folder, count, layout, monkeypatch)
    assert (many - few) / 2 == pytest.approx(step, rel=0.05)

    fast, slow = (steps_of(folder / "runs" / name) for name in names)
    limit = SLOW_MBIT * 1e6 / 8 / 2**20
    assert slow[4]["network/link_mb_per_sec"] < 1.3 * limit < fast[2]["network/link_mb_per_sec"]
    assert slow[4]["network/busy_fraction"] > max(0.5, fast[2]["network/busy_fraction"])
    update = {what: slow[4][f"network/update_{what}"] for what in ("mb", "planned_mb", "seconds", "planned_seconds")}
    assert update["mb"] == pytest.approx(update["planned_mb"], rel=0.1), "with headers, and what acknowledges: 7%"
    assert update["planned_seconds"] * 10 < update["seconds"] <= slow[4]["time/update"], "1 GB/s was planned"
    assert any("network/busy_fraction" in text for text in said), "a rule of health speaks of it"
    busiest, cells = view_of("slow", folder / "runs" / names[1]).network[0]
    assert busiest in ("update", "logprobs") and all(cells)


def test_links_with_delay_and_loss_change_no_number(folder: Path) -> None:
    with hosts_of(2) as hosts:
        hosts.shape(SLOW_MBIT, delay_ms=5, loss=0.001)
        trained(hosts, folder, "lossy", 2, "{tensor: 1}")
    assert sorted(steps_of(folder / "runs" / "lossy")) == [1, 2]
