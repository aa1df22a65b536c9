"""Errors that vLLM raises when it starts, as one line about the recipe."""

from __future__ import annotations

from rlhf_megatron.errors import RolloutError
from rlhf_megatron.untrusted import shown


class MemoryTaken(RolloutError):
    """Memory that another process took or gave back as vLLM started, which it may not do the next time."""

    is_transient = True


def refusal_of(error: ValueError | AssertionError | RuntimeError, max_length: int) -> RolloutError | None:
    """Say what the recipe can do about an error of vLLM's start; None for one of unknown cause, but ValueErrors."""
    text = one_line(error)
    if "Error in memory profiling" in text:
        return MemoryTaken(
            "rollout: another process has given memory of this GPU back while vLLM measured what is free; keep others "
            "off the GPUs of the run, and start it again, or set rollout.kv_cache_gb, for which nothing is measured"
        )
    if "is less than desired" in text or "is less than requested memory" in text:
        return MemoryTaken(
            f"rollout: another process has taken memory that vLLM was to have ({text[:200]}); keep others off the "
            "GPUs of the run, or lower rollout.gpu_memory_utilization or rollout.kv_cache_gb"
        )
    if any(known in text for known in ("Unsupported speculative method", "not support EAGLE3 interface")):
        return RolloutError(
            f"rollout.speculative.method: vLLM has no model that drafts for this one ({text[:200]}); use suffix"
        )
    return RolloutError(_settings_refused(text, max_length)) if isinstance(error, ValueError) else None


def _settings_refused(text: str, max_length: int) -> str:
    if "max seq len" in text or "memory for the cache blocks" in text:
        return (
            f"the KV cache would not hold one sequence of {max_length} tokens; raise rollout.kv_cache_gb or "
            "rollout.gpu_memory_utilization, or lower data.max_prompt_length and rollout.max_response_length"
        )
    if "derived max_model_len" in text:
        return (
            f"data.max_prompt_length and rollout.max_response_length add up to {max_length} tokens, more than the "
            "max_position_embeddings of the model's config.json; lower them"
        )
    return f"rollout: vLLM refuses these settings: {text}"


def one_line(error: Exception) -> str:
    """Return the text of an error of a library as one line of bounded length."""
    details = getattr(error, "errors", None)  # pydantic's ValidationError, whose own text has many lines
    text = "; ".join(str(detail["msg"]) for detail in details()) if callable(details) else str(error)
    return shown(" ".join(text.split()), 500)
