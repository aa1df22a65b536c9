"""Trace of what vLLM's own loader of a model does with each checkpoint tensor, on any tensor rank, without weights.

The model is built on the meta device, so nothing of its size is allocated (compat.vllm.load_tracing). A process that
has no engine yet records any rank's share, whatever torch.distributed is to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.compat.torch import preserved_threads
from rlhf_megatron.compat.vllm import activation_type, language_models, load_tracing, model_inspection
from rlhf_megatron.errors import RolloutError
from rlhf_megatron.rollout.copy_trace import CopyRecorder, LoadTrace
from rlhf_megatron.rollout.random_state import preserved_random_state
from rlhf_megatron.rollout.vllm.model_config import config_arguments
from rlhf_megatron.untrusted import shown

Stored = Callable[[Iterable[tuple[str, Tensor]]], Iterator[tuple[str, Tensor]]]
_EXACT_CASTS = {f"{kind}->{torch.float32}" for kind in (torch.bfloat16, torch.float16)}


def trace_rank(
    folder: str | Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensor: int,
    rank: int,
    expert_parallel: bool,
    dtype: str,
    float32: Collection[str] = (),
    stored: Stored = iter,
    language: Mapping[str, Any] | None = None,
    draft: Mapping[str, Any] | None = None,
) -> LoadTrace:
    """Trace tensor rank ``rank`` of ``tensor`` in this process, which has no engine yet; see ``prepare_environment``.

    Args:
        draft: vLLM's speculative_config, where the model is the one that drafts for that of ``folder``.
        folder: of config.json.
        shapes: of the model's tensors by name.
        stored: makes the checkpoint's tensors of the model's.
        expert_parallel: whether each rank holds some experts whole instead of a part of each.
        dtype: of checkpoint and parameters, a name such as "bfloat16".
        float32: tensors that are of that type in any model.
        language: see ``config_arguments``.

    Raises:
        RolloutError: vLLM cannot build the model here; some need a GPU for it.
    """
    if not torch.cuda.is_available():
        from rlhf_megatron.compat.vllm import cpu

        cpu.install()
    model_inspection.inspect_models_in_this_process()
    language_models.register_language_models()
    activation_type.learn_activations_as_weights()
    from vllm.engine.arg_utils import EngineArgs

    backend: dict[str, Any] = {"moe_backend": "triton"} if torch.cuda.is_available() else {}  # as the engine has it
    if draft is not None:
        backend["speculative_config"] = dict(draft)
    try:
        with preserved_random_state(), preserved_threads():
            config = EngineArgs(
                model=str(folder),
                dtype=dtype,
                skip_tokenizer_init=True,
                enforce_eager=True,
                load_format="dummy",
                **backend,
                **config_arguments(folder, language),
            ).create_engine_config()
            with load_tracing.as_rank(config, tensor, rank, expert_parallel):
                model = load_tracing.build_on_meta(config, drafts=draft is not None)
                return trace_model(model, shapes, getattr(torch, dtype), float32, stored)
    except Exception as error:  # whatever vLLM's files of models raise where they do not know a config
        reason = shown(f"{type(error).__name__}: {error}".strip().partition("\n")[0], 300)
        raise RolloutError(f"{folder}: vLLM cannot build this model without its weights: {reason}") from error


@torch.no_grad()
def trace_model(
    model: torch.nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    float32: Collection[str] = (),
    stored: Stored = iter,
) -> LoadTrace:
    """Trace ``load_weights`` of a model of vLLM's, on whatever device it is; its parameters stay as they are."""
    probes = {
        name: torch.empty(shape, dtype=torch.float32 if name in float32 else dtype, device="meta")
        for name, shape in shapes.items()
    }
    parameters = _loadable(model)
    with CopyRecorder(probes, parameters) as recorder:
        model.load_weights(stored(probes.items()))  # type: ignore[operator]
    return LoadTrace(
        copies=recorder.copies,
        shapes={name: tuple(parameter.shape) for name, parameter in parameters.items()},
        problems=[*_problems(recorder, {name for name, _ in model.named_parameters()}, parameters)],
    )


def _problems(recorder: CopyRecorder, trained: set[str], parameters: Mapping[str, Tensor]) -> Iterator[str]:
    for name, operation in dict.fromkeys(recorder.computed):
        yield f"{name} is computed ({operation})"
    for name, operation in dict.fromkeys(recorder.constant):
        yield f"{name} is written from no checkpoint tensor ({operation})"
    for cast in sorted(recorder.casts - _EXACT_CASTS):
        yield f"tensors are cast ({cast})"
    written: Counter[str] = Counter()
    for copy in [*recorder.copies, *recorder.fills]:
        written[copy.parameter] += copy.elements
    for name in sorted(trained & parameters.keys()):
        if written[name] != parameters[name].numel():
            yield f"{name} has {parameters[name].numel()} elements, of which the loader writes {written[name]}"


def _loadable(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return parameters, and buffers that a checkpoint may fill; of several names for the same memory the first."""
    by_storage: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "cos_sin_cache" not in name and tensor.numel():
            by_storage.setdefault(tensor.untyped_storage()._cdata, (name, tensor))
    return dict(by_storage.values())
