"""The model runner that vLLM takes for mixtures of experts."""

from __future__ import annotations

from typing import Any

from rlhf_megatron.compat.patches import patch


@patch(
    "vllm",
    first="0.25.1",
    last="0.33.0",
    why="vLLM 0.25 takes its older runner for most mixtures, which draws for each seeded request by kernels of its own",
    upstream="https://github.com/vllm-project/vllm/issues/41286",
)
def take_newer_runner() -> None:
    """Have mixtures run by the newer runner, as dense models are; what it lacks still falls back to the older one.

    ``VLLM_USE_V2_MODEL_RUNNER`` overrides this. Later versions choose by features alone and are left as they are.
    """
    from vllm.config import VllmConfig

    of_vllm = getattr(VllmConfig, "_is_default_v2_model_runner_model", None)
    if of_vllm is None:
        return

    def is_default(config: Any) -> bool:
        model = config.model_config
        mixture = model is not None and model.is_moe and model.runner_type == "generate"
        return bool(of_vllm(config)) or (mixture and not model.is_hybrid and not model.is_attention_free)

    VllmConfig._is_default_v2_model_runner_model = is_default
