"""tools/verl/verl_keys.tsv: what becomes of verl's keys, beside verl's defaults and beside the code that reads them.

``verl_defaults.txt`` has the keys and defaults of verl's own configurations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from verl_command import Command, judge
from verl_keys import FATES, alternatives, row_of, table
from verl_sections import translate

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def defaults() -> Iterator[tuple[str, Any]]:
    """Yield keys of verl with their defaults."""
    for line in Path(__file__).with_name("verl_defaults.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        sections, names = line.split("\t")
        for section in sections.split(","):
            for pair in names.split(" "):
                name, _, value = pair.partition("=")
                yield f"{section}.{name}".lstrip("."), json.loads(value)


def test_every_key_of_verls_defaults_has_its_row() -> None:
    keys = [key for key, _ in defaults()]
    assert len(keys) > 1000
    assert [key for key in keys if row_of(key) is None] == []


def test_a_row_says_what_becomes_of_its_keys() -> None:
    for row in table():
        assert row.fate in FATES
        assert bool(row.reason) == (row.fate != "mapped"), row
        assert bool(row.accepted) == (row.fate in ("differs", "refused")), row
    assert {row.fate for row in table()} == set(FATES)


@pytest.mark.parametrize("advantage", ["gae", "grpo"])
def test_verls_defaults_need_no_line(advantage: str) -> None:
    given = dict(defaults()) | {"algorithm.adv_estimator": advantage, f"{ROLLOUT}.n": 2}
    command = Command(given)
    translate(command, 5000)
    judge(command)
    assert (command.refusals, command.remarks) == ([], [])


def test_other_values_get_a_line() -> None:
    for row in table():
        if row.fate in ("mapped", "nothing"):
            continue
        for pattern in alternatives(row.pattern):
            key = pattern.replace("*", "x" if pattern.startswith("*") else "")
            command = Command({key: "another"})
            judge(command)
            lines = command.refusals if row_of(key).fate == "refused" else command.remarks  # type: ignore[union-attr]
            assert len(lines) == 1 and lines[0].startswith(f"{key}=another: "), (row, lines)


# Commands that, together, ask for all that is mapped.
COMMANDS: list[dict[str, Any]] = [
    {"algorithm.adv_estimator": "gae", "reward.reward_model.enable": True, "reward.reward_model.model_path": "/judge"},
    {"reward_model.enable": True, "reward_model.model.path": "/judge", f"{ACTOR}.strategy": "megatron"},
    {"reward_model.enable": True, "reward_model.model.path": "/judge", "custom_reward_function.path": "ask.py"},
    {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive"},
    {f"{ACTOR}.use_kl_loss": True, "actor_rollout_ref.model.lora_rank": 8},
    {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.policy_loss.loss_mode": "clip_cov"},
    {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.strategy": "megatron", "actor_rollout_ref.model.lora.rank": 8},
    {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.strategy": "megatron", f"{ACTOR}.optim.lr_decay_style": "cosine"},
    {f"{ACTOR}.policy_loss.loss_mode": "kl_cov", "algorithm.filter_groups.enable": True},
    {f"{ACTOR}.policy_loss.loss_mode": "sapo", f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"},
    {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"},
    {"rollout.nnodes": 1, "rollout.total_rollout_steps": 4096},
    {"rollout.nnodes": 1, "algorithm.adv_estimator": "gae", "critic.optim.lr_scheduler_type": "cosine"},
    {f"{ACTOR}.strategy": "megatron", "algorithm.adv_estimator": "gae", "critic.optim.lr_decay_style": "linear"},
    {"reward.reward_kwargs.overlong_buffer_cfg.enable": True, "reward.overlong_buffer.enable": True},
    {"reward_model.reward_kwargs.overlong_buffer_cfg.enable": True, "reward_model.overlong_buffer.enable": True},
    {"algorithm.rollout_correction.rollout_rs": "seq_mean_k1", "data.train_files": ["/nowhere"]},
]


def test_the_table_and_the_code_agree() -> None:
    asked: set[str] = set()
    for given in COMMANDS:
        command = Command({"algorithm.adv_estimator": "grpo", f"{ROLLOUT}.n": 2} | given)
        translate(command, 5000)
        asked |= {key for key in command.asked if not key.endswith(".")}
    mapped = {key for row in table() if row.fate == "mapped" for key in alternatives(row.pattern) if "*" not in key}
    assert mapped - asked == set(), "mapped, and read by nothing"
    others = {key for key in asked if (row := row_of(key)) is None or row.fate != "mapped"}
    assert others == set(), "read, and not mapped"
