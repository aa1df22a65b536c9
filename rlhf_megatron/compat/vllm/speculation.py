"""Speculative decoding in vLLM: which of its model runners speculates, and how it is made to.

The newer one takes drafts of a model; ours, of text, are made known to it (``newer_speculation``). What it lacks falls
back to the older one, and so do CPUs (``older_speculation``).
"""

from __future__ import annotations

from typing import Any

from rlhf_megatron.compat.vllm import internals, newer_speculation
from rlhf_megatron.compat.vllm.older_speculation import CustomDrafter, speculate
from rlhf_megatron.compat.vllm.verification import Draft, Verification


def configuration(count: int, max_running: int) -> dict[str, Any]:
    """Return vLLM's speculative_config for ``count`` drafted tokens, while at most ``max_running`` sequences run."""
    drafter = f"{CustomDrafter.__module__}.{CustomDrafter.__qualname__}"
    return {"method": "custom_class", "model": drafter, **_counts(count, max_running)}


def model_configuration(method: str, count: int, max_running: int, folder: str | None) -> dict[str, Any]:
    """Return the same for drafts of a model: that of ``folder``, or a layer of the target's."""
    model = {} if folder is None else {"model": folder}
    return {"method": method, **_counts(count, max_running), **model}


def _counts(count: int, max_running: int) -> dict[str, Any]:
    # By the second of these the newer runner has CUDA graphs for steps without drafts too.
    by_running = [(1, max_running, count), (max_running + 1, max_running + 1, 0)]  # the last is for all above it
    return {"num_speculative_tokens": count, "num_speculative_tokens_per_batch_size": by_running}


def install(engine: Any, draft: Draft | None, max_running: int, synthetic_length: float | None = None) -> Verification:
    """Have a new LLMEngine speculate, by ``draft`` where it was made with ``configuration``, and else by its model.

    There are drafts while at most ``max_running`` sequences run; ``synthetic_length`` is that of ``Verification``.
    """
    runner = internals.model_runner(engine)
    if hasattr(runner, "speculator"):
        scheduler = internals.scheduler(engine)
        return newer_speculation.speculate(runner, scheduler, draft, max_running, synthetic_length)
    return speculate(runner, draft, max_running, synthetic_length)
