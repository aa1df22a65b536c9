"""Starting vLLM inside the trainer's process: what stays the trainer's, and refusals in the recipe's words."""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.compat.torch import preserved_threads
from rlhf_megatron.compat.vllm import (
    activation_type,
    compile_cache,
    draft_models,
    internals,
    language_models,
    model_inspection,
    model_runner,
    newer_speculation,
    shared_weights,
)
from rlhf_megatron.compat.vllm.names import check_version
from rlhf_megatron.errors import RolloutError
from rlhf_megatron.recipe import RolloutSection
from rlhf_megatron.rollout.random_state import preserved_random_state
from rlhf_megatron.rollout.vllm.refusals import refusal_of


@contextlib.contextmanager
def starting(on_gpu: bool) -> Iterator[None]:
    """Keep what belongs to the trainer while vLLM starts: random state, warnings and, on a CPU, the thread count."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(preserved_random_state())
        stack.enter_context(_sockets_in_a_folder())
        # vLLM's own use of torch's older names, which nobody here can change.
        stack.enter_context(warnings.catch_warnings(action="ignore", category=FutureWarning))
        check_version()
        if not on_gpu:
            from rlhf_megatron.compat.vllm import cpu

            cpu.install()
            stack.enter_context(preserved_threads())
        else:
            model_runner.take_newer_runner()
            newer_speculation.take_drafts_of_text()
            newer_speculation.capture_drafting_steps()
            compile_cache.cache_by_device()
        model_inspection.inspect_models_in_this_process()
        language_models.register_language_models()
        activation_type.learn_activations_as_weights()
        yield


@contextlib.contextmanager
def _sockets_in_a_folder() -> Iterator[None]:
    """Have a replica's ranks connect by sockets in a folder that goes with the block; vLLM leaves files behind."""
    variable = "VLLM_RPC_BASE_PATH"
    before = os.environ.get(variable)
    with tempfile.TemporaryDirectory(prefix="vllm-", dir=before) as folder:
        os.environ[variable] = folder
        try:
            yield
        finally:
            del os.environ[variable]
            if before is not None:
                os.environ[variable] = before


def make_llm(arguments: dict[str, Any], section: RolloutSection, shared: Mapping[str, Tensor], max_length: int) -> Any:
    """Make vLLM's LLM, with parameters that are views of those ``shared``."""
    import vllm.entrypoints.llm  # noqa: F401  (a missing dependency is hidden by ``from vllm import LLM``)
    from vllm import LLM

    quantization = section.quantization
    if quantization:
        from rlhf_megatron.compat.vllm import fp8_layers

        fp8_layers.install()
        arguments["quantization"] = fp8_layers.method_name(quantization)
    drafts = section.speculative is not None and section.speculative.has_draft_model
    if drafts:
        draft_models.heads_have_output_layers()
    offered = shared_weights.offered(shared) if shared or quantization or drafts else contextlib.nullcontext()
    with offered, internals.own_rotary_modules():
        try:
            llm = LLM(**arguments)
        except RolloutError:
            raise
        except (ValueError, AssertionError, RuntimeError) as error:
            refusal = refusal_of(error, max_length)
            if refusal is None:
                raise
            raise refusal from error
    if quantization:
        tell_of_experts_in_full(internals.model(llm.llm_engine))
    return llm


def tell_of_experts_in_full(model: torch.nn.Module) -> None:
    """Warn, in one line, where a model of vLLM's that is to be quantized has experts that are not."""
    from rlhf_megatron.compat.vllm import fp8_layers

    if reasons := fp8_layers.left_in_full(model):
        warnings.warn(
            f"rollout.quantization: the experts of {len(reasons)} layers stay as they are: {reasons[0]}",
            stacklevel=2,
        )
