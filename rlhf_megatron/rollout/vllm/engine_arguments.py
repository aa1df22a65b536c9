"""Arguments of vLLM's LLM that follow from a recipe's rollout section and the machine, and those of a request."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
import torch.distributed as dist

from rlhf_megatron.compat.vllm import speculation
from rlhf_megatron.errors import RolloutError
from rlhf_megatron.recipe import RolloutSection
from rlhf_megatron.recipe.speculative import SpeculativeSection
from rlhf_megatron.rollout.engine import Sampling

_CPU_KV_CACHE_GB = 0.0625
# Only full blocks are shared between requests with the same prefix; vLLM's 128 on CPUs would leave short prompts out.
_CPU_BLOCK_SIZE = 32
# What communicators may still take between looking at the free memory and vLLM's own look.
_FREE_MEMORY_MARGIN = 0.9
# Of how many tokens steps are captured as CUDA graphs: vLLM's numbers up to 512, and beyond until Python is no longer
# slower than a GPU.
_CAPTURED = (1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, 1025, 32))
_CAPTURED_BY_VLLM = 512


def engine_arguments(
    section: RolloutSection, dtype: str, seed: int, max_length: int, on_gpu: bool, draft_model: str | None = None
) -> dict[str, Any]:
    """Return keyword arguments of vLLM's LLM for a rollout section; ``max_length`` is a prompt's and its response's.

    Raises:
        RolloutError: the section asks for more memory than is free, or for a draft model that is not given.
    """
    arguments: dict[str, Any] = {
        "dtype": section.dtype or dtype,
        "seed": seed,
        "skip_tokenizer_init": True,
        "max_model_len": max_length,
        "max_num_seqs": section.max_num_seqs,
        "enable_chunked_prefill": section.enable_chunked_prefill,
        "enable_prefix_caching": section.enable_prefix_caching,
        "enforce_eager": section.enforce_eager or not on_gpu,
        "tensor_parallel_size": section.layout.tensor,
        "enable_expert_parallel": section.layout.expert_parallel,
        # Logprobs of the distribution that was sampled from, so that the trainer's can be held against them.
        "logprobs_mode": "processed_logprobs",
        # Drafts need the tokens of the step before on the host.
        "async_scheduling": section.async_scheduling and section.speculative is None,
        "disable_log_stats": True,
    }
    if section.kv_cache_dtype is not None:
        arguments["kv_cache_dtype"] = section.kv_cache_dtype
    if section.speculative is not None:
        arguments["speculative_config"] = speculative_config(section.speculative, draft_model)
    if section.max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = section.max_num_batched_tokens
    # Of a rank that is a world of its own (topology.team), only torchrun knows that there are others.
    if dist.is_initialized() and max(dist.get_world_size(), int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        # Also for replicas of one rank: vLLM's other executor would put every rank's engine on the first GPU.
        # data_parallel_size stays 1: above it, vLLM makes replicas step together, and theirs differ in length.
        arguments["distributed_executor_backend"] = "external_launcher"
    kv_cache_gb = section.kv_cache_gb
    if on_gpu:
        arguments["moe_backend"] = "triton"  # others shuffle the rows of experts, which are written in place
        if importlib.util.find_spec("flashinfer") is None:  # vLLM takes its delta nets on Hopper without looking
            arguments["additional_config"] = {"gdn_prefill_backend": "triton"}
        arguments["enable_sleep_mode"] = section.sleep
        arguments["gpu_memory_utilization"] = _gpu_memory_share(section)
        if section.speculative is None and not section.enforce_eager:
            arguments["cudagraph_capture_sizes"] = captured_sizes(section)
    else:
        arguments["block_size"] = _CPU_BLOCK_SIZE
        # vLLM draws a token also at the end of a part of a prompt, and then sets the generator of a request's seed
        # back, which torch's generators for CPUs cannot.
        arguments["enable_chunked_prefill"] = False
        # vLLM's own default is most of the node's memory, for each rank.
        kv_cache_gb = kv_cache_gb or _CPU_KV_CACHE_GB
    if kv_cache_gb is not None:
        arguments["kv_cache_memory_bytes"] = int(kv_cache_gb * 2**30)
    return arguments


def captured_sizes(section: RolloutSection) -> list[int]:
    """Return of how many tokens steps are captured: as by vLLM, and those of as many sequences as run at a time.

    By itself vLLM captures no larger ones than of 512, and none of more sequences than run at a time, so that of 540
    sequences, or 100, the largest steps would wait for Python.
    """
    running = min(section.max_num_seqs, _CAPTURED[-1])
    most = max(running, min(2 * running, _CAPTURED_BY_VLLM))
    if section.max_num_batched_tokens is not None:
        most = min(most, section.max_num_batched_tokens)
    return sorted({running, *(size for size in _CAPTURED if size <= most)})


def speculative_config(section: SpeculativeSection, draft_model: str | None = None) -> dict[str, Any]:
    """Return vLLM's speculative_config; ``draft_model``: the folder of a head that drafts.

    Raises:
        RolloutError: the method is that of a head, and there is none.
    """
    if section.method == "eagle3" and draft_model is None:
        raise RolloutError(
            "rollout.speculative.method=eagle3: heads draft in training alone; set rollout.speculative=null"
        )
    count, running = section.num_speculative_tokens, section.max_running
    if section.has_draft_model:
        return speculation.model_configuration(section.method, count, running, draft_model)
    return speculation.configuration(count, running)


def _gpu_memory_share(section: RolloutSection) -> float:
    """Return the gpu_memory_utilization to give vLLM, which checks it against what is free at the start.

    With an explicit cache size the share serves for that check only, so it is that of the cache.
    """
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    share = section.gpu_memory_utilization
    gib = 2**30
    if section.kv_cache_gb is not None:
        if section.kv_cache_gb * gib > free:
            raise RolloutError(
                f"rollout.kv_cache_gb={section.kv_cache_gb:g} is more than the {free / gib:.1f} GiB that the trainer "
                "leaves free; lower it"
            )
        return section.kv_cache_gb * gib / total
    if share * total > free:
        raise RolloutError(
            f"rollout.gpu_memory_utilization={share:g} is {share * total / gib:.1f} GiB, and the trainer leaves "
            f"{free / gib:.1f} GiB free; lower it to {_FREE_MEMORY_MARGIN * free / total:.2f}, or give kv_cache_gb"
        )
    return share


def sampling_params(sampling: Sampling, seed: int, max_tokens: int) -> Any:
    """Return vLLM's SamplingParams of one request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # those of generation_config.json; stop_token_ids still end a response
        seed=seed,
        logprobs=0,  # of the sampled token only
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
