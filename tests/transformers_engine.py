"""A second rollout engine, on transformers: small, slow and deterministic. It keeps the contract of rollout/engine.py.

Weights have vLLM's names and fused layout, with the modules of transformers as views of them, so that weight sync and
everything above it work as with vLLM. Each sequence is computed by itself.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from rlhf_megatron.recipe import RolloutSection
from rlhf_megatron.rollout.engine import Completion, Environment, GenerationRecord, Request, Sampling
from rlhf_megatron.rollout.engine_core import EngineOutput, EngineRequest
from rlhf_megatron.rollout.paused import PausedRequests
from rlhf_megatron.rollout.random_state import preserved_random_state
from rlhf_megatron.rollout.request_checks import check_requests
from rlhf_megatron.rollout.response_lengths import ResponseLengths
from rlhf_megatron.rollout.scheduler import GenerationScheduler
from rlhf_megatron.rollout.work_queue import WorkQueue

FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"} | {
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
VOCABULARY_BLOCK = 64  # rows that the vocabulary is padded to


def fuse_parameters(model: Any, shared: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Make parameters of ``model`` views of fused ones, which are those of ``shared`` where there are any; by name."""
    parts: dict[str, list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        module = name.split(".")[-2]
        parts.setdefault(name.replace(module, FUSED.get(module, module)), []).append(parameter)
    fused = {}
    for name, parameters in parts.items():
        value = torch.cat([parameter.data for parameter in parameters])
        if "embed_tokens" in name or "lm_head" in name:
            value = torch.nn.functional.pad(value, (0, 0, 0, -len(value) % VOCABULARY_BLOCK))
        memory = shared.get(name, value)
        assert memory.shape == value.shape, name
        fused[name], begin = memory, 0
        for parameter in parameters:
            parameter.data = memory[begin : begin + len(parameter)]
            begin += len(parameter)
    return fused


@dataclasses.dataclass
class RunningSequence:
    """A request in the engine."""

    request: EngineRequest
    sampling: Sampling
    generator: torch.Generator
    cache: Any = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)

    def output(self, finish_reason: str) -> EngineOutput:
        return EngineOutput(self.request.number, self.tokens, self.logprobs, finish_reason)


class TransformersCore:
    """An EngineCore that runs first what came first."""

    name, block_size, enable_prefix_caching = "transformers", 1, True

    def __init__(self, model: Any, max_num_seqs: int, cache_tokens: int) -> None:
        self._model, self.max_num_seqs, self._cache_tokens = model, max_num_seqs, cache_tokens
        self._waiting: deque[RunningSequence] = deque()
        self._running: list[RunningSequence] = []
        self._prefixes: dict[tuple[int, ...], Any] = {}
        self.prompt_tokens = self.prefilled_tokens = 0

    def add_request(self, request: EngineRequest, sampling: Sampling) -> None:
        generator = torch.Generator().manual_seed(request.seed)
        self._waiting.append(RunningSequence(request, sampling, generator))

    def step(self) -> list[EngineOutput]:
        while self._waiting and len(self._running) < self.max_num_seqs:
            self._running.append(self._waiting.popleft())
        ended = {}
        for sequence in self._running:
            self._sample(sequence)
            if sequence.tokens[-1] in sequence.sampling.stop_token_ids:
                ended[sequence.request.number] = sequence.output("stop")
            elif len(sequence.tokens) == sequence.request.max_tokens:
                ended[sequence.request.number] = sequence.output("length")
        self._running = [sequence for sequence in self._running if sequence.request.number not in ended]
        return list(ended.values())

    def abort_requests(self) -> list[EngineOutput]:
        outputs = [sequence.output("abort") for sequence in (*self._running, *self._waiting)]
        self._running, self._waiting = [], deque()
        return outputs

    def abort_request(self, number: int) -> None:
        self._running = [each for each in self._running if each.request.number != number]
        self._waiting = deque(each for each in self._waiting if each.request.number != number)

    def pause(self) -> list[EngineOutput]:
        return []

    def unfinished(self) -> list[EngineOutput]:
        return [
            dataclasses.replace(each.output("abort"), token_ids=list(each.tokens), logprobs=list(each.logprobs))
            for each in (*self._running, *self._waiting)
        ]

    def running(self) -> dict[int, int]:
        return {sequence.request.number: len(sequence.tokens) for sequence in self._running}

    def free_tokens(self) -> float:
        return self._cache_tokens - sum(len(each.request.token_ids) + len(each.tokens) for each in self._running)

    def reset_prefix_cache(self) -> None:
        if self._running or self._waiting:
            raise RuntimeError("the prefix cache is in use; requests are still running")
        self.drop_prefixes()

    def drop_prefixes(self) -> None:
        """Drop none: those that sequences have are copies of their own."""
        self._prefixes.clear()

    @torch.no_grad()
    def _sample(self, sequence: RunningSequence) -> None:
        if sequence.cache is None:
            sequence.cache = self._prefix(tuple(sequence.request.token_ids[:-1]))
        last = sequence.tokens[-1] if sequence.tokens else sequence.request.token_ids[-1]
        output = self._model(torch.tensor([[last]]), past_key_values=sequence.cache, use_cache=True)
        logprobs = processed_logprobs(output.logits[0, -1].float(), sequence.sampling)
        if sequence.sampling.temperature == 0:
            token = int(logprobs.argmax())
        else:
            token = int(torch.multinomial(logprobs.exp(), 1, generator=sequence.generator))
        sequence.tokens.append(token)
        sequence.logprobs.append(float(logprobs[token]))

    def _prefix(self, tokens: tuple[int, ...]) -> Any:
        self.prompt_tokens += len(tokens)
        if tokens not in self._prefixes:
            self.prefilled_tokens += len(tokens)
            cache = DynamicCache(config=self._model.config)
            if tokens:
                self._model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
            self._prefixes[tokens] = cache
        return copy.deepcopy(self._prefixes[tokens])


