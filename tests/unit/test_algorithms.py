"""Advantages, losses, KL and aggregation against numbers from their papers, float64 autograd and their own algebra."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_megatron.algorithms.advantage import grpo_advantages, rloo_advantages
from rlhf_megatron.algorithms.aggregation import token_weights
from rlhf_megatron.algorithms.kl import kl_estimate
from rlhf_megatron.algorithms.metrics import mismatch_metrics
from rlhf_megatron.algorithms.objective import policy_objective
from rlhf_megatron.algorithms.policy_loss import clipped_policy_loss
from rlhf_megatron.recipe import AlgorithmSection

DOUBLE = torch.float64
REWARDS = st.lists(st.floats(-10, 10, allow_subnormal=False, width=32), min_size=1, max_size=12)


def vector(*values: float, dtype: torch.dtype = DOUBLE) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


# ---- advantages


def test_grpo_is_the_z_score_of_each_group() -> None:
    # arXiv 2402.03300, 4.1.2: (r - mean) / std. Group 7: mean 1/4, std 1/2. Group 3: mean 2, std sqrt(2).
    rewards, groups = vector(0, 1, 1, 0, 0, 3), torch.tensor([7, 3, 7, 7, 7, 3])
    expected = vector(-0.5, -math.sqrt(0.5), 1.5, -0.5, -0.5, math.sqrt(0.5))
    assert torch.allclose(grpo_advantages(rewards, groups), expected, rtol=1e-5)
    # Dr.GRPO, arXiv 2503.20783: r - mean.
    assert grpo_advantages(rewards, groups, normalize_by_std=False).tolist() == [-0.25, -1, 0.75, -0.25, -0.25, 1]


def test_rloo_compares_with_the_others() -> None:
    # arXiv 2402.14740, eq. 8, for rewards 1, 2, 6: 1 - 8/2, 2 - 7/2, 6 - 3/2.
    assert rloo_advantages(vector(1, 2, 6), torch.zeros(3, dtype=torch.long)).tolist() == [-3, -1.5, 4.5]


def test_rloo_does_not_normalise() -> None:
    with pytest.raises(ValueError, match="normalize_by_std"):
        rloo_advantages(vector(1, 2), torch.zeros(2, dtype=torch.long), True)


@pytest.mark.parametrize("estimate", [grpo_advantages, rloo_advantages])
@given(value=st.floats(-1e3, 1e3, width=32), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_groups_of_equal_rewards_and_groups_of_one_teach_nothing(estimate, value: float, sizes: list[int]) -> None:
    groups = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    rewards = torch.full((len(groups),), value, dtype=torch.float32)
    assert not estimate(rewards, groups, False).any()
    assert not grpo_advantages(rewards, groups).any()


@given(parts=st.lists(REWARDS, min_size=1, max_size=4), seed=st.integers(0, 9))
def test_advantages_sum_to_zero_and_follow_their_rows(parts: list[list[float]], seed: int) -> None:
    rewards = torch.tensor([value for part in parts for value in part], dtype=DOUBLE)
    groups = torch.tensor([number for number, part in enumerate(parts) for _ in part])
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(seed))
    for estimate in (
        grpo_advantages,
        rloo_advantages,
        lambda rewards, groups: grpo_advantages(rewards, groups, normalize_by_std=False),
    ):
        advantages = estimate(rewards, groups)
        sums = torch.zeros(len(parts), dtype=DOUBLE).index_add_(0, groups, advantages)
        assert sums.abs().max() < 1e-6
        assert torch.allclose(estimate(rewards[order], groups[order]), advantages[order], atol=1e-6)


# ---- policy loss


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        # PPO (arXiv 1707.06347, eq. 7) with low 0.2 and high 0.28; d loss / d logprob = -r A where not clipped.
        (1.0, 2.0, -2.0, -2.0),
        (1.2, 2.0, -2.4, -2.4),
        (1.5, 2.0, -2.56, 0.0),
        (0.5, 2.0, -1.0, -1.0),
        (0.9, -1.0, 0.9, 0.9),
        (0.5, -1.0, 0.8, 0.0),
        (2.0, -1.0, 2.0, 2.0),
        (4.0, -1.0, 3.0, 0.0),  # dual clip at 3 (arXiv 1912.09729, eq. 5)
        (9.0, 0.0, 0.0, 0.0),
    ],
)
def test_clipped_loss_by_hand(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    logprobs = vector(math.log(ratio) - 1).requires_grad_()
    result = clipped_policy_loss(logprobs, vector(-1), vector(advantage), 0.2, 0.28, clip_ratio_dual=3.0)
    result.per_token.sum().backward()
    assert result.per_token.item() == pytest.approx(loss, abs=1e-12)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(gradient, abs=1e-12)
    assert result.clipped.item() == (advantage != 0 and gradient == 0)


def test_no_token_makes_loss_or_gradient_infinite() -> None:
    logprobs = vector(0.0, 0.0, 0.0, -200.0, -200.0, dtype=torch.float32).requires_grad_()
    old = vector(-200.0, -200.0, -200.0, 0.0, 0.0, dtype=torch.float32)
    result = clipped_policy_loss(logprobs, old, vector(1, -1, 0, 1, -1, dtype=torch.float32), 0.2, 0.28)
    divergence = kl_estimate(logprobs, old, "k3")
    (result.per_token + divergence).sum().backward()
    assert logprobs.grad is not None
    assert torch.isfinite(result.per_token).all() and torch.isfinite(logprobs.grad).all()
    assert torch.isfinite(divergence).all()


# ---- KL


def test_kl_estimators_in_expectation() -> None:
    # E_p[k1] = E_p[k3] = KL(p || q), exactly, summed over all outcomes of two small distributions.
    p, q = vector(0.5, 0.3, 0.2), vector(0.2, 0.3, 0.5)
    divergence = (p * (p / q).log()).sum()
    for name in ("k1", "k3"):
        assert float((p * kl_estimate(p.log(), q.log(), name)).sum()) == pytest.approx(float(divergence), rel=1e-12)
    assert kl_estimate(vector(-1), vector(-3), "k2").item() == 2.0


@given(difference=st.floats(-15, 15))
def test_k3_is_exact_in_float32_also_near_zero(difference: float) -> None:
    single = torch.tensor([difference], dtype=torch.float32)
    exact = float(single)
    expected = math.expm1(-exact) + exact if abs(exact) > 1e-2 else exact**2 * (0.5 - exact / 6 + exact**2 / 24)
    value = kl_estimate(single, torch.zeros(1), "k3").item()
    assert value >= 0
    assert value == pytest.approx(expected, rel=2e-4, abs=1e-37)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_kl_gradients(name: str) -> None:
    reference = torch.randn(40, dtype=DOUBLE)
    gaps = torch.cat([torch.linspace(-3, 3, 20, dtype=DOUBLE), torch.linspace(-0.07, 0.07, 20, dtype=DOUBLE)])
    logprobs = (reference + gaps).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, reference, name), (logprobs,))


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        kl_estimate(vector(0), vector(0), "k4")
    with pytest.raises(ValueError, match="token_mean"):
        token_weights(torch.ones(1, dtype=torch.bool), torch.tensor([0, 1]), "mean")


# ---- aggregation


AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum")


def test_weights_by_hand() -> None:
    # Rows with 1, 3 and 0 sampled tokens among 2, 4 and 2.
    mask = torch.tensor([0, 1, 0, 1, 1, 1, 0, 0], dtype=torch.bool)
    offsets = torch.tensor([0, 2, 6, 8])
    expected = {
        "token_mean": [1 / 4, 1 / 4, 1 / 4, 1 / 4],
        "sequence_mean_token_mean": [1 / 3, 1 / 9, 1 / 9, 1 / 9],
        "sequence_mean_token_sum": [1 / 3, 1 / 3, 1 / 3, 1 / 3],
    }
    for name, values in expected.items():
        weights = token_weights(mask, offsets, name)
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
    }
    for name in AGGREGATIONS:
        total = float((token_weights(mask, offsets, name) * losses).sum())
        assert total == pytest.approx(float(expected[name]), abs=1e-5)


# ---- the whole objective


def objective_inputs(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(count, dtype=DOUBLE, generator=generator)

    old = normal() - 2
    fields = {"old_logprobs": old, "advantages": normal(), "reference_logprobs": old + normal() / 3}
    fields["weights"] = torch.rand(count, dtype=DOUBLE, generator=generator)
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


@settings(max_examples=25)
@given(cut=st.integers(1, 49), seed=st.integers(0, 99))
def test_parts_of_the_objective_add_up_to_the_whole(cut: int, seed: int) -> None:
    logprobs, entropy, fields = objective_inputs(50, seed)
    whole, metrics = policy_objective(logprobs, entropy, fields, SETTINGS)
    parts = [
        policy_objective(logprobs[part], entropy[part], {key: value[part] for key, value in fields.items()}, SETTINGS)
        for part in (slice(0, cut), slice(cut, 50))
    ]
    assert float(sum(loss for loss, _ in parts)) == pytest.approx(float(whole), rel=1e-9)
    for name, (total, count) in metrics.items():
        assert float(sum(part[name][0] for _, part in parts)) == pytest.approx(float(total), rel=1e-9, abs=1e-12)
        assert float(sum(part[name][1] for _, part in parts)) == float(count)


def test_mismatch_counts_sampled_tokens_only() -> None:
    mask = torch.tensor([False, True, True])
    metrics = mismatch_metrics(vector(9, -1, -2), vector(0, -1.5, -2), mask)
    assert metrics["train/rollout_logprob_abs_diff"] == 0.25
    assert metrics["train/rollout_logprob_abs_diff_max"] == 0.5
    # k3 with samples of the rollout: d = -1.5 - -1; exp(0.5) - 1 - 0.5, over two tokens.
    assert metrics["train/mismatch_kl"] == pytest.approx((math.exp(0.5) - 1.5) / 2)
    assert mismatch_metrics(vector(1), vector(1), torch.tensor([False])) == {}
