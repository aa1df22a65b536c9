"""Estimators of the KL divergence: values, gradients and expectations; the penalty and the controller."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_megatron.algorithms.kl import KLController, kl_estimate, with_kl_penalties
from rlhf_megatron.data.rollout_batch import batch_from_rows
from rlhf_megatron.recipe import AlgorithmSection

DOUBLE = torch.float64
NAMES = ("k1", "k2", "k3")


def vector(*values: float, dtype: torch.dtype = DOUBLE) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


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


@pytest.mark.parametrize("name", NAMES)
def test_kl_gradients(name: str) -> None:
    reference = torch.randn(40, dtype=DOUBLE)
    gaps = torch.cat([torch.linspace(-3, 3, 20, dtype=DOUBLE), torch.linspace(-0.07, 0.07, 20, dtype=DOUBLE)])
    logprobs = (reference + gaps).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, reference, name), (logprobs,))


def test_expected_gradients_of_the_estimators_as_losses() -> None:
    # Over samples of p, taken as fixed: k1's is 0, k2's is that of KL(p || q), k3's that of KL(q || p).
    logits, q = vector(0.3, -0.5, 0.1), vector(0.2, 0.3, 0.5)

    def gradient(loss) -> torch.Tensor:
        leaf = logits.clone().requires_grad_()
        loss(leaf.log_softmax(0)).backward()
        assert leaf.grad is not None
        return leaf.grad

    def expectation(name: str):
        return lambda log_p: (log_p.exp().detach() * kl_estimate(log_p, q.log(), name)).sum()

    assert torch.allclose(gradient(expectation("k1")), vector(0, 0, 0), atol=1e-15)
    forward = gradient(lambda log_p: (log_p.exp() * (log_p - q.log())).sum())
    assert torch.allclose(gradient(expectation("k2")), forward, atol=1e-15)
    backward = gradient(lambda log_p: (q * (q.log() - log_p)).sum())
    assert torch.allclose(gradient(expectation("k3")), backward, atol=1e-15)


@pytest.mark.parametrize(("value", "slope"), list(itertools.product(NAMES, NAMES)))
def test_straight_through_has_one_value_and_the_others_gradient(value: str, slope: str) -> None:
    logprobs, reference = vector(-1, -2, -0.5).requires_grad_(), vector(-1.5, -0.5, -0.5)
    found = kl_estimate(logprobs, reference, value, slope)
    assert torch.allclose(found, kl_estimate(logprobs, reference, value), atol=1e-15)
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    (expected,) = torch.autograd.grad(kl_estimate(logprobs, reference, slope).sum(), logprobs)
    assert torch.equal(gradient, expected)


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        kl_estimate(vector(0), vector(0), "k4")
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        kl_estimate(vector(0), vector(0), "k3", "k4")


def test_penalties_are_the_coefficient_times_the_divergence_of_each_sampled_token() -> None:
    # arXiv 2203.02155, eq. 2: r - beta * log(pi / ref), token by token, with the policy that sampled.
    batch = batch_from_rows([[1], [1]], [[2, 3], []]).with_fields(
        old_logprobs=vector(0, -1, -2, 0).float(), reference_logprobs=vector(-9, -1.5, -1, -9).float()
    )
    settings = AlgorithmSection(kl_coef=0.5, kl_estimator="k1", kl_placement="reward")
    assert with_kl_penalties(batch, settings, 0.25).penalties.tolist() == [0, 0.125, -0.25, 0]


def adaptive(**keys: float) -> AlgorithmSection:
    return AlgorithmSection(kl_coef=0.1, kl_controller={"type": "adaptive", "target": 0.05, "horizon": 1000, **keys})


def test_the_controller_follows_ziegler() -> None:
    # arXiv 1909.08593, section 2.2: e = clip(KL / target - 1, -0.2, 0.2), beta *= 1 + e * n / horizon.
    controller = KLController(adaptive())
    controller.observe(0.055, 100)
    assert controller.coefficient == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    controller.observe(5.0, 100)
    assert controller.coefficient == pytest.approx(0.1 * 1.01 * 1.02)
    controller.observe(0.0, 500)
    assert controller.coefficient == pytest.approx(0.1 * 1.01 * 1.02 * 0.9)
    before = controller.coefficient
    controller.observe(0.05, 500)
    controller.observe(math.nan, 500)
    assert controller.coefficient == before


def test_a_step_of_more_responses_than_the_horizon_moves_the_coefficient_by_a_fifth() -> None:
    controller = KLController(adaptive())
    controller.observe(0.0, 8192)
    assert controller.coefficient == pytest.approx(0.08)
    controller.observe(1.0, 8192)
    assert controller.coefficient == pytest.approx(0.096)


def test_the_controller_goes_on_where_it_was() -> None:
    controller, again = KLController(adaptive()), KLController(adaptive())
    controller.observe(1.0, 1000)
    again.load(controller.state())
    assert again.coefficient == controller.coefficient == pytest.approx(0.12)


def test_a_fixed_coefficient_is_the_recipes() -> None:
    controller = KLController(AlgorithmSection(kl_coef=0.3))
    controller.observe(99.0, 10**6)
    controller.load({"coefficient": 0.7})  # of a run that had an adaptive one
    assert controller.coefficient == 0.3
