"""Algorithms as a recipe asks for them: names, overlays, what is refused, and the page that shows how to add one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import ValidationError

from rlhf_megatron.algorithms.advantage import OF_ROWS, OF_TOKENS
from rlhf_megatron.algorithms.policy_loss import POLICY_LOSSES, PolicyLoss, Tokens
from rlhf_megatron.algorithms.selection import SELECTIONS
from rlhf_megatron.recipe import (
    AlgorithmSection,
    Recipe,
    RecipeError,
    load_recipe,
    make_recipe,
    resolved_yaml,
)
from rlhf_megatron.recipe.algorithm import ADVANTAGE_NAMES, COMPARING_ADVANTAGES, POLICY_LOSS_NAMES

ROOT = Path(__file__).resolve().parents[2]
OVERLAYS = sorted(path.stem for path in (ROOT / "recipes" / "overlays").glob("*.yaml") if path.stem != "dapo")


def laid_over(overlay: str, folder: Path, *overrides: str) -> Recipe:
    """Return the tiny recipe with an overlay."""
    recipe = folder / "recipe.yaml"
    base, over = ROOT / "recipes" / "tiny_grpo.yaml", ROOT / "recipes" / "overlays" / f"{overlay}.yaml"
    recipe.write_text(f"defaults: [{base}, {over}]\nname: {overlay}\n")
    return load_recipe(recipe, overrides)


def test_the_recipe_knows_the_names_that_exist() -> None:
    assert set(ADVANTAGE_NAMES) == {*OF_ROWS, *OF_TOKENS}
    assert set(POLICY_LOSS_NAMES) == set(POLICY_LOSSES)
    assert set(COMPARING_ADVANTAGES) < {*OF_ROWS, *OF_TOKENS} and set(SELECTIONS) < set(POLICY_LOSSES)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_overlay_makes_a_recipe_that_runs(overlay: str, tmp_path: Path) -> None:
    recipe = laid_over(overlay, tmp_path)
    assert make_recipe(yaml.safe_load(resolved_yaml(recipe)), overlay) == recipe
    assert overlay in (recipe.algorithm.policy_loss, recipe.algorithm.advantage) or overlay in (
        "dr_grpo",
        "dppo",
        "ppo",
        "rollout_correction",
    )


def test_every_policy_loss_and_advantage_has_an_overlay_or_a_reason(tmp_path: Path) -> None:
    recipes = [laid_over(overlay, tmp_path) for overlay in OVERLAYS]
    losses = {recipe.algorithm.policy_loss for recipe in recipes}
    assert set(POLICY_LOSSES) - losses == {"dppo_kl"}  # named beside dppo_tv on the page of algorithms
    advantages = {recipe.algorithm.advantage for recipe in recipes}
    assert {*OF_ROWS, *OF_TOKENS} == advantages


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["algorithm.advantage=grpoo"], "algorithm.advantage: Input should be 'grpo', 'rloo'"),
        (["algorithm.policy_loss=ppo"], "algorithm.policy_loss: Input should be 'clip', 'gspo'"),
        (["algorithm.advantage=opo", "algorithm.normalize_by_std=true"], "normalize_by_std must be false"),
        (["algorithm.pass_k=2"], "pass_k=2 is for advantage pass_at_k; it is grpo"),
        (["algorithm.advantage=pass_at_k", "algorithm.pass_k=9"], "pass_k=9 is above batch.responses_per_prompt=8"),
        (["algorithm.advantage=gae"], "algorithm.advantage=gae needs the section critic"),
        (["algorithm.advantage=gpg", "batch.responses_per_prompt=1"], "must be at least 2: gpg compares"),
        (["algorithm.gamma=0.9"], "gamma=0.9 is for advantage gae and reinforce_plus_plus; it is grpo, leave it out"),
        (["algorithm.gae_lambda=0.9"], "gae_lambda=0.9 is for advantage gae; it is grpo"),
        (["algorithm.loss_constant=9"], "for loss_aggregation sequence_sum_constant; it is token_mean"),
        (["algorithm.policy_loss=cispo", "algorithm.clip_ratio_dual=3"], "policy_loss cispo has no such bound"),
        (["algorithm.kl_placement=reward", "algorithm.kl_gradient=k2"], "kl_gradient=k2: a KL in the reward"),
        (["algorithm.kl_controller.type=adaptive"], "target=None: type adaptive needs one"),
        (["algorithm.kl_controller.target=0.1"], "target=0.1: type adaptive needs one, and type fixed has none"),
        (["algorithm.kl_controller.horizon=9"], "horizon=9 is for type adaptive; it is fixed"),
        (["algorithm.kl_coef=0", "algorithm.kl_controller={type: adaptive, target: 1}"], "needs a kl_coef above 0"),
        (["algorithm.covariance.low=9"], "low=9.0 must be below high=5.0"),
        (["algorithm.rollout_correction.threshold_low=0.5"], "threshold_low=0.5 is for type mis; the type is none"),
        (["algorithm.rollout_correction.threshold=3"], "threshold=3.0 is for types tis and mis; the type is none"),
        (["algorithm.rollout_correction.level=sequence"], "level=sequence is for types tis and mis; the type is none"),
        (["algorithm.overlong_buffer.len=5"], "overlong_buffer: len=5 counts where enable is true; set enable, or"),
        (["algorithm.filter_groups.metric=reward"], "filter_groups: metric=reward counts where enable is true"),
        (["algorithm.rollout_correction={type: mis, threshold_low: 2}"], "threshold_low=2.0 must be below"),
        (["algorithm.old_logprobs=rollout", "algorithm.rollout_correction.type=tis"], "set old_logprobs to recompute"),
        (["algorithm.old_logprobs=rollout", "algorithm.rollout_correction.veto_threshold=0.1"], "set old_logprobs to"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_in_one_line(overrides: list[str], expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(ROOT / "recipes" / "tiny_grpo.yaml", overrides)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_switched_off_by_hand_may_keep_its_keys() -> None:
    kept = [
        "algorithm.overlong_buffer={enable: false, len: 5}",
        "algorithm.filter_groups={enable: false, metric: reward}",
    ]
    recipe = load_recipe(ROOT / "recipes" / "tiny_grpo.yaml", kept)
    assert make_recipe(yaml.safe_load(resolved_yaml(recipe)), "recipe.yaml") == recipe


def test_only_grpo_divides_by_the_deviation_unless_asked() -> None:
    assert AlgorithmSection().divides_by_std and not AlgorithmSection(normalize_by_std=False).divides_by_std
    assert not any(AlgorithmSection(advantage=name).divides_by_std for name in ADVANTAGE_NAMES if name != "grpo")
    assert AlgorithmSection(advantage="gpg", normalize_by_std=True).divides_by_std
    with pytest.raises(ValidationError):
        AlgorithmSection(advantage="rloo", normalize_by_std=True)


def test_the_page_on_new_algorithms_shows_one_that_works() -> None:
    """Its code is run as it stands there: a loss with the policy gradient at ratio 1, that fits into 40 lines."""
    text = (ROOT / "docs" / "new_algorithm.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert sum(block.count("\n") for block in blocks) < 40
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/new_algorithm.md", "exec"), names)  # our own page
    logprobs = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    old = logprobs.detach().clone()
    found = names["tanh_loss"](Tokens(logprobs, old, advantages, torch.arange(3)), AlgorithmSection())
    assert isinstance(found, PolicyLoss)
    assert torch.allclose(torch.autograd.grad(found.per_token.sum(), logprobs)[0], -advantages)
    rewards, groups = torch.tensor([1.0, 5.0, 3.0]), torch.zeros(3, dtype=torch.long)
    assert names["median_advantages"](rewards, groups).tolist() == [-2.0, 2.0, 0.0]
