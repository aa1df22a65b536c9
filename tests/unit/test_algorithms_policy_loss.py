"""Policy and value losses against numbers worked out from their papers, closed-form gradients and float64 autograd."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_megatron.algorithms.kl import kl_estimate
from rlhf_megatron.algorithms.policy_loss import POLICY_LOSSES, PolicyLoss, Tokens
from rlhf_megatron.algorithms.selection import (
    SELECTIONS,
    clip_cov_selection,
    kl_cov_selection,
    token_covariance,
)
from rlhf_megatron.algorithms.value_loss import value_loss
from rlhf_megatron.data.rollout_batch import RolloutBatch, batch_from_rows
from rlhf_megatron.recipe import AlgorithmSection

DOUBLE = torch.float64
OLD = -1.0


def vector(*values: float, dtype: torch.dtype = DOUBLE) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def evaluate(
    name: str,
    log_ratios: list[float],
    advantages: list[float],
    rows: list[int] | None = None,
    selected: list[bool] | None = None,
    **keys: object,
) -> tuple[PolicyLoss, list[float]]:
    """Return (the loss, its gradient when each row's tokens have weight 1 / length), with old logprobs of -1."""
    settings = AlgorithmSection(policy_loss=name, **keys)
    logprobs = vector(*[OLD + value for value in log_ratios]).requires_grad_()
    row = torch.tensor(list(range(len(log_ratios))) if rows is None else rows)
    chosen = None if selected is None else torch.tensor(selected)
    tokens = Tokens(logprobs, torch.full_like(logprobs, OLD).detach(), vector(*advantages), row, chosen)
    loss = POLICY_LOSSES[name](tokens, settings)
    weights = 1.0 / torch.bincount(row).double()[row]
    (gradient,) = torch.autograd.grad((weights * loss.per_token).sum(), logprobs)
    return loss, gradient.tolist()


# ---- clip


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
    result, slope = evaluate("clip", [math.log(ratio)], [advantage], clip_ratio_high=0.28, clip_ratio_dual=3.0)
    assert result.per_token.item() == pytest.approx(loss, abs=1e-12)
    assert slope[0] == pytest.approx(gradient, abs=1e-12)
    assert result.clipped.item() == (advantage != 0 and gradient == 0)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_no_token_makes_loss_or_gradient_infinite(name: str) -> None:
    logprobs = vector(0.0, 0.0, 0.0, -200.0, -200.0, dtype=torch.float32).requires_grad_()
    old = vector(-200.0, -200.0, -200.0, 0.0, 0.0, dtype=torch.float32)
    advantages = vector(1, -1, 0, 1, -1, dtype=torch.float32)
    tokens = Tokens(logprobs, old, advantages, torch.arange(5), torch.tensor([True, False, True, True, True]))
    result = POLICY_LOSSES[name](tokens, AlgorithmSection(policy_loss=name))
    divergence = kl_estimate(logprobs, old, "k3")
    (result.per_token + divergence).sum().backward()
    assert logprobs.grad is not None
    assert torch.isfinite(result.per_token).all() and torch.isfinite(logprobs.grad).all()
    assert torch.isfinite(divergence).all()
    assert result.per_token.dtype == torch.float32 and result.clipped.dtype == torch.bool


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_micro_batch_may_be_empty(name: str) -> None:
    empty = torch.zeros(0, dtype=DOUBLE)
    tokens = Tokens(empty, empty, empty, torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.bool))
    assert POLICY_LOSSES[name](tokens, AlgorithmSection(policy_loss=name)).per_token.shape == (0,)


# ---- ratios of sequences


def test_gspo_takes_the_ratio_of_the_sequence() -> None:
    # arXiv 2507.18071, eq. 7: s = exp(mean log ratio): exp(0.1), exp(0.3), exp(-0.5); eq. 5 with 0.2 and 0.28.
    found, gradient = evaluate(
        "gspo", [0.0, 0.2, 0.5, 0.1, -0.4, -0.6], [2, 2, 2, 2, -1, -1], [0, 0, 1, 1, 2, 2], clip_ratio_high=0.28
    )
    first = -2 * math.exp(0.1)
    assert found.per_token.tolist() == pytest.approx([first, first, -2.56, -2.56, 0.8, 0.8], abs=1e-12)
    assert gradient == pytest.approx([first / 2, first / 2, 0, 0, 0, 0], abs=1e-12)  # eq. 10: s A / length each
    assert found.clipped.tolist() == [False, False, True, True, True, True]


def test_gspo_with_advantages_per_token() -> None:
    # arXiv 2507.18071, eq. 13 and 14: the sequence's ratio, each token with its own advantage and gradient.
    found, gradient = evaluate("gspo", [0.0, 0.2], [2.0, -1.0], [0, 0])
    assert found.per_token.tolist() == pytest.approx([-2 * math.exp(0.1), math.exp(0.1)], abs=1e-12)
    assert gradient == pytest.approx([-math.exp(0.1), math.exp(0.1) / 2], abs=1e-12)


