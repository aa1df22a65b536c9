"""Drafts that vLLM's older model runner has made, kept for a comparison. No test lives here."""

from __future__ import annotations

from typing import Any


def keep_drafts(runner: Any) -> list[tuple[list[int], list[int]]]:
    """Return a list to which each draft of ``runner`` from now on is added: the sequence before it, and its tokens."""
    take, drafts = runner.take_draft_token_ids, list[tuple[list[int], list[int]]]()

    def take_and_keep() -> Any:
        taken = take()
        for name, draft in zip(taken.req_ids, taken.draft_token_ids, strict=True) if taken else ():
            request = runner.requests[name]
            if draft:
                drafts.append(([*request.prompt_token_ids, *request.output_token_ids], list(draft)))
        return taken

    runner.take_draft_token_ids = take_and_keep
    return drafts
