"""vLLM's LLMEngine in this process, as the scheduler's `EngineCore`."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlhf_megatron.compat.vllm import internals
from rlhf_megatron.compat.vllm.expert_choices import ChoiceRecorder
from rlhf_megatron.rollout.engine import Sampling
from rlhf_megatron.rollout.engine_core import EngineOutput, EngineRequest


class VllmCore:
    """One rank's LLMEngine; an EngineCore."""

    name = "vLLM"

    def __init__(self, engine: Any, recorder: ChoiceRecorder | None = None) -> None:
        """Wrap an LLMEngine, whose choices of experts a `recorder` has."""
        self._engine, self._recorder = engine, recorder
        self.max_num_seqs, self.block_size, self.enable_prefix_caching = internals.scheduling_limits(engine)
        self._numbers: dict[str, int] = {}  # by vLLM's own, longer name of a request
        self._names: dict[int, str] = {}  # the latest of each number

    def add_request(self, request: EngineRequest, sampling: Sampling) -> None:
        """See EngineCore."""
        parameters = sampling_params(sampling, request.seed, request.max_tokens)
        prompt = {"prompt_token_ids": request.token_ids}
        name = self._engine.add_request(str(request.number), prompt, parameters)
        internals.keep_logprobs_as_numbers(self._engine, name)
        self._numbers[name] = request.number
        self._names[request.number] = name

    def step(self) -> list[EngineOutput]:
        """See EngineCore."""
        return [self._with_choices(_output_of(output)) for output in self._engine.step() if output.finished]

    def abort_requests(self) -> list[EngineOutput]:
        """See EngineCore."""
        outputs = [self._with_choices(_output_of(output)) for output in internals.abort_all(self._engine)]
        internals.drain(self._engine)
        self._numbers.clear()
        self._names.clear()
        return outputs

    def _with_choices(self, output: EngineOutput) -> EngineOutput:
        if self._recorder is None:
            return output
        return dataclasses.replace(output, expert_choices=self._recorder.take(self._names[output.number]))

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
