"""The objective of a policy update: policy loss, KL to a reference and entropy bonus, summed with given weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_megatron.algorithms.correction import correction_weights
from rlhf_megatron.algorithms.kl import kl_estimate
from rlhf_megatron.algorithms.policy_loss import POLICY_LOSSES, Tokens
from rlhf_megatron.algorithms.selection import SELECTIONS
from rlhf_megatron.algorithms.totals import ALONE, Totals
from rlhf_megatron.algorithms.value_loss import value_loss
from rlhf_megatron.data.rollout_batch import RolloutBatch, in_order
from rlhf_megatron.data.row_numbers import RowNumbers
from rlhf_megatron.recipe import AlgorithmSection

Metrics = dict[str, tuple[Tensor, Tensor]]


def objective_fields(
    minibatch: RolloutBatch, settings: AlgorithmSection, weights_of_rows: Tensor, totals: Totals = ALONE
) -> dict[str, Tensor]:
    """Return inputs of ``policy_objective`` for each token [T] of a share of a WHOLE minibatch, before it is cut: what
    depends on more than a row is decided here. ``weights_of_rows`` [R] are the ``row_weights`` of the share's rows.
    """
    weights = minibatch.spread(weights_of_rows)
    if minibatch.correction is not None:
        weights = weights * minibatch.correction
    fields = minibatch.fields(weights) | {"row": minibatch.row_of_token}
    if settings.policy_loss in SELECTIONS:
        fields["selected"] = SELECTIONS[settings.policy_loss](minibatch, settings, totals)
    return fields


def rows_to_learn(numbers: RowNumbers, has_advantage: Tensor | None, settings: AlgorithmSection) -> Tensor:
    """Return [R] bool, the rows that have a gradient: those that ``has_advantage`` says have one other than 0, or all
    where another term needs them, which is None.

    Each policy loss but that of ``kl_cov`` is a product with the advantage, so without a KL to a reference and an
    entropy bonus a row whose advantages are all 0 adds exactly 0. One row is kept in any case: the optimizer's step
    (moments, decay) is part of the result. ``objective_fields`` must have seen all rows.
    """
    if has_advantage is None or learns_from_all(settings) or not numbers.rows:
        return torch.ones(numbers.rows, dtype=torch.bool)
    if bool(has_advantage.any()):
        return has_advantage
    return torch.zeros_like(has_advantage).index_fill(0, numbers.lengths.argmin(), True)


def learns_from_all(settings: AlgorithmSection) -> bool:
    """Return True where rows without an advantage have a gradient too, or are kept whatever they have."""
    return (
        settings.zero_advantage_rows == "keep"
        or settings.policy_loss == "kl_cov"
        or bool(settings.entropy_coef)
        or bool(settings.kl_coef)
    )


def of_rows(fields: dict[str, Tensor], batch: RolloutBatch, rows: Sequence[int]) -> dict[str, Tensor]:
    """Return the ``fields`` [T] of the tokens of ``rows`` in this order, as of ``batch.select(rows)``."""
    if len(rows) == batch.rows:
        return fields
    lengths = batch.lengths.tolist()
    return {name: in_order([values], [lengths], rows) for name, values in fields.items()}


def policy_objective(
    logprobs: Tensor,
    entropy: Tensor,
    fields: dict[str, Tensor],
    settings: AlgorithmSection,
    kl_coef: float | None = None,
) -> tuple[Tensor, Metrics]:
    """Map logprobs [n] and entropy [n] of the sampled tokens of some rows, and their ``fields`` [n] -> (loss, metrics).

    The loss is a sum over these tokens of weight * (policy loss + kl_coef * KL - entropy_coef * entropy); since weights
    are normalised over the whole minibatch, sums over its parts add up to its loss. ``kl_coef`` (default: the
    settings') counts where ``settings.kl_placement`` is loss. Metrics are (sum, count) pairs.
    """
    old_logprobs = fields.get("old_logprobs", logprobs.detach())
    weights = fields["weights"]
    if "old_logprobs" not in fields:
        weights = weights * _own_correction(old_logprobs, fields, settings)
    tokens = Tokens(logprobs, old_logprobs, fields["advantages"], fields["row"], fields.get("selected"))
    policy = POLICY_LOSSES[settings.policy_loss](tokens, settings)
    per_token = policy.per_token - settings.entropy_coef * entropy
    count = logprobs.new_full((), logprobs.numel())
    metrics = {
        "clip_fraction": (policy.clipped.to(logprobs.dtype).sum(), count),
        "ratio": (tokens.log_ratio.detach().exp().sum(), count),
        "policy_kl": (kl_estimate(old_logprobs, logprobs.detach(), "k3").sum(), count),
    }
    if "reference_logprobs" in fields:
        divergence = kl_estimate(logprobs, fields["reference_logprobs"], settings.kl_estimator, settings.kl_gradient)
        metrics["kl"] = (divergence.detach().sum(), count)
        if settings.kl_placement == "loss":
            per_token = per_token + (settings.kl_coef if kl_coef is None else kl_coef) * divergence
    return (weights * per_token).sum(), metrics


def _own_correction(logprobs: Tensor, fields: dict[str, Tensor], settings: AlgorithmSection) -> Tensor:
    """Return [n]: ``with_correction``'s weights, where the old logprobs are those of this very pass; or 1."""
    if not settings.rollout_correction.is_used or not len(logprobs):
        return torch.ones_like(logprobs)
    log_ratio = (logprobs - fields["rollout_logprobs"]).double()
    row = fields["row"].unique_consecutive(return_inverse=True)[1]
    weights, _ = correction_weights(log_ratio, row, int(row[-1]) + 1, settings.rollout_correction)
    return weights.to(logprobs.dtype)


def value_objective(values: Tensor, fields: dict[str, Tensor], clip: float | None) -> tuple[Tensor, Metrics]:
    """Map values [n] of the sampled tokens of some rows, and their ``fields`` [n] -> (loss, metrics).

    The loss is a sum over these tokens of weight * value loss, as in ``policy_objective``; ``clip`` as in
    ``value_loss``.
    """
    result = value_loss(values, fields["values"], fields["returns"], clip)
    count = values.new_full((), values.numel())
    metrics = {"clip_fraction": (result.clipped.to(values.dtype).sum(), count), "value": (values.detach().sum(), count)}
    return (fields["weights"] * result.per_token).sum(), metrics
