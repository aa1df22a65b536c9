"""Reading of vLLM's private attributes, on the way from its LLMEngine in this process to scheduler, cache and model.

The names and the versions that have them are in ``names``; a version that is none of these lets a start go on with a
warning, and what it lacks raises ``UnknownVllm``.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rlhf_megatron.compat.patches import NONE_FOUND, replacement
from rlhf_megatron.compat.vllm.logprobs import SampledLogprobs
from rlhf_megatron.compat.vllm.names import KNOWN, PACKAGES
from rlhf_megatron.compat.vllm.paused_cache import HostCopy, cache_rows, tensors_of, used_blocks

_LOADED_BUFFERS = (".layer_scalar",)  # Gemma 4's; other buffers follow from the config


class UnknownVllm(RuntimeError):
    """A private attribute that this version of vLLM does not have."""


@contextlib.contextmanager
def _known_names() -> Iterator[None]:
    """Say of an attribute that is not there which version lacks it, and which ones are known to have it."""
    try:
        yield
    except AttributeError as error:
        raise UnknownVllm(
            f"{installed_version()} has changed what rlhf_megatron reads of it ({error}); "
            f"install vLLM {KNOWN['first']} to {KNOWN['last']}"
        ) from error


def installed_version() -> str:
    """Return the installed distribution of vLLM and its version."""
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{package} {importlib.metadata.version(package)}"
    return "vLLM"


@replacement(
    *PACKAGES,
    **KNOWN,
    why="vLLM shares rotary modules among all models of a process, some of which change theirs",
    upstream=NONE_FOUND,
)
@contextlib.contextmanager
def own_rotary_modules() -> Iterator[None]:
    """Share no rotary embedding made inside with a model made outside.

    vLLM caches them for the process, and some of its models change theirs: after one of ERNIE 4.5 another model with
    heads of that size would turn pairs of neighbours too. None that tracing made on meta may be computed with.
    """
    from vllm.model_executor.layers import rotary_embedding

    cached = dict(rotary_embedding._ROPE_DICT)
    rotary_embedding._ROPE_DICT.clear()
    try:
        yield
    finally:
        rotary_embedding._ROPE_DICT.clear()
        rotary_embedding._ROPE_DICT.update(cached)


def model(engine: Any) -> torch.nn.Module:
    """Return the model of an LLMEngine on this rank."""
    runner = model_runner(engine)
    with _known_names():
        module: torch.nn.Module = runner.get_model()  # the one name that both of vLLM's model runners have
    return module


def draft_model(engine: Any) -> torch.nn.Module | None:
    """Return the model that drafts for an LLMEngine's on this rank; None where there is none."""
    runner = model_runner(engine)
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)  # V1's and V2's name
    drafting = getattr(drafter, "model", None)
    return drafting if isinstance(drafting, torch.nn.Module) else None


def loaded_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, and those buffers that vLLM's loaders fill from a checkpoint, with their names."""
    yield from module.named_parameters()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name.endswith(_LOADED_BUFFERS))


def model_runner(engine: Any) -> Any:
    """Return the model runner of an LLMEngine on this rank."""
    with _known_names():
        return engine.model_executor.driver_worker.worker.model_runner


def scheduler(engine: Any) -> Any:
    """Return vLLM's own scheduler."""
    with _known_names():
        return engine.engine_core.engine_core.scheduler


def request_states(engine: Any) -> dict[str, Any]:
    """Return what vLLM's output processor has of each request, by vLLM's own names."""
    with _known_names():
        states: dict[str, Any] = engine.output_processor.request_states
    return states


def scheduling_limits(engine: Any) -> tuple[int, int, bool]:
    """Return (most sequences at a time, tokens of a cache block, whether prefixes are cached)."""
    with _known_names():
        config = engine.vllm_config
        return (
            config.scheduler_config.max_num_seqs,
            config.cache_config.block_size,
            bool(config.cache_config.enable_prefix_caching),
        )


def sampled_tokens(engine: Any) -> dict[str, int]:
    """Return how many tokens each request has sampled that is in the cache, by vLLM's own names, in its order."""
    with _known_names():
        return {request.request_id: request.num_output_tokens for request in scheduler(engine).running}


def cached_tokens(engine: Any, names: Iterable[str]) -> dict[str, int]:
    """Return how many tokens were found in the cache of those requests that run and have sampled one."""
    states = request_states(engine)
    with _known_names():
        of_names = [(name, states[name]) for name in names if name in states]
        return {name: state.num_cached_tokens for name, state in of_names if not state.is_prefilling}


def free_cache_tokens(engine: Any) -> float:
    """Return for how many tokens the cache has room; infinite in a version that does not tell, which then preempts."""
    try:
        manager = scheduler(engine).kv_cache_manager
        blocks, layouts = manager.block_pool.get_num_free_blocks(), len(manager.kv_cache_config.kv_cache_groups)
    except AttributeError:
        return math.inf
    return float(blocks * engine.vllm_config.cache_config.block_size / layouts)


def checked_request(engine: Any, prompt: Mapping[str, Any], parameters: Any) -> Any:
    """Return a request that vLLM has checked and completed, and that is not added; raise what vLLM raises."""
    with _known_names():
        check = engine.input_processor.process_inputs
    return check("checked", prompt, parameters, supported_tasks=engine.get_supported_tasks())


