"""The whole objective: aggregation, its formula, and that neither micro-batches, data parallelism nor the order of rows
change it; how the loop puts it together.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lessons import lesson_of, placed, with_estimates
from rlhf_megatron.algorithms.aggregation import row_weights, token_weights
from rlhf_megatron.algorithms.correction import with_correction
from rlhf_megatron.algorithms.kl import KLController
from rlhf_megatron.algorithms.objective import objective_fields, of_rows, policy_objective, rows_to_learn
from rlhf_megatron.algorithms.policy_loss import POLICY_LOSSES
from rlhf_megatron.data.packing import assign_rows, make_micro_batch, plan_micro_batches
from rlhf_megatron.data.rollout_batch import RolloutBatch, batch_from_rows
from rlhf_megatron.data.row_numbers import numbers_of
from rlhf_megatron.recipe import AlgorithmSection, make_recipe
from rlhf_megatron.recipe.algorithm import SELECTING_LOSSES
from rlhf_megatron.roles.learning import observe_kl, update_actor, with_advantages

DOUBLE = torch.float64


# ---- aggregation


AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_sum_constant")


def test_weights_by_hand() -> None:
    # Rows with 1, 3 and 0 sampled tokens among 2, 4 and 2.
    mask = torch.tensor([0, 1, 0, 1, 1, 1, 0, 0], dtype=torch.bool)
    offsets = torch.tensor([0, 2, 6, 8])
    expected = {
        "token_mean": [1 / 4, 1 / 4, 1 / 4, 1 / 4],
        "sequence_mean_token_mean": [1 / 3, 1 / 9, 1 / 9, 1 / 9],
        "sequence_mean_token_sum": [1 / 3, 1 / 3, 1 / 3, 1 / 3],
        "sequence_sum_constant": [1 / 30, 1 / 30, 1 / 30, 1 / 30],
    }
    for name, values in expected.items():
        weights = token_weights(mask, offsets, name, 10)
        assert weights[mask].tolist() == pytest.approx(values, rel=1e-6)
        assert not weights[~mask].any()


@given(lengths=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=8))
def test_weights_give_the_mean_that_their_name_says(lengths: list[tuple[int, int]]) -> None:
    mask = torch.tensor([bit for prompt, response in lengths for bit in [False] * prompt + [True] * response])
    offsets = torch.tensor([0, *[prompt + response for prompt, response in lengths]]).cumsum(0)
    losses = torch.sin(torch.arange(len(mask), dtype=DOUBLE)) * mask
    rows = [losses[start:end][mask[start:end]] for start, end in pairwise(offsets.tolist())]
    expected = {
        "token_mean": losses[mask].sum() / max(1, int(mask.sum())),
        "sequence_mean_token_mean": sum(row.mean() if len(row) else 0.0 for row in rows) / len(rows),
        "sequence_mean_token_sum": sum(row.sum() for row in rows) / len(rows),
        "sequence_sum_constant": sum(row.sum() / 9 for row in rows) / len(rows),
    }
    for name in AGGREGATIONS:
        total = float((token_weights(mask, offsets, name, 9) * losses).sum())
        assert total == pytest.approx(float(expected[name]), abs=1e-5)


def test_what_cannot_be_aggregated_is_refused() -> None:
    mask, offsets = torch.ones(1, dtype=torch.bool), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="token_mean"):
        token_weights(mask, offsets, "mean")
    for constant in (None, 0.0, -1.0):
        with pytest.raises(ValueError, match="loss_constant"):
            token_weights(mask, offsets, "sequence_sum_constant", constant)


# ---- the formula


def objective_inputs(count: int, seed: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(count, dtype=DOUBLE, generator=generator)

    old = normal() - 2
    fields = {"old_logprobs": old, "advantages": normal(), "reference_logprobs": old + normal() / 3}
    fields["weights"] = torch.rand(count, dtype=DOUBLE, generator=generator)
    fields["row"] = torch.arange(count) // 5
    return (old + normal() / 3), normal().abs(), fields


SETTINGS = AlgorithmSection(kl_coef=0.1, entropy_coef=0.01, clip_ratio_high=0.28, clip_ratio_dual=3.0)


def test_objective_equals_its_formula_and_its_gradients() -> None:
    logprobs, entropy, fields = objective_inputs(50, 1)
    loss, metrics = policy_objective(logprobs, entropy, fields, SETTINGS)
    total = 0.0
    for n in range(50):  # scalar by scalar: DAPO's eq. 8 with GRPO's KL term (arXiv 2402.03300, eq. 3 and 4)
        ratio = math.exp(logprobs[n] - fields["old_logprobs"][n])
        advantage = float(fields["advantages"][n])
        surrogate = min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
        surrogate = max(surrogate, 3.0 * advantage) if advantage < 0 else surrogate
        gap = float(fields["reference_logprobs"][n] - logprobs[n])
        divergence = math.exp(gap) - gap - 1
        total += float(fields["weights"][n]) * (-surrogate + 0.1 * divergence - 0.01 * float(entropy[n]))
    assert float(loss) == pytest.approx(total, rel=1e-12)
    assert float(metrics["ratio"][1]) == 50
    assert torch.autograd.gradcheck(
        lambda x, y: policy_objective(x, y, fields, SETTINGS)[0], (logprobs.requires_grad_(), entropy.requires_grad_())
    )


def test_the_kl_counts_where_and_as_the_settings_say() -> None:
    logprobs, entropy, fields = objective_inputs(20, 4)
    without = {name: value for name, value in fields.items() if name != "reference_logprobs"}
    plain = float(policy_objective(logprobs, entropy, without, AlgorithmSection())[0])
    divergence = logprobs - fields["reference_logprobs"]
    expected = plain + 0.3 * float((fields["weights"] * divergence).sum())
    k1 = AlgorithmSection(kl_coef=0.1, kl_estimator="k1")
    loss, metrics = policy_objective(logprobs, entropy, fields, k1, kl_coef=0.3)  # of an adaptive controller
    assert float(loss) == pytest.approx(expected)
    assert float(metrics["kl"][0]) == pytest.approx(float(divergence.sum()))
    in_reward = AlgorithmSection(kl_coef=0.1, kl_estimator="k1", kl_placement="reward")
    loss, metrics = policy_objective(logprobs, entropy, fields, in_reward, kl_coef=0.3)
    assert float(loss) == pytest.approx(plain) and "kl" in metrics
    # Straight-through: the value of k1, the gradient of k2.
    leaf = logprobs.clone().requires_grad_()
    both = AlgorithmSection(kl_coef=0.1, kl_estimator="k1", kl_gradient="k2")
    loss = policy_objective(leaf, entropy, fields, both, kl_coef=0.3)[0]
    assert loss.item() == pytest.approx(expected)
    base = policy_objective(leaf, entropy, without, AlgorithmSection())[0]
    slope = torch.autograd.grad(loss, leaf)[0] - torch.autograd.grad(base, leaf)[0]
    assert torch.allclose(slope, 0.3 * fields["weights"] * divergence)


@settings(max_examples=25)
@given(cut=st.integers(1, 9), seed=st.integers(0, 99))
def test_parts_of_the_objective_add_up_to_the_whole(cut: int, seed: int) -> None:
    logprobs, entropy, fields = objective_inputs(50, seed)
    whole, metrics = policy_objective(logprobs, entropy, fields, SETTINGS)
    parts = [
        policy_objective(logprobs[part], entropy[part], {key: value[part] for key, value in fields.items()}, SETTINGS)
        for part in (slice(0, 5 * cut), slice(5 * cut, 50))
    ]
    assert float(sum(loss for loss, _ in parts)) == pytest.approx(float(whole), rel=1e-9)
    for name, (total, count) in metrics.items():
        assert float(sum(part[name][0] for _, part in parts)) == pytest.approx(float(total), rel=1e-9, abs=1e-12)
        assert float(sum(part[name][1] for _, part in parts)) == float(count)


# ---- micro-batches, data parallelism, packing, row order


def minibatch() -> tuple[RolloutBatch, Tensor, Tensor]:
    """Return (twelve rows in float64, one of them empty, two with unsampled tokens inside; logprobs; entropy)."""
    generator = torch.Generator().manual_seed(7)
    lengths = [3, 1, 0, 9, 4, 4, 2, 7, 1, 5, 6, 3]
    batch = batch_from_rows([[0] * (1 + row % 3) for row in range(12)], [[0] * length for length in lengths])
    mask = batch.response_mask.clone()
    for row in (3, 10):
        mask[batch.cu_seqlens[row] + 4] = False  # what a tool says
    count = len(mask)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(count, dtype=DOUBLE, generator=generator) * mask

    old = normal(1.0) - 2.0 * mask
    batch = batch.with_fields(
        tokens=torch.arange(count),
        response_mask=mask,
        old_logprobs=old,
        reference_logprobs=old + normal(0.3),
        advantages=torch.randn(12, dtype=DOUBLE, generator=generator)[batch.row_of_token] * mask,
        correction=torch.rand(count, generator=generator),
    )
    return batch, old + normal(0.3), normal(1.0).abs()


def loss_and_gradient(
    batch: RolloutBatch, logprobs: Tensor, entropy: Tensor, section: AlgorithmSection, budget: int, data: int
) -> tuple[float, Tensor, dict[str, float]]:
    """Add it up as Role.update does: in micro-batches of ``budget`` tokens on ``data`` ranks; logprobs by token id."""
    leaf = logprobs.clone().requires_grad_()
    fields = objective_fields(batch, section, row_weights(batch.response_lengths, section.loss_aggregation, 20))
    loss, totals = torch.zeros((), dtype=DOUBLE), {}
    owner = assign_rows(batch.lengths, data)
    for rank in range(data):
        own = (owner == rank).nonzero().squeeze(1)
        for rows in plan_micro_batches(batch.lengths[own].tolist(), budget):
            micro = make_micro_batch(batch, own[rows].tolist(), fields)
            part, metrics = policy_objective(leaf[micro.targets], entropy[micro.targets], micro.fields, section)
            loss = loss + part
            for name, (total, _) in metrics.items():
                totals[name] = totals.get(name, 0.0) + float(total)
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), leaf.grad, totals


@pytest.mark.parametrize(
    "correction",
    [
        {},
        {"type": "tis", "threshold": 1.1},
        {"type": "mis", "level": "sequence", "threshold_low": 0.5, "reject_threshold": 1.2},
        {"veto_threshold": 0.5},
    ],
)
def test_old_logprobs_of_the_pass_itself_are_those_of_a_pass_before(correction: dict[str, Any]) -> None:
    batch, logprobs, entropy = minibatch()
    generator = torch.Generator().manual_seed(9)
    rolled = logprobs + 0.3 * torch.randn(len(logprobs), dtype=DOUBLE, generator=generator)
    batch = batch.with_fields(old_logprobs=None, correction=None, rollout_logprobs=rolled)
    for name in sorted(set(POLICY_LOSSES) - set(SELECTING_LOSSES)):
        section = AlgorithmSection(policy_loss=name, kl_coef=0.1, rollout_correction=correction)
        before, _ = with_correction(batch.with_fields(old_logprobs=logprobs), section.rollout_correction)
        if before.correction is not None:
            assert (before.correction[batch.response_mask] != 1).any()
        loss, gradient, metrics = loss_and_gradient(before, logprobs, entropy, section, 10**6, 1)
        own_loss, own_gradient, own_metrics = loss_and_gradient(batch, logprobs, entropy, section, 12, 2)
        assert own_loss == pytest.approx(loss, rel=1e-6)
        torch.testing.assert_close(own_gradient, gradient, rtol=1e-6, atol=1e-9)
        assert own_metrics == pytest.approx(metrics, rel=1e-6, abs=1e-9)


def covariance_of(policy_loss: str, **settings: float) -> dict[str, Any]:
    """Return the section of covariance where a loss selects tokens by it."""
    return {"covariance": settings} if policy_loss in SELECTING_LOSSES else {}


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_neither_micro_batches_nor_ranks_nor_row_order_change_anything(name: str) -> None:
    batch, logprobs, entropy = minibatch()
    for aggregation in AGGREGATIONS:
        section = AlgorithmSection(
            policy_loss=name,
            loss_aggregation=aggregation,
            kl_coef=0.1,
            entropy_coef=0.01,
            **covariance_of(name, fraction=0.2, low=0.0),
        )
        whole, gradient, metrics = loss_and_gradient(batch, logprobs, entropy, section, 10**6, 1)
        assert gradient[batch.response_mask].any() and not gradient[~batch.response_mask].any()
        shuffled = batch.select([7, 2, 11, 0, 5, 9, 1, 3, 10, 4, 8, 6])
        for cut, budget, data in (
            (batch, 12, 1),
            (batch, 1, 2),
            (batch, 20, 3),
            (shuffled, 10**6, 1),
            (shuffled, 9, 2),
        ):
            loss, slope, sums = loss_and_gradient(cut, logprobs, entropy, section, budget, data)
            assert loss == pytest.approx(whole, rel=1e-12)
            assert torch.allclose(slope, gradient, rtol=1e-12, atol=1e-15)
            assert sums == pytest.approx(metrics, rel=1e-12)


def test_correction_multiplies_the_weights() -> None:
    batch, logprobs, entropy = minibatch()
    section = AlgorithmSection()
    weights = row_weights(batch.response_lengths, section.loss_aggregation)
    fields, plain = (objective_fields(part, section, weights) for part in (batch, batch.with_fields(correction=None)))
    assert torch.equal(fields["weights"], plain["weights"] * batch.correction)
    rejected = batch.with_fields(correction=torch.zeros_like(batch.correction))
    loss, gradient, _ = loss_and_gradient(rejected, logprobs, entropy, section, 10**6, 1)
    assert loss == 0.0 and not gradient.any()


# ---- in the loop


class Learner:
    """Stand-in for the actor: one logprob per token, learned by plain gradient descent on whatever objective comes."""

    def __init__(self, logprobs: Tensor) -> None:
        self.logprobs, self.fields = logprobs, []

    def update(
        self, batch: RolloutBatch, fields: dict[str, Tensor], objective: Any, outputs: Tensor | None, beside: Any
    ) -> dict[str, float]:
        leaf = self.logprobs[batch.tokens].requires_grad_()
        mask = batch.response_mask
        sampled = {name: value[mask] for name, value in fields.items()}
        loss, metrics = objective(leaf[mask], torch.zeros_like(leaf[mask]), sampled)
        self.fields.append(fields)
        if outputs is not None:
            outputs[0] = leaf.detach()
        self.logprobs[batch.tokens] -= torch.autograd.grad(loss, leaf)[0]
        return {name: float(total / count) for name, (total, count) in metrics.items()} | {"loss": float(loss)}


def run_step(minibatch_prompts: int = 1, **algorithm: object) -> tuple[Learner, KLController, dict[str, float]]:
    """Return two prompts with three responses each through advantages and update_actor, so many prompts in each
    minibatch."""
    recipe = make_recipe(
        {
            "name": "x",
            "loop": "rl",
            "steps": 1,
            "model": {"path": "m", "dtype": "float32"},
            "data": {"train_files": ["a"], "max_prompt_length": 9},
            "batch": {"prompts_per_step": 2, "responses_per_prompt": 3, "minibatch_prompts": minibatch_prompts},
            "actor": {"tokens_per_gpu": 9, "optimizer": {"learning_rate": 1.0}},
            "reference": {"tokens_per_gpu": 9},
            "rollout": {"max_response_length": 5},
            "algorithm": algorithm,
        },
        "here",
    )
    batch = batch_from_rows(
        [[0]] * 6, [[0] * 2] * 6, group_id=[0, 0, 0, 1, 1, 1], rewards=[1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    )
    mask, count = batch.response_mask, len(batch.tokens)
    old = -torch.ones(count) * mask
    batch = batch.with_fields(
        tokens=torch.arange(count),
        old_logprobs=old if recipe.old_logprobs == "recompute" else None,
        rollout_logprobs=old - math.log(3.0) * mask,
        reference_logprobs=(old - 0.25 * mask) if recipe.algorithm.kl_coef else None,
    )
    context = cast(Any, SimpleNamespace(recipe=recipe, span=lambda _: nullcontext()))
    learner, controller = Learner(old.clone()), KLController(recipe.algorithm)
    actor, lesson = placed(learner), lesson_of(batch, minibatch_prompts, recipe.algorithm)
    lesson = with_advantages(lesson, recipe.algorithm, controller, actor)
    metrics, _ = update_actor(context, actor, lesson, controller)
    return learner, controller, observe_kl(metrics, controller, lesson)


def test_a_step_takes_its_minibatches_and_reports_their_means() -> None:
    learner, _, metrics = run_step(loss_aggregation="sequence_sum_constant", normalize_by_std=False)
    assert len(learner.fields) == 2
    # Dr.GRPO: advantages 2/3, -1/3, -1/3 and 1/3, 1/3, -2/3; weights 1 / (3 rows * longest response of 5).
    weights = learner.fields[0]["weights"]
    assert weights[1].item() == pytest.approx(1 / 15)
    changes = (learner.logprobs + 1.0)[batch_mask()].view(6, 2)[:, 0]
    expected = torch.tensor([2, -1, -1, 1, 1, -2]) / 3 / 15
    assert torch.allclose(changes, expected, atol=1e-6)
    assert metrics["train/ratio"] == pytest.approx(1.0) and "train/kl" not in metrics


def batch_mask() -> Tensor:
    return torch.tensor([False, True, True] * 6)


def test_the_correction_reaches_the_update() -> None:
    plain, _, _ = run_step()
    truncated, _, metrics = run_step(rollout_correction={"type": "tis", "threshold": 2.0})
    assert torch.allclose(truncated.fields[1]["weights"], 2.0 * plain.fields[1]["weights"])
    assert metrics["train/correction_weight_mean"] == 2.0 and metrics["train/correction_masked_fraction"] == 0.0
    own, _, metrics_of_own = run_step(minibatch_prompts=2, rollout_correction={"type": "tis", "threshold": 2.0})
    assert "old_logprobs" not in own.fields[0]
    # A token weighs half as much among twice as many.
    assert torch.allclose(2.0 * (own.logprobs + 1.0)[batch_mask()], (truncated.logprobs + 1.0)[batch_mask()])
    for name in ("correction_weight_mean", "correction_effective_fraction", "ratio"):
        assert metrics_of_own[f"train/{name}"] == pytest.approx(metrics[f"train/{name}"])
    assert metrics_of_own["train/rollout_logprob_abs_diff"] == pytest.approx(math.log(3.0))
    masked, _, metrics = run_step(rollout_correction={"type": "mis", "threshold": 2.0})
    assert torch.equal(masked.logprobs[batch_mask()], -torch.ones(12)) and metrics["train/loss"] == 0.0


def test_the_penalty_reaches_the_advantage_and_the_controller_what_it_did() -> None:
    keys = {"kl_coef": 0.5, "kl_estimator": "k1", "kl_placement": "reward", "advantage": "reinforce_plus_plus"}
    controller_keys = {"kl_controller": {"type": "adaptive", "target": 0.1, "horizon": 60}}
    learner, controller, metrics = run_step(**keys, **controller_keys)
    # The KL is 0.25 at each token, so the first of two tokens has 2 * 0.125 ahead of it and the second 0.125.
    following = (torch.tensor([1.0, 0, 0, 1, 1, 0])[:, None] - torch.tensor([0.25, 0.125])).flatten()
    expected = (following - following.mean()) / following.std()
    found = torch.cat([fields["advantages"] for fields in learner.fields])[batch_mask()]
    assert torch.allclose(found, expected, atol=1e-5)
    assert metrics["train/kl_coef"] == 0.5 and metrics["train/kl"] == pytest.approx(0.25, abs=0.2)
    assert controller.coefficient == pytest.approx(0.5 * (1 + 0.2 * 6 / 60))


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_every_policy_loss_raises_what_was_rewarded(name: str) -> None:
    learner, _, metrics = run_step(policy_loss=name, **covariance_of(name, low=1e6, high=1e7))
    changes = (learner.logprobs + 1.0)[batch_mask()].view(6, 2).sum(1)
    if name == "kl_cov":  # its penalty has no gradient at ratio 1
        assert metrics["train/clip_fraction"] > 0
    assert (changes[[0, 3, 4]] > 0).all() and (changes[[1, 2, 5]] < 0).all()


@pytest.mark.parametrize(
    ("algorithm", "rows"),
    [
        ({}, [3, 4, 5]),
        ({"policy_loss": "clip_cov"}, [3, 4, 5]),
        ({"policy_loss": "kl_cov"}, [0, 1, 2, 3, 4, 5]),
        ({"entropy_coef": 0.01}, [0, 1, 2, 3, 4, 5]),
        ({"zero_advantage_rows": "keep"}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_rows_without_a_gradient_are_left_out_where_no_term_needs_them(
    algorithm: dict[str, Any], rows: list[int]
) -> None:
    settings = AlgorithmSection(**algorithm)
    batch = batch_from_rows(
        [[0]] * 6,
        [[0] * n for n in (3, 1, 2, 1, 2, 3)],
        group_id=[0, 0, 0, 1, 1, 1],
        rewards=[1.0] * 3 + [1.0, 0.0, 0.0],
    )
    batch = with_estimates(batch, settings)
    numbers, has_advantage = numbers_of(batch, 0), torch.tensor([False] * 3 + [True] * 3)

    def learned(**changes: Any) -> list[int]:
        section = settings.model_copy(update=changes)
        return rows_to_learn(numbers, has_advantage, section).nonzero().flatten().tolist()

    assert learned() == rows
    chosen = of_rows({"tokens": batch.tokens, "row": batch.row_of_token}, batch, rows)
    assert chosen["row"].unique().tolist() == rows and torch.equal(chosen["tokens"], batch.select(rows).tokens)
    assert learned(kl_coef=0.1) == list(range(6))
    agreeing = rows_to_learn(numbers.select(torch.arange(3)), has_advantage[:3], settings)
    assert agreeing.tolist() == [rows != [3, 4, 5], True, rows != [3, 4, 5]]
    assert rows_to_learn(numbers, None, settings).all(), "nothing is known of them yet"
