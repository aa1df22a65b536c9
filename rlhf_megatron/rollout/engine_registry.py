"""Engines by name. This is the one place that knows their classes: everything else is typed on ``RolloutEngine``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from rlhf_megatron.compat.vllm.answer_parsers import ToolParser, UnusableParser, reasoning_parser, tool_parser
from rlhf_megatron.recipe import RolloutSection
from rlhf_megatron.rollout.engine import RolloutEngine
from rlhf_megatron.rollout.vllm.engine_arguments import speculative_config
from rlhf_megatron.rollout.vllm.vllm_engine import VllmEngine
from rlhf_megatron.rollout.vllm.weight_loading import trace_rank

__all__ = [
    "ENGINES",
    "ToolParser",
    "UnusableParser",
    "make_engine",
    "reasoning_parser",
    "speculative_config",
    "tool_parser",
    "trace_rank",
]

ENGINES: dict[str, Callable[..., RolloutEngine]] = {"vllm": VllmEngine}
"""Called as ``make_engine`` is, without the name."""


def make_engine(
    model_path: str,
    section: RolloutSection,
    dtype: str,
    max_prompt_length: int,
    seed: int,
    load_format: str = "dummy",
    shared: Mapping[str, Tensor] | None = None,
    records_experts: bool = False,
    language: Mapping[str, Any] | None = None,
    draft_model: str | None = None,
    name: str = "vllm",
) -> RolloutEngine:
    """Make this rank's engine of a replica; collective over the whole world.

    Args:
        model_path: a folder with at least a config.json.
        dtype: of the weights, a name such as "bfloat16".
        max_prompt_length: in tokens.
        seed: of what the engine draws beside the requests' own seeds.
        load_format: "dummy" for weights that ``parameters`` takes later, "auto" for those of ``model_path``.
        language: config of the language model to make, where config.json is that of a model around it.
        draft_model: folder with the config.json of the head that drafts (``rollout.speculative.method`` eagle3), in
            EAGLE-3's published form.
        records_experts: completions say which experts each token reached.
        shared: with dummy weights, tensors that parameters of these names are to be views of; they must never move.

    Raises:
        RolloutError: config.json or the recipe's rollout section is not right, or there is too little memory.
    """
    make = ENGINES[name]
    return make(
        model_path, section, dtype, max_prompt_length, seed, load_format, shared, records_experts, language, draft_model
    )
