"""vLLM inside the trainer's process, fed by in-place weight updates; docs/gpus.md says which versions.

One engine per rank; several ranks make one tensor-parallel replica by vLLM's external launcher. In training no weights
are read from files: the engine starts with dummy ones and a weight sync fills them in. vLLM's environment variables
must be set before it is imported (``process_environment.prepare_environment``); what CPUs need besides is in
compat.vllm.cpu.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.compat.vllm import (
    block_allocation,
    choice_recorder,
    internals,
    latent_weights,
    logprobs,
    sleeping_memory,
    speculation,
    steady_inputs,
    steady_steps,
)
from rlhf_megatron.compat.vllm.draft_models import KeptBuffers
from rlhf_megatron.compat.vllm.paused_cache import HostCopy
from rlhf_megatron.compat.vllm.verification import Verification
from rlhf_megatron.compat.vllm.workspace import Workspace
from rlhf_megatron.errors import RolloutError
from rlhf_megatron.recipe import RolloutSection
from rlhf_megatron.recipe.speculative import SpeculativeSection
from rlhf_megatron.rollout.drafts import Drafter
from rlhf_megatron.rollout.engine import Completion, Environment, GenerationRecord, Request, Sampling
from rlhf_megatron.rollout.lockstep import ReplicaRanks
from rlhf_megatron.rollout.paused import PausedRequests
from rlhf_megatron.rollout.random_state import preserved_random_state
from rlhf_megatron.rollout.request_checks import check_requests
from rlhf_megatron.rollout.response_lengths import ResponseLengths
from rlhf_megatron.rollout.scheduler import GenerationScheduler
from rlhf_megatron.rollout.vllm.engine_arguments import engine_arguments
from rlhf_megatron.rollout.vllm.engine_start import make_llm, starting
from rlhf_megatron.rollout.vllm.model_config import checked_vocabulary, config_arguments
from rlhf_megatron.rollout.vllm.vllm_core import VllmCore
from rlhf_megatron.rollout.work_queue import WorkQueue

# vLLM raises a temperature below this to it, and the trainer's logprobs would be of another distribution.
_LOWEST_TEMPERATURE = 0.01


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
        records_experts: bool = False,
        language: Mapping[str, Any] | None = None,
        draft_model: str | None = None,
    ) -> None:
        """Make the engine; the arguments are those of ``engines.make_engine``, and ``load_format`` is vLLM's.

        The trainer's random state and thread count are left as they were. The engine has no usable weights until the
        first ``weights_updated``.
        """
        self._section = section
        self._on_gpu = torch.cuda.is_available()
        self._can_sleep = self._on_gpu and section.sleep
        self._asleep: set[str] = set()
        self._given_back = 0  # bytes
        self._kept_cache = HostCopy()
        self._version: int | None = None
        self._max_length = max_prompt_length + section.max_response_length
        self._vocabulary = checked_vocabulary(Path(model_path), language)
        arguments = engine_arguments(section, dtype, seed, self._max_length, self._on_gpu, draft_model)
        if load_format == "dummy":
            arguments |= config_arguments(model_path, language)
        self._workspace = Workspace()
        with starting(self._on_gpu):
            self._memory = sleeping_memory.SleepingMemory() if self._can_sleep else None
            arguments |= {"model": model_path, "load_format": load_format, "use_tqdm_on_load": False}
            recording = choice_recorder.recorded() if records_experts else contextlib.nullcontext()
            with self._in_use(), recording as recorder:
                self._llm: Any = make_llm(arguments, section, shared or {}, self._max_length)
        self._engine: Any = self._llm.llm_engine
        if recorder is not None:
            recorder.follow(internals.scheduler(self._engine))
        self._drafter, self._speculation = self._speculating(section.speculative)
        self._core, self._paused = VllmCore(self._engine, recorder, self._drafter), PausedRequests()
        self._pointers = {name: parameter.data_ptr() for name, parameter in self._written()}
        self._ranks = ReplicaRanks(internals.tensor_group() if section.layout.tensor > 1 else None)
        self._lengths = ResponseLengths()
        self.record = GenerationRecord()

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """Have what vLLM has once for a process be this engine's."""
        with self._workspace.in_use(), self._memory.in_use() if self._memory else contextlib.nullcontext():
            yield

    def _speculating(self, section: SpeculativeSection | None) -> tuple[Drafter | None, Verification | None]:
        """Return (drafts of requests, what verifies them), where the recipe asks for them."""
        if section is None:
            return None, None
        running, synthetic = section.max_running, section.synthetic_acceptance_length
        if section.has_draft_model:
            return None, speculation.install(self._engine, None, running, synthetic)
        drafter = Drafter(section.num_speculative_tokens, section.match, section.method == "suffix")
        return drafter, speculation.install(self._engine, drafter.draft, running, synthetic)

    # ---- weights

    def parameters(self) -> dict[str, Tensor]:
        """See RolloutEngine. Fused as vLLM has them (qkv_proj, gate_up_proj), the vocabulary padded; tied ones once."""
        from rlhf_megatron.compat.vllm import fp8_layers

        named = internals.loaded_tensors(internals.model(self._engine))
        return {
            name: parameter.data
            for name, parameter in named
            if fp8_layers.is_full_precision(name) and not latent_weights.is_derived(name)
        }

    def draft_parameters(self) -> dict[str, Tensor]:
        """See RolloutEngine. A head's embeddings are the policy's; so are a layer's, and its output layer."""
        drafting = internals.draft_model(self._engine)
        if drafting is None:
            return {}
        of_policy = {id(parameter) for parameter in internals.model(self._engine).parameters()}
        return {
            name: parameter.data
            for name, parameter in drafting.named_parameters()
            if id(parameter) not in of_policy and not latent_weights.is_derived(name)
        }

    def _written(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what is written in place, with names that tell both models apart."""
        yield from self.parameters().items()
        yield from ((f"draft model: {name}", tensor) for name, tensor in self.draft_parameters().items())

    def pointer_check(self) -> None:
        """Raise RuntimeError naming the first parameter whose storage has moved: CUDA graphs hold the old address."""
        for name, parameter in self._written():
            if parameter.data_ptr() != self._pointers[name]:
                raise RuntimeError(f"vLLM's parameter {name} has moved in memory; it must be written in place")

    def weights_updated(self, version: int) -> None:
        """See RolloutEngine. Raises RuntimeError if a weight has moved or the prefix cache could not be dropped."""
        if self._asleep:
            raise RuntimeError(f"the engine is asleep ({', '.join(sorted(self._asleep))}); wake it before new weights")
        self.pointer_check()
        if self._on_gpu:
            torch.cuda.synchronize()  # whichever streams they were written on
        for model in filter(None, (internals.model(self._engine), internals.draft_model(self._engine))):
            latent_weights.follow(model)
        if self._section.quantization:
            from rlhf_megatron.compat.vllm import fp8_layers

            fp8_layers.quantize(internals.model(self._engine))
        if not self._paused:
            self._drop_prefixes()
        self._core.weights_updated(version)
        self._version = version

    # ---- memory

    def sleep(self, keeps_weights: bool = False) -> None:
        """See RolloutEngine. Level 2: weights are dropped rather than copied to the host, unless they are to be kept.

        The cache of paused requests is copied to the host: there and back that takes a tenth of computing it anew, or
        less; what they do not use of it is dropped. Shared ones stay. Whoever they belong to may write to them now, so
        there is no generating until ``weights_updated``, also where nothing can sleep.
        """
        self._version = None
        if self._can_sleep and not self._asleep:
            free = torch.cuda.mem_get_info()[0]
            self._draft_buffers = KeptBuffers(internals.draft_model(self._engine))
            with self._in_use():
                if self._paused:
                    internals.sleep_with_cache(self._engine, self._kept_cache)
                else:
                    self._llm.sleep(level=1 if keeps_weights else 2)
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
            with self._in_use(), internals.cache_stays(self._engine) if self._paused else contextlib.nullcontext():
                self._llm.wake_up(tags=[tag])
            if tag == "weights":
                self._draft_buffers.restore()
            else:
                self._kept_cache.restore()
            self._asleep.remove(tag)

    # ---- generating

    def expect(self, lengths: Sequence[int]) -> None:
        """See RolloutEngine."""
        self._lengths = ResponseLengths(lengths)

    def reset_prefix_cache(self) -> None:
        """See RolloutEngine. Raises RuntimeError where requests are still running."""
        self._drop_prefixes()
        if self._drafter and self._section.scheduling == "static":
            self._drafter.forget()  # rounding depends on what is verified together

    def _drop_prefixes(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache; requests are still running")

    def drop_paused(self) -> None:
        """See RolloutEngine."""
        for number in self._paused.release():
            self._core.abort_request(number)
        self._core.resume()
        self.reset_prefix_cache()

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        on_progress: Callable[[int, int], None] | None = None,
        on_completion: Callable[[Completion], None] | None = None,
        queue: WorkQueue | None = None,
        environment: Environment | None = None,
        pauses: bool = False,
    ) -> list[Completion]:
        """See RolloutEngine. The trainer's random state is left as it was."""
        if self._version is None:
            raise RuntimeError("the engine has no weights; write them and call weights_updated first")
        if 0 < sampling.temperature < _LOWEST_TEMPERATURE:
            raise RolloutError(
                f"temperature {sampling.temperature:g} is below vLLM's lowest, {_LOWEST_TEMPERATURE}; "
                "use 0 for the likeliest tokens"
            )
        scheduler = GenerationScheduler(
            self._core,
            requests,
            sampling,
            self._version,
            self._lengths,
            self._ranks,
            queue,
            environment,
            self._paused,
            pauses,
            lambda group: check_requests(group, sampling, self._max_length, self._vocabulary),
        )
        planner = internals.scheduler(self._engine)
        with contextlib.ExitStack() as stack:
            stack.enter_context(preserved_random_state())
            stack.enter_context(self._in_use())
            stack.enter_context(block_allocation.only_where_needed(planner))
            stack.enter_context(steady_steps.taken_at_once(planner, internals.request_states(self._engine)))
            stack.enter_context(logprobs.kept_as_numbers(planner, self._on_gpu))
            stack.enter_context(steady_inputs.kept(internals.model_runner(self._engine)))
            completions = scheduler.generate(on_progress, on_completion)
        self.record = scheduler.record
        if self._speculation:
            counts = self._speculation.take_counts()
            self.record = dataclasses.replace(
                self.record,
                verifications=counts.verifications,
                drafted_tokens=counts.drafted,
                accepted_tokens=counts.accepted,
            )
        return completions

    def close(self) -> None:
        """See RolloutEngine. vLLM ends torch.distributed for the whole process with its engine: do this last."""
        with self._in_use():
            internals.shutdown(self._engine)
