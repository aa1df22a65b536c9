"""Prefixes once for the rows that share them, in several layouts, against transformers with each row by itself.

``make test`` runs a sample of the cases, ``make grid`` the rest.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hugging_face import make_model, random_rows
from parallel.parity import (
    OPTIMIZER,
    VOCABULARY,
    Case,
    Launches,
    case,
    check_against_transformers,
    launches,
    named,
    one_result,
    selected_names,
)
from parallel.parity_ranks import run_cases
from parallel.ranks import run_ranks
from parallel.value_ranks import learn_from_values

EXPERTS_SHARED_OUT = {"tensor": 2, "expert": 2, "expert_tensor": 1}
SEQUENCES_CUT = {"sequence_parallel": True}
CASES = {
    "one rank": Case("qwen3", True, {}),
    "TP2, sequence parallel, then PP2 VP2": Case(
        "qwen3", False, {"tensor": 2}, SEQUENCES_CUT, then={"pipeline": 2, "virtual_pipeline": 2}
    ),
    "DP2, then PP2": Case("qwen2", False, {"data": 2}, then={"pipeline": 2}, grid=True),
    "attention recomputed": Case("qwen3", True, {}, {"recompute": {"granularity": "selective"}}, grid=True),
    "layers recomputed": Case("qwen3", True, {}, {"recompute": {"granularity": "full"}}, grid=True),
    "window, one rank": Case("mistral_window", False, {}, grid=True),
    "windows and layers without positions, TP2": Case("cohere2", True, {"tensor": 2}, grid=True),
    "window, soft caps": Case("gemma2", True, {}, grid=True),
    "two rotary tables": Case("gemma3_text", True, {}, grid=True),
    "heads by the type of a layer": Case("gemma4_text", True, {}, grid=True),
    "experts beside dense layers, TP2": Case("gemma4_text_experts", True, {"tensor": 2}, grid=True),
    "sinks and experts with biases, EP2": Case("gpt_oss", False, {"data": 2, "expert": 2}, grid=True),
    "experts, EP2, then TP2 and EP2": Case(
        "qwen2_moe", False, {"data": 2, "expert": 2}, then=EXPERTS_SHARED_OUT, grid=True
    ),
    "latent attention, EP2, then TP2 and EP2": Case(
        "deepseek_v3", False, {"data": 2, "expert": 2}, then=EXPERTS_SHARED_OUT, grid=True
    ),
}
GROUPS = [0, 1, 0, 2, 0, 1, 0]  # of the rows, which lie in no order; one is alone


def grouped_rows() -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts and responses of rows of which some have one prompt.

    The third one's response begins as the first's does. Two more go on from within the first, as later rows of its
    trajectory do: both from one place, of which the second shares what follows, too.
    """
    prompts, responses = random_rows(len(GROUPS), VOCABULARY)
    prompts = [prompts[group] for group in GROUPS]
    responses[2] = [*responses[0][:2], *responses[2]]
    later = [*prompts[0], *responses[0][:3], *prompts[3]]
    return [*prompts, later, [*later, *responses[1]]], [*responses, responses[1], responses[5]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared prompts")


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, home: Path) -> Launches:
    def told(name: str) -> dict[str, object]:
        given = CASES[name]
        folder = make_model(
            home / name, given.family, tied=given.tied, vocabulary=VOCABULARY, num_hidden_layers=given.layers
        )
        exported = str(home / f"{name}, exported")
        rows, tokens = list(grouped_rows()), 70
        return case(
            folder, given.layout, rows, tokens, given.section, then=given.then, exported=exported, shares_prompts=True
        )

    return launches({name: given.ranks for name, given in CASES.items()}, selected_names(request), told)


@pytest.mark.parametrize("name", named(CASES))
def test_outputs_and_steps_equal_those_of_rows_by_themselves(name: str, home: Path, results: Launches) -> None:
    result = one_result(results[name])
    assert all(fraction > 0.05 for fraction in result["shared_prompt_fractions"]), "prompts were shared"
    check_against_transformers(home / name, home / f"{name}, exported", result, rows=grouped_rows())


