"""The logprobs of sampled tokens, a number for each, without what vLLM does for those of the likeliest tokens besides.

On a GPU one kernel of vLLM reads each row of logits twice and in many small pieces; ours (``kernels.token_logprob``)
once and in a few. Then vLLM slices three arrays for every token and appends to six lists in Python. Where a model is
small that was a sixth of the time of an engine's step (0.5B with 256 sequences on an H200); what is here stands in for
the two classes that do it and needs one slice.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from rlhf_megatron.kernels.token_logprob import token_logprobs


@functools.cache
def install() -> None:
    """Gives vLLM's sampler for GPUs our kernel, for this process; call it before an engine is made."""
    from vllm.v1.worker.gpu.sample import logprob

    of_several = logprob.compute_token_logprobs

    def compute_token_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
        if token_ids.shape[1] != 1:
            return of_several(logits, token_ids)
        return token_logprobs(logits, token_ids[:, 0])[:, None]

    logprob.compute_token_logprobs = compute_token_logprobs


class SampledLogprobs:
    """Those of one request; stands in for vLLM's LogprobsProcessor, whose attributes the rest of vLLM reads."""

    cumulative_logprob = prompt_logprobs = prompt_token_id_logprobs = None  # nobody asks for them

    def __init__(self) -> None:
        self.logprobs: list[float] = []

    def update_from_output(self, output: Any) -> None:
        """Takes those of a step's tokens from vLLM's EngineCoreOutput."""
        if output.new_logprobs is not None:
            self.logprobs += output.new_logprobs

    def pop_prompt_logprobs(self) -> None:
        """There are none."""

    pop_prompt_token_id_logprobs = pop_prompt_logprobs


class _OfStep:
    """Those of all requests in a step; stands in for vLLM's LogprobsLists."""

    def __init__(self, lists: Any) -> None:
        self._values: list[float] = lists.logprobs[:, 0].tolist()  # the sampled token's come first
        self._begins: list[int] | None = lists.cu_num_generated_tokens

    def slice_request(self, row: int, count: int) -> list[float]:
        """Those of ``count`` tokens of a request."""
        begin = row if self._begins is None else self._begins[row]
        return self._values[begin : begin + count]


@contextlib.contextmanager
def kept_as_numbers(core: Any) -> Iterator[None]:
    """Requests that vLLM's LLMEngine ``core`` runs meanwhile must have ``SampledLogprobs``."""
    scheduler = core.engine_core.engine_core.scheduler
    update = scheduler.update_from_output

    def update_from_output(scheduled: Any, output: Any) -> Any:
        if output.logprobs is not None:
            output.logprobs = _OfStep(output.logprobs)
        return update(scheduled, output)

    scheduler.update_from_output = update_from_output
    try:
        yield
    finally:
        del scheduler.update_from_output  # the class's own is there again