def test_gmpo_clips_tokens_before_the_geometric_mean() -> None:
    # arXiv 2507.20673 with bounds exp(-0.4) and exp(0.4): A > 0 clips upward only, A < 0 downward only.
    keys = {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}
    found, gradient = evaluate("gmpo", [0.1, 0.9, -0.9], [1, 1, 1], [5, 5, 5], **keys)
    mean = math.exp((0.1 + 0.4 - 0.9) / 3)
    assert found.per_token.tolist() == pytest.approx([-mean] * 3, abs=1e-12)
    assert gradient == pytest.approx([-mean / 3, 0, -mean / 3], abs=1e-12)
    assert found.clipped.tolist() == [False, True, False]
    found, gradient = evaluate("gmpo", [0.1, 0.9, -0.9], [-2, -2, -2], [5, 5, 5], **keys)
    mean = math.exp((0.1 + 0.9 - 0.4) / 3)
    assert found.per_token.tolist() == pytest.approx([2 * mean] * 3, abs=1e-12)
    assert gradient == pytest.approx([2 * mean / 3, 2 * mean / 3, 0], abs=1e-12)


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_sequence_ratios_are_those_of_tokens_where_rows_have_one(name: str) -> None:
    ratios, advantages = [0.05, -0.1, 0.15], [1.0, -2.0, 0.5]
    alone, _ = evaluate(name, ratios, advantages)
    clip, _ = evaluate("clip", ratios, advantages)
    assert torch.allclose(alone.per_token, clip.per_token)


# ---- the others


def test_cispo_bounds_the_weight_and_keeps_every_gradient() -> None:
    # arXiv 2506.13585, eq. 4 and 5: the gradient is -clip(r) A, also beyond the bounds.
    found, gradient = evaluate("cispo", [0.0, math.log(3), math.log(0.5)], [2, 1, -1], clip_ratio_high=0.28)
    assert gradient == pytest.approx([-2, -1.28, 0.8], abs=1e-12)
    assert found.per_token.tolist() == pytest.approx(
        [2, -1.28 * (OLD + math.log(3)), 0.8 * (OLD + math.log(0.5))], abs=1e-12
    )
    assert found.clipped.tolist() == [False, True, True]


def test_sapo_gates_by_a_sigmoid() -> None:
    # arXiv 2511.20347: f(r) = sigmoid(tau (r - 1)) 4 / tau; f'(r) = 4 p (1 - p), 1 at r = 1.
    found, gradient = evaluate("sapo", [0.0, math.log(2), math.log(2)], [3, 1, -1])
    p, q = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-1.05))
    assert found.per_token.tolist() == pytest.approx([-3 * 2, -4 * p, 4 / 1.05 * q], abs=1e-12)
    assert gradient == pytest.approx([-3, -2 * 4 * p * (1 - p), 2 * 4 * q * (1 - q)], abs=1e-12)
    assert not found.clipped.any()


def test_dppo_masks_by_the_distance_of_probabilities() -> None:
    # arXiv 2602.04879, eq. 12 and 13. Its section 4.2: 1e-4 -> 1e-2 is a ratio of 100 and a distance of 0.0099;
    # 0.99 -> 0.8 is a ratio of 0.81 and a distance of 0.19. PPO clips the first, DPPO the second.
    old, new = vector(1e-4, 0.99, 0.99, 0.5, 0.5), vector(1e-2, 0.8, 0.8, 0.8, 0.2)
    advantages = vector(1, -1, 1, 1, 1)
    logprobs = new.log().requires_grad_()
    settings = AlgorithmSection(policy_loss="dppo_tv", clip_ratio_low=0.15, clip_ratio_high=0.2)
    found = POLICY_LOSSES["dppo_tv"](Tokens(logprobs, old.log(), advantages, torch.arange(5)), settings)
    expected = vector(-100, 0, -0.8 / 0.99, 0, -0.4)  # moving back towards the old policy is never masked
    assert torch.allclose(found.per_token, expected)
    assert torch.allclose(torch.autograd.grad(found.per_token.sum(), logprobs)[0], expected)
    assert found.clipped.tolist() == [False, True, False, True, False]


