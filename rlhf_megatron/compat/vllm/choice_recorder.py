"""Recording of the experts that vLLM's routers choose, by the slot of each token in its KV cache.

A choice lives as long as the keys and values of its token: it is there for a prefix that another request computed,
through parts of a prompt, and it is written anew where a request was preempted. Routers write into a buffer by the
token's place in the step, which CUDA graphs can; after the step this goes to the slots.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.compat.patches import replacement
from rlhf_megatron.compat.vllm.names import KNOWN, PACKAGES
from rlhf_megatron.data.expert_choices import ChoiceShape


class ChoiceRecorder:
    """The choices of one rank's engine; every rank of a replica has all of them, since routers are on each."""

    def __init__(self) -> None:
        self._ended: dict[str, Tensor] = {}
        self._scheduler: Any = None
        self._shape: ChoiceShape | None = None

    def bind(self, runner: Any, cache_config: Any, most_tokens: int) -> None:
        """Have the routers of a model runner of vLLM's record; before it captures CUDA graphs.

        Raises:
            RuntimeError: a kernel chooses experts by itself, or no cache keeps all tokens of a row.
        """
        routers = _routers_of(runner.get_model())
        self._shape = ChoiceShape(routers[0].global_num_experts, len(routers), routers[0].top_k)
        self._group, group = _group_of_all_tokens(cache_config)
        self._block_size, self._layer = group.kv_cache_spec.block_size, group.layer_names[0]
        # One slot more, the last, takes what vLLM computes for nobody: its slot is -1.
        slots = cache_config.num_blocks * self._block_size + 1
        self._of_step = self._shape.unknown(most_tokens).to(runner.device)
        self._of_slots = self._shape.unknown(slots).to(runner.device)
        for index, router in enumerate(routers):
            router.set_capture_fn(functools.partial(self._record, index))
        self._execute = runner.execute_model
        self._runner, runner.execute_model = runner, self._execute_model

    def _record(self, index: int, experts: Tensor) -> None:
        rows = min(len(experts), len(self._of_step))
        self._of_step[:rows, index] = experts[:rows]

    def _execute_model(self, scheduled: Any, *arguments: Any, **named: Any) -> Any:
        """Return one step of the runner, and then its tokens' choices to their slots, on the stream that computed
        them."""
        output = self._execute(scheduled, *arguments, **named)
        state = self._runner.execute_model_state
        slots_by_layer = getattr(state, "slot_mappings", None) or getattr(state, "slot_mappings_by_layer", None)
        if slots_by_layer:
            slots = slots_by_layer[self._layer][: scheduled.total_num_scheduled_tokens]
            self._of_slots[slots] = self._of_step[: len(slots)]
        return output

    def follow(self, scheduler: Any) -> None:
        """Keep the choices of requests that end in vLLM's ``scheduler``, before their slots are another's."""
        manager, self._scheduler = scheduler.kv_cache_manager, scheduler
        free = manager.free

        def keep_and_free(request: Any) -> None:
            if request.is_finished():
                self._ended[request.request_id] = self._choices_of(request, manager)
            free(request)

        manager.free = keep_and_free

    def _choices_of(self, request: Any, manager: Any) -> Tensor:
        """Return [tokens, layers, chosen] of what has been computed of a request, but for a token that nobody
        sampled."""
        tokens = max(min(request.num_computed_tokens, request.num_tokens - 1), 0)
        blocks = torch.tensor(manager.get_block_ids(request.request_id)[self._group], dtype=torch.int64)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()[:tokens]
        return self._of_slots[slots.to(self._of_slots.device, non_blocking=True)]

    def so_far(self, name: str) -> Tensor:
        """Return the choices of a request that is in the scheduler, on the host."""
        return self._choices_of(self._scheduler.requests[name], self._scheduler.kv_cache_manager).cpu()

    def take(self, name: str) -> Tensor:
        """Return the choices of a request that has ended, by vLLM's own name of it, on the host."""
        return self._ended.pop(name).cpu()


@replacement(
    *PACKAGES,
    **KNOWN,
    why="vLLM returns the chosen experts by one of its model runners only, another one in each version, and keeps "
    "copies of them on the host",
    upstream="https://github.com/vllm-project/vllm/pull/28284",
)
@contextlib.contextmanager
def recorded() -> Iterator[ChoiceRecorder]:
    """Have an engine that is made inside record its choices from its first step on."""
    from vllm.v1.worker.gpu_worker import Worker

    recorder, original = ChoiceRecorder(), Worker.initialize_from_config

    def initialize_from_config(worker: Any, cache_config: Any) -> None:
        original(worker, cache_config)
        most = worker.vllm_config.scheduler_config.max_num_batched_tokens
        recorder.bind(worker.model_runner, cache_config, most)

    Worker.initialize_from_config = initialize_from_config
    try:
        yield recorder
    finally:
        Worker.initialize_from_config = original


def _routers_of(model: torch.nn.Module) -> list[Any]:
    """Return the routers of a model's layers, in their order."""
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    runners: list[Any] = [module for module in model.modules() if isinstance(module, MoERunner)]
    for runner in runners:
        if runner._quant_method.is_monolithic or not isinstance(runner.router, BaseRouter):
            raise RuntimeError(
                f"vLLM's {type(runner._quant_method).__name__} chooses experts within its kernel, which "
                "algorithm.router_replay cannot see; set it to off"
            )
    if not runners:
        raise RuntimeError("vLLM's model has no routers that algorithm.router_replay could follow; set it to off")
    return [runner.router for runner in runners]


def _group_of_all_tokens(cache_config: Any) -> tuple[int, Any]:
    """Return the first of the caches that share vLLM's blocks that keeps all tokens of a row, and its number."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

    for number, group in enumerate(cache_config.kv_cache_groups):
        if isinstance(group.kv_cache_spec, FullAttentionSpec | UniformTypeKVCacheSpecs):
            return number, group
    raise RuntimeError("no cache of vLLM's keeps all tokens of a row, as algorithm.router_replay needs; set it to off")
