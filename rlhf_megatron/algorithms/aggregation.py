"""Aggregation of token losses to one number: weights that are fixed before anything is cut into micro-batches."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_megatron.data.rollout_batch import marked_in_rows, on_marked


def token_weights(response_mask: Tensor, cu_seqlens: Tensor, aggregation: str, constant: float | None = None) -> Tensor:
    """Map response_mask [T] bool, cu_seqlens [R + 1] of a WHOLE minibatch -> weights [T] float64-computed float32.

    The loss is sum(weights * per_token_loss), on whatever ranks and in whatever micro-batches the terms are added:

    - token_mean: every sampled token counts the same (DAPO, arXiv 2503.14476, eq. 8);
    - sequence_mean_token_mean: each response's mean, then the mean over responses (GRPO, arXiv 2402.03300, eq. 3);
    - sequence_mean_token_sum: each response's sum, then the mean over responses;
    - sequence_sum_constant: each response's sum over ``constant``, then the mean over responses (Dr.GRPO, arXiv
      2503.20783, whose code takes the longest response that may be generated).

    A response without tokens counts as a response with loss 0. Raises ValueError for another name, and where
    sequence_sum_constant has no constant above 0.
    """
    per_row = row_weights(marked_in_rows(response_mask, cu_seqlens), aggregation, constant)
    return on_marked(per_row, response_mask, cu_seqlens)


def row_weights(
    response_lengths: Tensor, aggregation: str, constant: float | None = None, trajectories: Tensor | None = None
) -> Tensor:
    """Map response_lengths [R] of a WHOLE minibatch -> [R] float32: the ``token_weights`` of each row's sampled tokens.

    Rows with the same number in ``trajectories`` [R] weigh as one response of all their tokens.
    """
    if trajectories is not None:
        of_rows = trajectories.unique(return_inverse=True)[1]
        whole = response_lengths.new_zeros(int(of_rows.max()) + 1 if len(of_rows) else 0)
        return row_weights(whole.index_add(0, of_rows, response_lengths), aggregation, constant)[of_rows]
    rows, tokens_of_row = max(1, len(response_lengths)), response_lengths.double()
    match aggregation:
        case "token_mean":
            per_row = torch.full_like(tokens_of_row, 1.0 / max(1.0, float(tokens_of_row.sum())))
        case "sequence_mean_token_mean":
            per_row = 1.0 / (rows * tokens_of_row.clamp(min=1.0))
        case "sequence_mean_token_sum":
            per_row = torch.full_like(tokens_of_row, 1.0 / rows)
        case "sequence_sum_constant":
            if not constant or constant < 0:
                raise ValueError(f"loss_constant={constant}: sequence_sum_constant divides by it; give one above 0")
            per_row = torch.full_like(tokens_of_row, 1.0 / (rows * constant))
        case _:
            raise ValueError(
                f"loss_aggregation {aggregation!r} is not one of token_mean, sequence_mean_token_mean, "
                "sequence_mean_token_sum, sequence_sum_constant"
            )
    return per_row.float()