def processed_logprobs(logits: Tensor, sampling: Sampling) -> Tensor:
    """Map [vocabulary] -> the same: logprobs of the distribution that is drawn from."""
    logprobs = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
    if sampling.top_k > 0:
        logprobs[logprobs < logprobs.topk(sampling.top_k).values[-1]] = -torch.inf
        logprobs = logprobs.log_softmax(-1)
    if sampling.top_p < 1:
        values, order = logprobs.sort(descending=True)
        before = values.exp().cumsum(-1) - values.exp()
        logprobs[order[before >= sampling.top_p]] = -torch.inf
        logprobs = logprobs.log_softmax(-1)
    return logprobs


class TransformersEngine:
    """One rank's engine; a RolloutEngine for replicas of one rank."""

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
        assert not records_experts and language is None and draft_model is None
        assert section.layout.tensor == 1 and section.quantization is None
        torch_dtype = getattr(torch, section.dtype or dtype)
        with preserved_random_state():
            if load_format == "dummy":
                config = AutoConfig.from_pretrained(model_path, local_files_only=True)
                model = AutoModelForCausalLM.from_config(config, dtype=torch_dtype, attn_implementation="eager")
            else:
                model = AutoModelForCausalLM.from_pretrained(
                    model_path, dtype=torch_dtype, attn_implementation="eager", local_files_only=True
                )
        self._parameters = fuse_parameters(model.eval(), shared or {})
        self._max_length = max_prompt_length + section.max_response_length
        self._core = TransformersCore(model, section.max_num_seqs, section.max_num_seqs * self._max_length)
        self._vocabulary, self._version = model.config.vocab_size, None
        self._lengths, self._paused = ResponseLengths(), PausedRequests()
        self.record = GenerationRecord()

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
        if self._version is None:
            raise RuntimeError("the engine has no weights; write them and call weights_updated first")
        scheduler = GenerationScheduler(
            self._core,
            requests,
            sampling,
            self._version,
            self._lengths,
            queue=queue,
            environment=environment,
            paused=self._paused,
            pauses=pauses,
            check=lambda group: check_requests(group, sampling, self._max_length, self._vocabulary),
        )
        completions = scheduler.generate(on_progress, on_completion)
        self.record = scheduler.record
        return completions

    def expect(self, lengths: Sequence[int]) -> None:
        self._lengths = ResponseLengths(lengths)

    def reset_prefix_cache(self) -> None:
        self._core.reset_prefix_cache()

    def drop_paused(self) -> None:
        for number in self._paused.release():
            self._core.abort_request(number)
        self.reset_prefix_cache()

    def parameters(self) -> dict[str, Tensor]:
        return dict(self._parameters)

    def draft_parameters(self) -> dict[str, Tensor]:
        return {}

    def weights_updated(self, version: int) -> None:
        if self._paused:
            self._core.drop_prefixes()
        else:
            self.reset_prefix_cache()
        self._version = version

    def sleep(self, keeps_weights: bool = False) -> None:
        self._version = None

    def wake_weights(self) -> None: ...

    def wake_kv_cache(self) -> None: ...

    def close(self) -> None: ...