def test_dppo_masks_by_the_binary_kl() -> None:
    # arXiv 2602.04879, eq. 14 for 0.5 -> 0.8: 0.5 ln(5/8) + 0.5 ln(5/2) = 0.2231; for 0.5 -> 0.6: 0.0204.
    divergence = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)
    for bound, masked in ((divergence - 1e-6, True), (divergence + 1e-6, False)):
        settings = AlgorithmSection(policy_loss="dppo_kl", clip_ratio_high=bound)
        tokens = Tokens(vector(0.8, 0.6).log(), vector(0.5, 0.5).log(), vector(1, 1), torch.arange(2))
        found = POLICY_LOSSES["dppo_kl"](tokens, settings)
        assert found.clipped.tolist() == [masked, False]
        assert found.per_token.tolist() == pytest.approx([0.0 if masked else -1.6, -1.2], abs=1e-12)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_bounds_the_weight_of_a_token_and_keeps_its_gradient(name: str) -> None:
    # verl's compute_policy_loss_dppo_tv and _kl: -A sg(min(r, c)) M logprob, here with c = 3 and nothing masked.
    old, new = vector(1e-4, 0.1, 0.5), vector(1e-2, 0.2, 0.4)
    advantages, logprobs = vector(1, 2, -1), new.log().requires_grad_()
    settings = AlgorithmSection(policy_loss=name, clip_ratio_low=5, clip_ratio_high=5, clip_ratio_dual=3.0)
    found = POLICY_LOSSES[name](Tokens(logprobs, old.log(), advantages, torch.arange(3)), settings)
    weights = vector(3, 2, 0.8)
    assert torch.allclose(found.per_token, -advantages * weights * new.log())
    assert torch.allclose(torch.autograd.grad(found.per_token.sum(), logprobs)[0], -advantages * weights)


def test_covariance_losses_treat_the_selected_tokens_otherwise() -> None:
    # arXiv 2505.22617, eq. 12 and 14 with its listing: clip_cov detaches them, kl_cov adds beta |log ratio|.
    ratios, advantages, selected = [0.1, 0.1, -0.2, 0.5], [1.0, 1.0, -1.0, 1.0], [True, False, True, False]
    found, gradient = evaluate("clip_cov", ratios, advantages, None, selected)
    assert found.per_token.tolist() == pytest.approx([0, -math.exp(0.1), 0, -1.2], abs=1e-12)
    assert gradient == pytest.approx([0, -math.exp(0.1), 0, 0], abs=1e-12)
    assert found.clipped.tolist() == [True, False, True, True]
    found, gradient = evaluate("kl_cov", ratios, advantages, None, selected, covariance={"kl_coef": 2.0})
    rising, falling = math.exp(0.1), math.exp(-0.2)
    assert found.per_token.tolist() == pytest.approx([-rising + 0.2, -rising, falling + 0.4, -math.exp(0.5)], abs=1e-12)
    assert gradient == pytest.approx([-rising + 2, -rising, falling - 2, -math.exp(0.5)], abs=1e-12)


def test_reinforce_is_the_logprob_times_the_advantage() -> None:
    found, gradient = evaluate("reinforce", [0.3, -0.2], [2, -3])
    assert found.per_token.tolist() == pytest.approx([1.4, -3.6], abs=1e-12)
    assert gradient == [-2, 3]


