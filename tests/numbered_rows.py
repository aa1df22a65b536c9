"""Rows whose number says all about them, for tests of batches and of their ways between ranks."""

from __future__ import annotations

from typing import Any

import torch

from rlhf_megatron.data.rollout_batch import RolloutBatch, batch_from_rows


def numbered_rows(ids: list[int], **more: Any) -> RolloutBatch:
    """Return rows, of which row n has a prompt of n % 3 + 1 tokens, and n tokens sampled."""
    return batch_from_rows(
        [[100 + n] * (n % 3 + 1) for n in ids],
        [[n] * n for n in ids],
        [[-n - place / 16 for place in range(n)] for n in ids],
        group_id=[n // 2 for n in ids],
        row_id=ids,
        truncated=[n > 5 for n in ids],
        rewards=[n / 4 for n in ids],
        **more,
    )


def as_lists(batch: RolloutBatch) -> dict[str, Any]:
    return {name: value.tolist() for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
