"""Checks of requests that are the same for every engine."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_megatron.errors import RolloutError
from rlhf_megatron.rollout.engine import Request, Sampling


def check_requests(requests: Sequence[Request], sampling: Sampling, max_length: int, vocabulary: int) -> None:
    """Check the prompts of ``requests`` against an engine's ``max_length`` in tokens and its ``vocabulary``.

    Raises:
        RolloutError: a prompt is empty, too long for ``sampling``, or of another tokenizer.
    """
    checked: Sequence[int] | None = None
    for request in requests:
        tokens = request.prompt_token_ids
        if tokens is checked:
            continue  # of the same group
        checked = tokens
        if not tokens:
            raise RolloutError(f"row {request.row_id}: the prompt has no tokens; remove it from the data")
        if len(tokens) + sampling.max_tokens > max_length:
            raise RolloutError(
                f"row {request.row_id}: {len(tokens)} prompt tokens and {sampling.max_tokens} new ones exceed the "
                f"engine's {max_length}; raise data.max_prompt_length or rollout.max_response_length"
            )
        if not 0 <= min(tokens) <= max(tokens) < vocabulary:
            raise RolloutError(
                f"row {request.row_id}: token {max(tokens)} or {min(tokens)} is outside the model's vocabulary of "
                f"{vocabulary}; model.tokenizer must be the model's own"
            )