# cispo's and reinforce's own values are no integrals of their gradients; those are held against closed forms above.
@pytest.mark.parametrize("name", sorted(set(POLICY_LOSSES) - {"cispo"}))
def test_gradients_are_those_of_the_values(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    old = torch.randn(24, dtype=DOUBLE, generator=generator) - 3
    logprobs = (old + torch.randn(24, dtype=DOUBLE, generator=generator) / 3).requires_grad_()
    row = torch.arange(6).repeat_interleave(4)
    advantages = torch.randn(6, dtype=DOUBLE, generator=generator)[row]
    selected = torch.rand(24, generator=generator) < 0.3
    settings = AlgorithmSection(policy_loss=name)

    def total(x: torch.Tensor) -> torch.Tensor:
        return POLICY_LOSSES[name](Tokens(x, old, advantages, row, selected), settings).per_token.sum()

    assert torch.autograd.gradcheck(total, (logprobs,))


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
@given(advantages=st.lists(st.floats(-5, 5), min_size=4, max_size=4))
def test_without_a_change_of_policy_all_have_the_policy_gradient(name: str, advantages: list[float]) -> None:
    # At ratio 1 every loss but one with selected tokens has the gradient -A of REINFORCE.
    _, gradient = evaluate(name, [0.0] * 4, advantages, [0, 1, 2, 3], [False] * 4)
    assert gradient == pytest.approx([-value for value in advantages], abs=1e-12)


# ---- selection of tokens


def batch_of(advantages: list[float], old: list[float], lengths: list[int]) -> RolloutBatch:
    """Return rows with one token of a prompt and the given sampled tokens."""
    batch = batch_from_rows([[0]] * len(lengths), [[1] * length for length in lengths])
    zeros = torch.zeros(len(batch.tokens))
    return batch.with_fields(
        advantages=zeros.masked_scatter(batch.response_mask, torch.tensor(advantages, dtype=torch.float32)),
        old_logprobs=zeros.masked_scatter(batch.response_mask, torch.tensor(old, dtype=torch.float32)),
    )


def test_covariance_by_hand() -> None:
    # arXiv 2505.22617, eq. 10: means 2 and -2.
    assert token_covariance(vector(1, 2, 3), vector(-1, -3, -2)).tolist() == [-1, 0, 0]


def test_kl_cov_selects_the_highest_covariance() -> None:
    batch = batch_of([1, -1, 1, -1, 1, -1], [-1, -2, -5, -4, -3, -3], [4, 2])
    chosen = kl_cov_selection(batch, AlgorithmSection(policy_loss="kl_cov", covariance={"fraction": 0.4}))
    # (A, logprob - mean) = (1, 2), (-1, 1), (1, -2), (-1, -1), (1, 0), (-1, 0): the first 2 of 6 are 2 and 1.
    assert chosen.tolist() == [False, True, False, False, True, False, False, False]


def test_clip_cov_draws_from_those_between_the_bounds() -> None:
    count = 4000
    generator = torch.Generator().manual_seed(1)
    advantages, old = torch.randn(2, count, generator=generator)
    batch = batch_of(advantages.tolist(), old.tolist(), [count // 4] * 4)
    section = {"fraction": 0.05, "low": 0.5, "high": 1.5}
    chosen = clip_cov_selection(batch, AlgorithmSection(policy_loss="clip_cov", covariance=section))
    covariance = token_covariance(batch.advantages[chosen], batch.old_logprobs[chosen])
    assert int(chosen.sum()) == 200 and not chosen[~batch.response_mask].any() and len(covariance) == 200
    whole = token_covariance(advantages, old)
    picked = whole[chosen[batch.response_mask]]
    assert (picked > 0.5).all() and (picked < 1.5).all()
    # Drawn evenly: the mean of those picked is near that of all that could be, within four standard errors.
    allowed = whole[(whole > 0.5) & (whole < 1.5)]
    assert abs(float(picked.mean() - allowed.mean())) < 4 * float(allowed.std()) / math.sqrt(200)
    # Another step draws others; with nothing between the bounds nothing is drawn.
    later = clip_cov_selection(
        batch.with_fields(weight_version=batch.weight_version + 1),
        AlgorithmSection(policy_loss="clip_cov", covariance=section),
    )
    assert int((later & chosen).sum()) < 100
    none = AlgorithmSection(policy_loss="clip_cov", covariance={"low": 1e6, "high": 1e7})
    assert not clip_cov_selection(batch, none).any()


@pytest.mark.parametrize("name", sorted(SELECTIONS))
def test_at_least_one_token_is_selected_and_its_row_may_stand_anywhere(name: str) -> None:
    generator = torch.Generator().manual_seed(2)
    advantages, old = torch.randn(2, 30, generator=generator)
    batch = batch_of(advantages.tolist(), old.tolist(), [5, 0, 10, 15])
    settings = AlgorithmSection(policy_loss=name, covariance={"low": 0.0})
    chosen, order = SELECTIONS[name](batch, settings), [2, 0, 3, 1]
    assert int(chosen.sum()) == 1
    again = SELECTIONS[name](batch.select(order), settings)
    assert torch.equal(again, batch.with_fields(penalties=chosen).select(order).penalties)


# ---- values


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient"),
    [
        (1.0, 1.0, 3.0, 2.0, -2.0),  # inside the bounds: half the square
        (1.1, 1.0, 3.0, 1.805, -1.9),
        (2.0, 1.0, 3.0, 1.62, 0.0),  # it may not come nearer than from 1.2: (1.2 - 3)^2 / 2
        (0.0, 1.0, 3.0, 4.5, -3.0),  # further away than the bound: the larger loss counts
    ],
)
def test_value_loss_by_hand(value: float, old: float, target: float, loss: float, gradient: float) -> None:
    # max((V - R)^2, (clip(V, V_old - 0.2, V_old + 0.2) - R)^2) / 2: arXiv 2005.12729, section 3.
    values = vector(value).requires_grad_()
    result = value_loss(values, vector(old), vector(target), 0.2)
    assert result.per_token.item() == pytest.approx(loss, abs=1e-12)
    assert torch.autograd.grad(result.per_token.sum(), values)[0].item() == pytest.approx(gradient, abs=1e-12)
    assert result.clipped.item() == (gradient == 0)


def test_value_loss_gradients_and_without_a_bound() -> None:
    generator = torch.Generator().manual_seed(5)
    values, old, returns = torch.randn(3, 40, dtype=DOUBLE, generator=generator)
    values.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, returns, 0.2).per_token.sum(), (values,))
    free = value_loss(values, old, returns, None)
    assert torch.equal(free.per_token, (values - returns).square() / 2) and not free.clipped.any()
    assert (value_loss(values, old, returns, 0.2).per_token >= free.per_token).all()