@pytest.mark.grid
def test_updates_of_groups_are_the_same(home: Path) -> None:
    folder = make_model(home / "groups", "qwen3", vocabulary=VOCABULARY)
    prompts, responses = random_rows(12, VOCABULARY)
    rewards = [[1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0] * 4]
    arguments = {
        "model": str(folder),
        "rows": [[prompts[row // 3] for row in range(12)], responses],
        "rewards": rewards,
        "optimizer": OPTIMIZER | {"epsilon": 1e-5},
    }
    cases = {
        name: {"function": "learn_from_groups", "arguments": arguments | {"shares_prompts": shares}}
        for name, shares in (("shared", True), ("alone", False))
    }
    for result in run_ranks(run_cases, 2, {"cases": cases}, timeout=300):
        shared, alone = (torch.tensor(result[name]["parameters"]) for name in ("shared", "alone"))
        assert (shared - alone).abs().max() < 1e-6
        for of_shared, of_alone in zip(result["shared"]["metrics"], result["alone"]["metrics"], strict=True):
            assert of_shared["train/shared_prompt_fraction"] > 0.1
            assert of_shared["train/grad_norm"] == pytest.approx(of_alone["train/grad_norm"], rel=1e-5)


@pytest.mark.grid
def test_a_critics_values_and_updates_are_the_same(home: Path) -> None:
    folder = make_model(home / "critic", "qwen3", vocabulary=VOCABULARY, classifier=True)
    arguments = {"model": str(folder), "layout": {"tensor": 2}, "rows": list(grouped_rows()), "optimizer": OPTIMIZER}
    shared, alone = (
        run_ranks(learn_from_values, 2, arguments | {"shares_prompts": shares}, timeout=300)[0]
        for shares in (True, False)
    )
    assert alone["grad_norms"] == pytest.approx(shared["grad_norms"], rel=1e-5)
    for name in ("before", "after"):
        assert (torch.tensor(shared[name]) - torch.tensor(alone[name])).abs().max() < 1e-5


@pytest.mark.grid
def test_adapters_learn_the_same(home: Path) -> None:
    folder, section = make_model(home / "adapters", "qwen3", vocabulary=VOCABULARY), {"lora": {"rank": 4}}
    cases = {
        name: case(folder, {"tensor": 2}, list(grouped_rows()), 70, section, shares_prompts=shares)
        for name, shares in (("shared", True), ("alone", False))
    }
    result = run_ranks(run_cases, 2, {"cases": cases}, timeout=300)[0]
    shared, alone = result["shared"], result["alone"]
    for name in ("logprobs", "base_logprobs", "losses"):
        assert (torch.tensor(shared[name]) - torch.tensor(alone[name])).abs().max() < 1e-5, name
    assert shared["grad_norms"] == pytest.approx(alone["grad_norms"], rel=1e-5)


@pytest.mark.grid
def test_replayed_experts_are_those_of_the_first_row(home: Path) -> None:
    folder = make_model(home / "replay", "qwen3_moe", vocabulary=VOCABULARY)
    draw, (prompts, responses) = torch.Generator().manual_seed(1), grouped_rows()

    def chosen(tokens: int) -> list[list[list[int]]]:  # of 4 experts two, in 4 layers
        experts: list[list[list[int]]] = torch.rand(tokens, 4, 4, generator=draw).argsort(-1)[..., :2].tolist()
        return experts

    of_prompts = {group: chosen(len(prompts[GROUPS.index(group)])) for group in (0, 1, 2)}
    choices = []
    for group, prompt, answer in zip([*GROUPS, 0, 0], prompts, responses, strict=True):
        before = of_prompts[group]
        choices.append(before + chosen(len(prompt) - len(before) + len(answer)))
    cases = {
        name: case(folder, {}, [prompts, responses], 70, choices=choices, shares_prompts=shares)
        for name, shares in (("shared", True), ("alone", False))
    }
    [result] = run_ranks(run_cases, 1, {"cases": cases}, timeout=300)
    shared, alone = (torch.tensor(result[name]["logprobs"]) for name in ("shared", "alone"))
    assert (shared - alone).abs().max() < 1e-5
