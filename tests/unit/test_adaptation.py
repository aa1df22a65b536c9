"""What a restart does otherwise than the attempt before, and the faults that are made on purpose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_megatron.errors import UserError
from rlhf_megatron.recipe import Recipe, load_recipe
from rlhf_megatron.recipe.budgets import with_budgets
from rlhf_megatron.runtime.adaptation import adapt, is_out_of_memory, smaller_budgets
from rlhf_megatron.runtime.faults import Fault, fault_of
from rlhf_megatron.runtime.recovery import Origin, RecoveryLog
from rlhf_megatron.runtime.skipped_steps import SkippedSteps, TooManySkippedSteps

ROOT = Path(__file__).resolve().parents[2]
START = {"what": "start"}


def recipe(*overrides: str) -> Recipe:
    sizes = ["data.max_prompt_length=40", "rollout.max_response_length=60", "algorithm.kl_coef=0.01"]
    budgets = ["actor.tokens_per_gpu=400", "reference={tokens_per_gpu: 200}", "critic.tokens_per_gpu=300"]
    return load_recipe(ROOT / "recipes" / "tiny_ppo.yaml", [*sizes, *budgets, *overrides])


def out_of_memory(phase: str) -> dict[str, Any]:
    return {"what": "fault", "kind": "out_of_memory", "phase": phase}


def test_the_budget_of_the_pass_that_failed_becomes_smaller() -> None:
    assert smaller_budgets(recipe(), "update") == {"actor.tokens_per_gpu": 300}
    assert smaller_budgets(recipe(), "update_critic") == {"critic.tokens_per_gpu": 225}
    assert smaller_budgets(recipe("critic.logprob_tokens_per_gpu=800"), "values") == {
        "critic.logprob_tokens_per_gpu": 600
    }
    assert smaller_budgets(recipe(), "logprobs") == {
        "actor.logprob_tokens_per_gpu": 300,
        "reference.logprob_tokens_per_gpu": 150,
    }
    assert smaller_budgets(recipe(), "save") == {}, "nothing in the recipe would help"
    share = recipe("rollout.gpu_memory_utilization=0.5", "rollout.kv_cache_gb=null")
    assert smaller_budgets(share, "generate") == {"rollout.gpu_memory_utilization": 0.45}
    assert smaller_budgets(recipe("rollout.kv_cache_gb=2.0"), "engine") == {"rollout.kv_cache_gb": 1.8}


def test_no_budget_is_below_the_longest_sequence() -> None:
    assert smaller_budgets(recipe("actor.tokens_per_gpu=120"), "update") == {"actor.tokens_per_gpu": 100}
    assert smaller_budgets(recipe("actor.tokens_per_gpu=90"), "update") == {}


def test_where_responses_are_given_their_limit_counts_and_not_the_rollouts() -> None:
    unread = ["rollout=null", "critic=null", "reference=null", "algorithm={}"]
    given = ["loop=sft", *unread, "batch={prompts_per_step: 4}", "data.max_response_length=200"]
    assert smaller_budgets(recipe("actor.tokens_per_gpu=300", *given), "update") == {"actor.tokens_per_gpu": 240}
    pairs = ["loop=reward_modeling", *unread, "batch={prompts_per_step: 4}", "data.max_response_length=140"]
    assert smaller_budgets(recipe("actor.tokens_per_gpu=300", *pairs), "update") == {"actor.tokens_per_gpu": 280}


def test_each_lack_of_memory_reduces_further_and_then_no_more() -> None:
    lines: list[dict[str, Any]] = [START]
    seen = []
    for _ in range(4):
        lines.append(out_of_memory("update"))
        adaptation, further = adapt(recipe("retry.out_of_memory.max_reductions=2"), lines)
        seen.append((adaptation.budgets["actor.tokens_per_gpu"], bool(further)))
        lines.append({"what": "restart"} | ({"reduced": further} if further else {}))
    assert seen == [(300, True), (225, True), (225, False), (225, False)]
    changed = with_budgets(recipe(), adapt(recipe(), lines)[0].budgets)
    assert changed.actor.tokens_per_gpu == 225
    assert changed.model_copy(update={"actor": recipe().actor}) == recipe()


def test_another_fault_reduces_nothing() -> None:
    assert adapt(recipe(), [START, {"what": "fault", "why": "x"}]) == adapt(recipe(), [])
    earlier = [START, out_of_memory("update"), {"what": "restart", "reduced": {"actor.tokens_per_gpu": 300}}]
    adaptation, further = adapt(recipe(), [*earlier, {"what": "fault", "why": "x"}])
    assert (adaptation.budgets, further) == ({"actor.tokens_per_gpu": 300}, {})


def test_attempts_with_other_budgets_are_no_repetition(tmp_path: Path) -> None:
    log = RecoveryLog(tmp_path, Origin("node 1 5"))
    refusals = []
    for _ in range(6):
        _, further = adapt(recipe("retry.out_of_memory.max_reductions=2"), log.of_this_launch())
        refusals.append(log.begin(2, further) is not None)
        if not refusals[-1]:
            log.append("fault", None, "OutOfMemoryError", kind="out_of_memory", phase="update")
    assert refusals == [False, False, False, False, True, True], "two reductions, and then two with the same budgets"
    by_hand = RecoveryLog(tmp_path, Origin("node 2 9"))
    assert adapt(recipe(), by_hand.of_this_launch())[0].budgets == {}, "a person starts with the recipe"


def test_a_lack_of_memory_is_known_by_type_word_and_cause() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)  # a real one, of the CPU's allocator
    assert is_out_of_memory(caught.value)
    outer = ValueError("vLLM could not start")
    outer.__cause__ = torch.OutOfMemoryError("x")
    assert is_out_of_memory(outer)
    assert not is_out_of_memory(RuntimeError("Connection closed by peer"))
    assert not is_out_of_memory(ValueError("the story ran out of memory lane"))


def test_skipped_steps_end_the_attempt_and_are_passed_over() -> None:
    skipped = SkippedSteps(3)
    bad, good = {"train/skipped": 1.0}, {"train/skipped": 0.5}
    for step, metrics in enumerate([bad, bad, good, {}, bad, {"critic/skipped": 1.0}]):
        skipped.after(step, metrics, dict)
        assert skipped.are_going_on == (1.0 in metrics.values())
    with pytest.raises(TooManySkippedSteps, match="steps 4-6 were skipped") as caught:
        skipped.after(6, bad, lambda: {"drawn": 28})
    fault = {"what": "fault", "why": str(caught.value), **caught.value.details}
    adaptation, _ = adapt(recipe(), [START, json.loads(json.dumps(fault)), {"what": "restart"}])
    assert adaptation.skips == {4: {"drawn": 28}}
    never = SkippedSteps(0)
    for step in range(50):
        never.after(step, bad, dict)


def test_faults_are_read_for_this_rank_and_attempt() -> None:
    text = "stop@update:3:1,,nan@update_critic:4-6"
    environment = {"RLHF_MEGATRON_FAULT": text, "RANK": "0"}
    assert fault_of({}) is None
    assert fault_of(environment) is None
    assert fault_of(environment | {"RANK": "1"}) == Fault("stop", "update", 3, 3)
    attempts = [fault_of(environment | {"TORCHELASTIC_RESTART_COUNT": str(count)}) for count in (1, 2, 3)]
    assert attempts == [None, Fault("nan", "update_critic", 4, 6), None]
    due = Fault("nan", "update_critic", 4, 6)
    assert [due.is_due("update_critic", step) for step in (3, 4, 6, 7)] == [False, True, True, False]
    assert not due.is_due("update", 4)
    with pytest.raises(UserError, match="RLHF_MEGATRON_FAULT='burn@update:3' must be KIND@PHASE"):
        fault_of({"RLHF_MEGATRON_FAULT": "burn@update:3"})
