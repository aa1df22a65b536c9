"""Correction of the mismatch between rollout and trainer: weights by hand, exact expectations, what is measured."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_megatron.algorithms.correction import correction_weights, with_correction
from rlhf_megatron.algorithms.diagnostics import effective_sample_fraction, mismatch_metrics
from rlhf_megatron.data.rollout_batch import batch_from_rows
from rlhf_megatron.recipe.algorithm import RolloutCorrectionSection

DOUBLE = torch.float64
LOG_RATIO = [math.log(value) for value in (1.5, 4.0, 0.5, 0.4, 1.0)]
ROW = torch.tensor([0, 0, 2, 2, 2])  # row 1 of 3 is empty


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=DOUBLE)


@pytest.mark.parametrize(
    ("keys", "expected", "rejected_rows"),
    [
        ({}, [1, 1, 1, 1, 1], []),
        ({"type": "tis", "threshold": 2.0}, [1.5, 2.0, 0.5, 0.4, 1.0], []),
        ({"type": "mis", "threshold": 2.0}, [1.5, 0, 0.5, 0.4, 1.0], []),
        ({"type": "mis", "threshold": 2.0, "threshold_low": 0.5}, [1.5, 0, 0.5, 0, 1.0], []),
        # Products of the rows: 6 and 0.2.
        ({"type": "tis", "level": "sequence", "threshold": 5.0}, [5, 5, 0.2, 0.2, 0.2], []),
        ({"type": "mis", "level": "sequence", "threshold": 5.0}, [0, 0, 0.2, 0.2, 0.2], []),
        # Geometric means: sqrt(6) = 2.45 and 0.2^(1/3) = 0.585 = 1 / 1.71. The empty row agrees with anything.
        ({"reject_threshold": 2.0}, [0, 0, 1, 1, 1], [0]),
        ({"reject_threshold": 1.7}, [0, 0, 0, 0, 0], [0, 2]),
        ({"reject_threshold": 2.5}, [1, 1, 1, 1, 1], []),
        ({"veto_threshold": 0.45}, [1, 1, 0, 0, 0], [2]),
        ({"type": "tis", "reject_threshold": 2.0}, [0, 0, 0.5, 0.4, 1.0], [0]),
    ],
)
def test_weights_by_hand(keys: dict[str, object], expected: list[float], rejected_rows: list[int]) -> None:
    weights, rejected = correction_weights(vector(*LOG_RATIO), ROW, 3, RolloutCorrectionSection(**keys))
    assert weights.tolist() == pytest.approx(expected, abs=1e-12)
    assert rejected.nonzero().flatten().tolist() == rejected_rows


def test_weights_make_an_expectation_that_of_the_trainer() -> None:
    # E_rollout[w f] = E_trainer[f] where no bound decides, for tokens and for sequences of two independent ones.
    trainer, rollout, values = vector(0.5, 0.3, 0.2), vector(0.2, 0.3, 0.5), vector(1, -2, 4)
    answers = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    log_ratio = (trainer / rollout).log()[answers].flatten()
    row = torch.arange(9).repeat_interleave(2)
    settings = RolloutCorrectionSection(type="tis", level="sequence", threshold=100.0)
    weights, _ = correction_weights(log_ratio, row, 9, settings)
    chance, value = rollout[answers].prod(1), values[answers].prod(1)
    assert float((chance * weights[::2] * value).sum()) == pytest.approx(float((trainer * values).sum()) ** 2)
    single, _ = correction_weights(
        (trainer / rollout).log(), torch.arange(3), 3, RolloutCorrectionSection(type="mis", threshold=100.0)
    )
    assert float((rollout * single * values).sum()) == pytest.approx(float((trainer * values).sum()))


@given(
    log_ratio=st.lists(st.floats(-50, 50), min_size=1, max_size=12),
    kind=st.sampled_from(["tis", "mis"]),
    level=st.sampled_from(["token", "sequence"]),
    threshold=st.floats(0.5, 10),
)
def test_weights_stay_between_zero_and_the_threshold(
    log_ratio: list[float], kind: str, level: str, threshold: float
) -> None:
    settings = RolloutCorrectionSection(type=kind, level=level, threshold=threshold)
    row = torch.arange(len(log_ratio)) // 3
    weights, rejected = correction_weights(vector(*log_ratio), row, 4, settings)
    assert (weights >= 0).all() and (weights <= threshold * (1 + 1e-12)).all() and not rejected.any()
    agreeing, _ = correction_weights(torch.zeros(len(log_ratio), dtype=DOUBLE), row, 4, settings)
    assert torch.allclose(agreeing, torch.full_like(agreeing, min(1.0, threshold) if kind == "tis" else threshold >= 1))


def test_a_batch_gets_its_weights_at_its_sampled_tokens() -> None:
    batch = batch_from_rows([[1], [1], [1]], [[2, 2], [], [2, 2, 2]])
    mask = batch.response_mask
    zeros = torch.zeros(len(mask))
    batch = batch.with_fields(old_logprobs=zeros.masked_scatter(mask, torch.tensor(LOG_RATIO)))
    settings = RolloutCorrectionSection(type="mis", veto_threshold=0.1)
    found, metrics = with_correction(batch, settings)
    assert found.correction[mask].tolist() == pytest.approx([1.5, 0, 0.5, 0.4, 1.0])
    assert not found.correction[~mask].any()
    assert metrics == pytest.approx(
        {
            "train/correction_weight_mean": 3.4 / 5,
            "train/correction_weight_max": 1.5,
            "train/correction_masked_fraction": 0.2,
            "train/correction_rejected_fraction": 0.0,
            "train/correction_effective_fraction": 3.4**2 / (5 * (1.5**2 + 0.5**2 + 0.4**2 + 1.0)),
        },
        rel=1e-6,
    )
    # The same row has the same weights wherever it stands.
    order = [2, 0, 1]
    again, _ = with_correction(batch.select(order), settings)
    assert torch.equal(again.correction, found.select(order).correction)


def test_nothing_asked_for_changes_nothing() -> None:
    batch = batch_from_rows([[1]], [[2, 2]])
    assert with_correction(batch, RolloutCorrectionSection()) == (batch, {})
    empty = batch_from_rows([[1]], [[]])
    assert with_correction(empty, RolloutCorrectionSection(type="tis")) == (empty, {})


def test_effective_sample_fraction_by_hand() -> None:
    assert effective_sample_fraction(vector(1, 1, 1, 1)) == 1.0
    assert effective_sample_fraction(vector(3, 0, 0)) == pytest.approx(1 / 3)  # one sample of three
    assert effective_sample_fraction(vector(1, 2)) == pytest.approx(9 / 10)
    assert effective_sample_fraction(vector(0, 0)) == 0.0


def test_mismatch_counts_sampled_tokens_only() -> None:
    mask = torch.tensor([False, True, True])
    metrics = mismatch_metrics(vector(9, -1, -2), vector(0, -1.5, -2), mask)
    assert metrics["train/rollout_logprob_abs_diff"] == 0.25
    assert metrics["train/rollout_logprob_abs_diff_max"] == 0.5
    # k3 with samples of the rollout: d = -1.5 - -1; exp(0.5) - 1 - 0.5, over two tokens.
    assert metrics["train/mismatch_kl"] == pytest.approx((math.exp(0.5) - 1.5) / 2)
    ratio = math.exp(0.5)
    assert metrics["train/mismatch_effective_fraction"] == pytest.approx((ratio + 1) ** 2 / (2 * (ratio**2 + 1)))
    assert mismatch_metrics(vector(1), vector(1), torch.tensor([False])) == {}
