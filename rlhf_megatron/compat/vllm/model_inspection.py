"""The look that vLLM takes at a model's class before it makes an engine."""

from __future__ import annotations

from rlhf_megatron.compat.patches import patch
from rlhf_megatron.compat.vllm.names import KNOWN, PACKAGES


@patch(
    *PACKAGES,
    **KNOWN,
    why="vLLM inspects a model's class in a process of its own, so that CUDA stays untouched, and caches what it saw; "
    "where it has no cache that process imports all of vLLM: ten seconds on every rank, whose CUDA is in use already",
    upstream="https://github.com/vllm-project/vllm/issues/19317",
)
def inspect_models_in_this_process() -> None:
    """Inspect models in this process."""
    import vllm.model_executor.models.registry as registry

    registry._run_in_subprocess = lambda look: look()
