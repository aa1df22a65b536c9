"""Language models that vLLM has inside models of images and text alone."""

from __future__ import annotations

from typing import Any

from rlhf_megatron.compat.patches import patch
from rlhf_megatron.compat.vllm.names import KNOWN, PACKAGES

_WRAPPERS = {
    "Qwen3_5ForCausalLM": "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeForConditionalGeneration",
}


@patch(
    *PACKAGES,
    **KNOWN,
    why="vLLM 0.25.1 builds Qwen3.5's language model only with the tower of images around it, although it has the "
    "class, which lacks what vLLM asks of a model with delta nets",
    upstream="https://github.com/vllm-project/vllm/pull/36289",
)
def register_language_models() -> None:
    """Register the language models of which the installed vLLM has the class but not the name."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models import config as model_configs

    for name, wrapper in _WRAPPERS.items():
        if name in ModelRegistry.models:
            continue
        ModelRegistry.register_model(name, _with_state(name, wrapper))
        configs = model_configs.MODELS_CONFIG_MAP
        configs[name] = configs[wrapper]


def _with_state(name: str, wrapper: str) -> type:
    """Return the class ``name`` with the state of delta nets that ``wrapper`` has, and positions of text alone."""
    import torch
    from vllm.model_executor.models import qwen3_5
    from vllm.model_executor.models.interfaces import IsHybrid, SupportsMRoPE

    outer = getattr(qwen3_5, wrapper)

    def positions(_: Any, input_tokens: list[int], *__: Any, **___: Any) -> tuple[torch.Tensor, int]:
        return torch.arange(len(input_tokens)).expand(3, -1), 0

    state: dict[str, Any] = {
        each: classmethod(getattr(outer, each).__func__)
        for each in (
            "get_mamba_state_dtype_from_config",
            "get_mamba_state_shape_from_config",
            "get_mamba_state_copy_func",
        )
    }
    parts = state | {"get_mrope_input_positions": positions, "__module__": __name__}
    return type(name, (getattr(qwen3_5, name), IsHybrid, SupportsMRoPE), parts)
