"""Records what vLLM's own loader of a model does with each checkpoint tensor, on any tensor rank, without weights.

The model is built on the meta device, so nothing of its size is allocated. A process that has no engine yet records any
rank's share, whatever torch.distributed is to it: vLLM's group objects are stand-ins that know sizes and ranks alone.
No function of vLLM is replaced but the two that could not do their work on meta.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.compat.torch import preserved_threads
from rlhf_megatron.rollout.engine import RolloutError
from rlhf_megatron.rollout.vllm.copy_trace import CopyRecorder, StridedCopy
from rlhf_megatron.rollout.vllm.random_state import preserved_random_state
from rlhf_megatron.untrusted import shown

Shapes = dict[str, tuple[int, ...]]
# The groups of vLLM's parallel_state, by version, that all tensor ranks of a replica are in; others are of one rank.
_TENSOR_GROUPS = ("_WORLD", "_TP", "_ETP", "_EP", "_EPLB")
_OTHER_GROUPS = ("_INNER_DP_WORLD", "_ENGRAM_DP", "_DCP", "_PCP", "_PP", "_DP")


@dataclasses.dataclass(frozen=True)
class LoadTrace:
    """What a loader does with a checkpoint on one rank.

    Attributes:
        copies: every copy, in the loader's order.
        shapes: of the engine's parameters on this rank.
        problems: one line for each parameter that is not a plain copy of checkpoint tensors: its values are computed,
            written from elsewhere, cast on the way, or come from nowhere.
    """

    copies: list[StridedCopy]
    shapes: Shapes
    problems: list[str]


def trace_rank(
    folder: str | Path, shapes: Mapping[str, tuple[int, ...]], tensor: int, rank: int, expert_parallel: bool, dtype: str
) -> LoadTrace:
    """Trace tensor rank `rank` of `tensor` in this process, which has no engine yet; see `prepare_environment`.

    Args:
        folder: of config.json.
        shapes: of the checkpoint's tensors by name.
        expert_parallel: whether each rank holds some experts whole instead of a part of each.
        dtype: of checkpoint and parameters, a name such as "bfloat16".

    Raises:
        RolloutError: vLLM cannot build the model here; some need a GPU for it.
    """
    if not torch.cuda.is_available():
        from rlhf_megatron.compat import vllm_cpu

        vllm_cpu.install()
    from vllm.engine.arg_utils import EngineArgs

    backend = {"moe_backend": "triton"} if torch.cuda.is_available() else {}  # as the engine has it
    try:
        with preserved_random_state(), preserved_threads():
            config = EngineArgs(
                model=str(folder),
                dtype=dtype,
                skip_tokenizer_init=True,
                enforce_eager=True,
                load_format="dummy",
                **backend,
            ).create_engine_config()
            with _as_rank(config, tensor, rank, expert_parallel):
                return trace_model(build_on_meta(config), shapes, getattr(torch, dtype))
    except (ValueError, NotImplementedError, RuntimeError) as error:
        reason = shown(str(error).strip().partition("\n")[0], 300)
        raise RolloutError(f"{folder}: vLLM cannot build this model without its weights: {reason}") from error


def build_on_meta(config: Any) -> torch.nn.Module:
    """Build the model of vLLM's `VllmConfig`, which must be its current one, with parameters that hold nothing."""
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    dtype = set_default_torch_dtype(config.model_config.dtype)
    with _own_rotary_modules(), _expert_map_on_host(), dtype, torch.device("meta"):
        model: torch.nn.Module = initialize_model(config)
    return model


@torch.no_grad()
def trace_model(model: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> LoadTrace:
    """Trace `load_weights` of a model of vLLM's, on whatever device it is; its parameters stay as they are."""
    probes = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    parameters = _loadable(model)
    with CopyRecorder(probes, parameters) as recorder:
        model.load_weights(iter(probes.items()))  # type: ignore[operator]
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
    for cast in sorted(recorder.casts):
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


@contextlib.contextmanager
def _as_rank(config: Any, tensor: int, rank: int, expert_parallel: bool) -> Iterator[None]:
    """Have vLLM take this process for rank `rank` of `tensor` ranks, which cannot communicate."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    config.parallel_config.tensor_parallel_size = tensor
    config.parallel_config.enable_expert_parallel = expert_parallel
    whole, alone = _group(tensor, rank), _group(1, 0)
    own = {name: whole if name in _TENSOR_GROUPS else alone for name in (*_TENSOR_GROUPS, *_OTHER_GROUPS)}
    before = {name: getattr(parallel_state, name) for name in own if hasattr(parallel_state, name)}
    try:
        for name in before:
            setattr(parallel_state, name, own[name])
        with set_current_vllm_config(config):
            yield
    finally:
        for name, group in before.items():
            setattr(parallel_state, name, group)


class _SizeAndRank:
    """In place of a process group of torch's."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        """Number of ranks."""
        return self._size

    def rank(self) -> int:
        """This process's."""
        return self._rank


def _group(size: int, rank: int) -> Any:
    """Make one of vLLM's groups that knows its size, and has nothing to communicate by."""
    from vllm.distributed.parallel_state import GroupCoordinator

    group: Any = object.__new__(GroupCoordinator)
    group.world_size, group.ranks, group.rank, group.rank_in_group = size, list(range(size)), rank, rank
    group.local_rank, group.unique_name = 0, "of no process"
    group.cpu_group = group.device_group = _SizeAndRank(size, rank)
    group.device_communicator = group.mq_broadcaster = None
    return group


@contextlib.contextmanager
def _own_rotary_modules() -> Iterator[None]:
    """vLLM caches rotary embeddings for the whole process: those made on meta must not reach a real engine."""
    from vllm.model_executor.layers import rotary_embedding

    cached = dict(rotary_embedding._ROPE_DICT)
    rotary_embedding._ROPE_DICT.clear()
    try:
        yield
    finally:
        rotary_embedding._ROPE_DICT.clear()
        rotary_embedding._ROPE_DICT.update(cached)


@contextlib.contextmanager
def _expert_map_on_host() -> Iterator[None]:
    """The table of a rank's experts is read by `.item()` while weights are loaded, so it needs values also on meta."""
    from vllm.model_executor.layers.fused_moe import expert_map_manager

    original = expert_map_manager.determine_expert_map

    def on_host(*arguments: Any, **named: Any) -> Any:
        with torch.device("cpu"):
            return original(*arguments, **named)

    expert_map_manager.determine_expert_map = on_host
    try:
        yield
    finally:
        expert_map_manager.determine_expert_map = original
