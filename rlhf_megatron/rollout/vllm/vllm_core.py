"""vLLM's LLMEngine on one rank, as an EngineCore: requests in and out of it, and what it has found in its cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from rlhf_megatron.compat.vllm import internals
from rlhf_megatron.compat.vllm.choice_recorder import ChoiceRecorder
from rlhf_megatron.rollout.drafts import Drafter
from rlhf_megatron.rollout.engine import Sampling
from rlhf_megatron.rollout.engine_core import EngineOutput, EngineRequest
from rlhf_megatron.rollout.vllm.engine_arguments import sampling_params


class VllmCore:
    """One rank's LLMEngine; an EngineCore."""

    name = "vLLM"

    def __init__(self, engine: Any, recorder: ChoiceRecorder | None = None, drafter: Drafter | None = None) -> None:
        """Wrap an LLMEngine, whose choices of experts a ``recorder`` has, and for whose requests a ``drafter``
        drafts."""
        self._engine, self._recorder, self._drafter = engine, recorder, drafter
        self.max_num_seqs, self.block_size, self.enable_prefix_caching = internals.scheduling_limits(engine)
        self._numbers: dict[str, int] = {}  # by vLLM's own, longer name of a request
        self._names: dict[int, str] = {}  # the latest of each number
        self._prefilling: dict[str, int] = {}  # tokens of requests that have sampled none, by vLLM's name
        self.prompt_tokens = self.prefilled_tokens = 0
        self._is_paused = False
        self._salt = ""
        self._checked: tuple[Sampling, Any] | None = None  # a request of the latest sampling, as vLLM has checked it

    def add_request(self, request: EngineRequest, sampling: Sampling) -> None:
        """See EngineCore."""
        checked, request_id = self._checked_one(request, sampling), str(request.number)
        name = internals.add_like(
            self._engine, checked, request_id, request.token_ids, request.seed, request.max_tokens, self._salt
        )
        internals.keep_logprobs_as_numbers(self._engine, name)
        self._numbers[name] = request.number
        self._names[request.number] = name
        self._prefilling[name] = len(request.token_ids)
        if self._drafter:
            own = len(request.token_ids) - request.begun
            self._drafter.begin(name, request.token_ids[:own], request.token_ids[own:])

    def _checked_one(self, request: EngineRequest, sampling: Sampling) -> Any:
        if self._checked is None or self._checked[0] != sampling:
            parameters = sampling_params(sampling, request.seed, request.max_tokens)
            prompt = {"prompt_token_ids": request.token_ids}
            self._checked = sampling, internals.checked_request(self._engine, prompt, parameters)
        return self._checked[1]

    def step(self) -> list[EngineOutput]:
        """See EngineCore."""
        self.resume()
        outputs = self._engine.step()
        self._count_prefilled(outputs)
        return self._ended(outputs)

    def _count_prefilled(self, outputs: Iterable[Any]) -> None:
        """Count the tokens of requests that have sampled their first."""
        if not self._prefilling:
            return
        cached = internals.cached_tokens(self._engine, self._prefilling)
        ended = {self._names[int(output.request_id)]: output for output in outputs if output.finished}
        cached |= {name: ended[name].num_cached_tokens or 0 for name in self._prefilling.keys() & ended.keys()}
        for name, from_cache in cached.items():
            tokens = self._prefilling.pop(name)
            self.prompt_tokens += tokens
            self.prefilled_tokens += tokens - from_cache

    def resume(self) -> None:
        """End a pause, as the next step does."""
        if self._is_paused:
            internals.resume(self._engine)
            self._is_paused = False

    def _ended(self, outputs: Iterable[Any]) -> list[EngineOutput]:
        return [self._with_choices(_output_of(output)) for output in outputs if output.finished]

    def weights_updated(self, version: int) -> None:
        """Have no request that begins from now on share cache blocks with those of before.

        vLLM forgets no block that is in use, so what begins from now on has another hash. That is also so for what
        waits: nothing of it is in the cache.
        """
        self._salt = f"weights {version}"
        internals.salt_waiting(self._engine, self._salt)

    def pause(self) -> list[EngineOutput]:
        """See EngineCore. vLLM plans nothing while it is paused, so what it has begun ahead comes to an end."""
        self._is_paused = True
        internals.pause(self._engine)
        return self._ended(internals.drain(self._engine))

    def unfinished(self) -> list[EngineOutput]:
        """See EngineCore."""
        outputs = []
        for name, output in internals.partial_outputs(self._engine):
            choices = self._recorder.so_far(name) if self._recorder else None
            outputs.append(dataclasses.replace(_output_of(output), expert_choices=choices))
        return outputs

    def abort_request(self, number: int) -> None:
        """See EngineCore."""
        name = self._names.pop(number)
        del self._numbers[name]
        self._prefilling.pop(name, None)
        internals.abort(self._engine, str(number))
        if self._recorder:
            self._recorder.take(name)
        if self._drafter:
            self._drafter.end(name)

    def abort_requests(self) -> list[EngineOutput]:
        """See EngineCore."""
        outputs = [self._with_choices(_output_of(output)) for output in internals.abort_all(self._engine)]
        for _ in internals.drain(self._engine):
            pass
        self._numbers.clear()
        self._names.clear()
        self._prefilling.clear()
        return outputs

    def _with_choices(self, output: EngineOutput) -> EngineOutput:
        name = self._names.pop(output.number)
        self._numbers.pop(name)
        self._prefilling.pop(name, None)  # of one that has ended on the way to a pause
        if self._drafter:
            self._drafter.end(name, output.token_ids)
        if self._recorder is None:
            return output
        return dataclasses.replace(output, expert_choices=self._recorder.take(name))

    def running(self) -> dict[int, int]:
        """See EngineCore."""
        return {self._numbers[name]: count for name, count in internals.sampled_tokens(self._engine).items()}

    def free_tokens(self) -> float:
        """See EngineCore."""
        return internals.free_cache_tokens(self._engine)


def _output_of(output: Any) -> EngineOutput:
    sample = output.outputs[0]
    return EngineOutput(
        int(output.request_id), list(sample.token_ids), list(sample.logprobs or ()), str(sample.finish_reason)
    )
