"""Makes megatron-core 0.19 run on machines without a GPU. Nothing here is used when CUDA is present.

Megatron-core asks ``torch.cuda`` for devices, streams and random states in some forty places, also when all of its
tensors live on the CPU. ``install`` gives the loaded ``megatron.core`` modules a stand-in for the *name* ``torch``
whose ``cuda`` part answers for the CPU. The real torch module stays as it is, except that ``Tensor.cuda()`` returns the
tensor itself and that ``Tensor.type()`` answers Megatron's optimizer, which compares names, with the CUDA spelling.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from rlhf_megatron.compat.patches import NONE_FOUND, patch

_CPU = torch.device("cpu")

# Modules that import torch under that name and are loaded lazily by others; loading them first lets one pass patch all.
_MODULES = (
    "parallel_state",
    "tensor_parallel.random",
    "transformer.dot_product_attention",
    "models.gpt",
    "pipeline_parallel.schedules",
    "pipeline_parallel.p2p_communication",
    "distributed.finalize_model_grads",
    "optimizer.distrib_optimizer",
    "optimizer.clip_grads",
    "optimizer.grad_scaler",
    "dist_checkpointing.strategies.fully_parallel",
    "dist_checkpointing.strategies.torch",
    "dist_checkpointing.strategies.filesystem_async",
    "dist_checkpointing.strategies.async_utils",
    "dist_checkpointing.strategies.state_dict_saver",
    "dist_checkpointing.exchange_utils",
    "timers",
    "utils",
    "rerun_state_machine",
)

# The only places that compare ``param.type()`` with a CUDA name.
_TYPE_COMPARING_MODULES = (
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.optimizer.clip_grads",
)

_FACTORIES = (
    *("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "as_tensor", "linspace", "eye"),
    *("empty_like", "zeros_like", "ones_like", "full_like"),
)


class _NoStream:
    """Stand-in for a CUDA stream or event where everything runs in order anyway."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        answers: dict[str, Any] = {"query": True, "elapsed_time": 0.0, "record_event": _NoStream}
        answer = answers.get(name)
        return lambda *_, **__: answer() if callable(answer) else answer


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def made_on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return made_on_cpu


def _cuda_answering_for_cpu() -> types.ModuleType:
    class CudaModule(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(torch.cuda, name)

    cuda: Any = CudaModule("torch.cuda")

    def answer(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value() if callable(value) else value

    for name in ("synchronize", "empty_cache", "set_device", "ipc_collect"):
        setattr(cuda, name, answer(None))
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        setattr(cuda, name, answer(0))
    cuda.memory_stats = answer(dict)
    cuda.current_device = answer(_CPU)  # every caller passes it on as ``device=``
    cuda.is_available = cuda.is_current_stream_capturing = answer(False)
    cuda.current_stream = cuda.default_stream = answer(_NoStream)
    cuda.Stream = cuda.Event = _NoStream
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.nvtx = types.SimpleNamespace(
        range_push=answer(None), range_pop=answer(None), range=lambda *_: contextlib.nullcontext()
    )
    # The generator of the "device" is the CPU's default one.
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.random = types.SimpleNamespace(get_rng_state=cuda.get_rng_state, set_rng_state=cuda.set_rng_state)
    cuda.default_generators = (torch.default_generator,)
    return cuda


def _torch_answering_for_cpu() -> types.ModuleType:
    class TorchModule(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    stand_in: Any = TorchModule("torch")
    for name in _FACTORIES:
        setattr(stand_in, name, _on_cpu(getattr(torch, name)))
    stand_in.cuda = _cuda_answering_for_cpu()
    return stand_in


@contextlib.contextmanager
def _fork(self: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """Do ``CudaRNGStatesTracker.fork`` on the CPU generator; the original takes each use of it for a mistake and
    warns."""
    if name not in self.states_:
        raise KeyError(f"random state {name} was not added")
    before = torch.get_rng_state()
    torch.set_rng_state(self.states_[name])
    try:
        yield
    finally:
        self.states_[name] = torch.get_rng_state()
        torch.set_rng_state(before)


def _patch_tensor_methods() -> None:
    original_type = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original_type(self, *args, **kwargs)
        asked_by_optimizer = sys._getframe(1).f_globals.get("__name__") in _TYPE_COMPARING_MODULES
        if isinstance(result, str) and not args and not kwargs and asked_by_optimizer:
            return result.replace("torch.", "torch.cuda.", 1) if not result.startswith("torch.cuda") else result
        return result

    torch.Tensor.type = type_name  # type: ignore[method-assign,assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign,assignment]


def _to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Do ``maybe_move_tensor_to_cpu``, leaving a tensor that is there already as it is where numbers are wanted."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _patch_uneven_collectives() -> None:
    """Patch collectives: gloo gathers and scatters equal parts only; the tokens of experts that are cut come in unequal
    ones."""
    mappings: Any = importlib.import_module("megatron.core.tensor_parallel.mappings")
    even_gather, even_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather(mine: torch.Tensor, group: Any, sizes: list[int] | None = None, buffered: bool = False) -> Any:
        if sizes is None or group.size() == 1:
            return even_gather(mine, group, sizes, buffered)
        parts = [mine.new_empty(size, *mine.shape[1:]) for size in sizes]
        parts[group.rank()].copy_(mine)
        for rank, part in enumerate(parts):
            dist.broadcast(part, group=group, group_src=rank)
        return torch.cat(parts)

    def scatter(all_of: torch.Tensor, group: Any, sizes: list[int] | None = None, buffered: bool = False) -> Any:
        if sizes is None or group.size() == 1:
            return even_scatter(all_of, group, sizes, buffered)
        total = all_of.clone()
        dist.all_reduce(total, group=group)
        return total.split(sizes)[group.rank()].contiguous()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather, scatter


def install() -> None:
    """Patch every ``megatron.core`` module for this process; does nothing where CUDA is present. Idempotent."""
    if not torch.cuda.is_available():
        answer_for_cpu()


@patch(
    "megatron-core",
    first="0.19.2",
    last="0.19.2",
    why="megatron-core asks torch.cuda for devices and streams",
    upstream=NONE_FOUND,
)
def answer_for_cpu() -> None:
    """Give the loaded modules a stand-in for torch, and gloo what it lacks."""
    for name in _MODULES:
        importlib.import_module("megatron.core." + name)
    stand_in = _torch_answering_for_cpu()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "__dict__", {}).get("torch") is torch:
            module.torch = stand_in  # type: ignore[attr-defined]
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    random.CudaRNGStatesTracker.fork = _fork
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher.maybe_move_tensor_to_cpu = _to_cpu
    _patch_uneven_collectives()
    _patch_tensor_methods()