def add_like(
    engine: Any, checked: Any, request_id: str, token_ids: Sequence[int], seed: int, max_tokens: int, salt: str
) -> str:
    """Add a request that differs from a ``checked`` one in these alone; return vLLM's own name of it.

    To check and copy each of many short requests takes longer than to generate some of their tokens.
    """
    parameters = copy.copy(checked.sampling_params)
    parameters.seed, parameters.max_tokens = seed, max_tokens
    request = copy.copy(checked)
    request.request_id, request.prompt_token_ids, request.sampling_params = request_id, token_ids, parameters
    request.cache_salt, request.arrival_time = salt, time.time()
    name: str = engine.add_request(request_id, request, parameters)
    return name


def keep_logprobs_as_numbers(engine: Any, request_id: str) -> None:
    """Have a request collect the logprobs of sampled tokens alone; see ``logprobs``."""
    request_states(engine)[request_id].logprobs_processor = SampledLogprobs()


def partial_outputs(engine: Any) -> Iterator[tuple[str, Any]]:
    """Yield (vLLM's own name, output of what it has sampled) of each request, in the order that they were added."""
    from vllm.v1.engine import FinishReason

    for name, state in list(request_states(engine).items()):
        with _known_names():
            make_output = state.make_request_output
        yield name, make_output([], None, FinishReason.ABORT, None)


def abort(engine: Any, request_id: str) -> None:
    """Abort a request by the name that we gave it."""
    engine.abort_request([request_id])


def abort_all(engine: Any) -> Iterator[Any]:
    """Abort each request, and yield vLLM's output of what it has sampled.

    One at a time: of several, vLLM frees the cache blocks in an order that differs between the ranks of a replica, and
    their schedules must be the same (https://github.com/vllm-project/vllm/pull/12071).
    """
    for name, output in partial_outputs(engine):
        with _known_names():
            request_id = request_states(engine)[name].external_req_id
        abort(engine, request_id)
        yield output


def pause(engine: Any) -> None:
    """Have vLLM plan no further step, whatever requests it has."""
    from vllm.v1.core.sched.interface import PauseState

    with _known_names():
        scheduler(engine).set_pause_state(PauseState.PAUSED_ALL)


def resume(engine: Any) -> None:
    """Have vLLM plan steps again."""
    from vllm.v1.core.sched.interface import PauseState

    with _known_names():
        scheduler(engine).set_pause_state(PauseState.UNPAUSED)


def salt_waiting(engine: Any, salt: str) -> None:
    """Give requests that have nothing in the cache (they wait, or were preempted) a salt of their blocks' hashes."""
    with _known_names():
        for request in [each for each in scheduler(engine).waiting if not each.num_computed_tokens]:
            request.cache_salt = salt
            request.block_hashes.clear()
            request.update_block_hashes()


def drain(engine: Any) -> Iterator[Any]:
    """Wait for what vLLM has begun ahead (asynchronous scheduling), which reads weights that are about to change; yield
    its outputs. While requests run, it is to be paused."""
    with _known_names():
        begun_ahead = engine.engine_core.engine_core.batch_queue  # None where it does not schedule ahead
    while begun_ahead:
        yield from engine.step()


@replacement(
    *PACKAGES,
    **KNOWN,
    why="vLLM's sleep drops the KV cache, with the requests that are paused in it, or copies all of it to the host",
    upstream="https://github.com/vllm-project/vllm/pull/11743",
)
def sleep_with_cache(engine: Any, host: HostCopy) -> None:
    """Put vLLM to sleep as ``LLM.sleep(level=2)`` does; what is in use of the KV cache is on the host then.

    vLLM's own offloads weights and drops the cache. Requests stay, and so do their block tables, which one of its model
    runners has in the same memory. ``host.restore`` brings back what was copied, into the cache when that is awake.
    """
    from vllm.device_allocator import get_mem_allocator_instance
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend

    def suspend(backend: Any, level: int = 1) -> None:
        allocator = get_mem_allocator_instance()
        known = allocator.pointer_to_data.items()
        allocations = [(address, data.handle[1]) for address, data in known if data.tag == "kv_cache"]
        pool, caches = scheduler(engine).kv_cache_manager.block_pool, tensors_of(model_runner(engine).kv_caches)
        device = torch.device("cuda", torch.cuda.current_device())
        host.save(cache_rows(allocations, caches, len(pool.blocks), used_blocks(pool), device))
        allocator.sleep(offload_tags=())

    original = CuMemBackend.suspend
    CuMemBackend.suspend = suspend
    try:
        engine.model_executor.sleep(2)
    finally:
        CuMemBackend.suspend = original


@contextlib.contextmanager
def cache_stays(engine: Any) -> Iterator[None]:
    """Have what comes back of the KV cache inside stay: the older of vLLM's model runners clears one in 8 bits.

    It sets the cache's scales too, which as buffers come back with the weights.
    """
    runner = model_runner(engine)
    if hasattr(runner, "init_fp8_kv_scales"):  # up to vLLM 0.25
        runner.init_fp8_kv_scales = lambda: None
    try:
        yield
    finally:
        vars(runner).pop("init_fp8_kv_scales", None)


def tensor_group() -> dist.ProcessGroup:
    """Return the group, of CPU tensors, of the ranks that vLLM has made a tensor-parallel replica of."""
    from vllm.distributed.parallel_state import get_tp_group

    with _known_names():
        group: dist.ProcessGroup = get_tp_group().cpu_group
    return group


def shutdown(engine: Any) -> None:
    """End an LLMEngine, and with it torch.distributed for the whole process."""
    with _known_names():
        engine.engine_core.shutdown()
