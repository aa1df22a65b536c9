"""Logprobs of sampled tokens, a number for each, without what vLLM does for those of the likeliest tokens besides.

On a GPU vLLM reads each row of logits twice and in many small pieces for the logprob, and once more for the token's
rank among all, which nobody asks for here; one kernel (``kernels.token_logprob``) reads it once and in a few. Then vLLM
brings three arrays to the host, slices them for every token and appends to six lists in Python. Where a model is small
that was a sixth of the time of an engine's step (0.5B with 256 sequences on an H200); what is here stands in for the
three classes that do it and needs one array and one slice.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from rlhf_megatron.compat.patches import replacement
from rlhf_megatron.compat.vllm.names import KNOWN, PACKAGES
from rlhf_megatron.kernels.token_logprob import token_logprobs


class SampledLogprobs:
    """Logprobs of one request; stands in for vLLM's LogprobsProcessor, whose attributes the rest of vLLM reads."""

    cumulative_logprob = prompt_logprobs = prompt_token_id_logprobs = None  # nobody asks for them

    def __init__(self) -> None:
        self.logprobs: list[float] = []

    def update_from_output(self, output: Any) -> None:
        """Append those of a step's tokens from vLLM's EngineCoreOutput."""
        if output.new_logprobs is not None:
            self.logprobs += output.new_logprobs

    def pop_prompt_logprobs(self) -> None:
        """Do nothing: there are none."""

    pop_prompt_token_id_logprobs = pop_prompt_logprobs


@dataclasses.dataclass
class _StepLogprobs:
    """Logprobs of all requests in a step; stands in for vLLM's LogprobsLists.

    ``begins``: where the numbers of each request begin; None where each has one.
    """

    values: list[float]
    begins: list[int] | None

    def slice_request(self, row: int, count: int) -> list[float]:
        """Return those of ``count`` tokens of a request."""
        begin = row if self.begins is None else self.begins[row]
        return self.values[begin : begin + count]


@dataclasses.dataclass
class _StepLogprobsTensor:
    """Logprobs of all requests in a step before they are numbers; stands in for vLLM's LogprobsTensors."""

    values: Tensor  # [tokens]
    begins: list[int] | None

    def to_cpu_nonblocking(self) -> _StepLogprobsTensor:
        """Return the same on the host, once the stream has come so far."""
        return _StepLogprobsTensor(self.values.to("cpu", non_blocking=True), self.begins)

    def tolists(self) -> _StepLogprobs:
        """Return them as numbers; they are on the host."""
        return _StepLogprobs(self.values.tolist(), self.begins)


@replacement(
    *PACKAGES,
    **KNOWN,
    why="vLLM makes three arrays of a step's logprobs, and of each token's an object with its rank and text",
    upstream="https://github.com/vllm-project/vllm/pull/57442",
)
@contextlib.contextmanager
def kept_as_numbers(scheduler: Any, on_gpu: bool) -> Iterator[None]:
    """Have vLLM's ``scheduler`` keep numbers; requests that it runs inside must have ``SampledLogprobs``."""
    update = scheduler.update_from_output

    def update_from_output(scheduled: Any, output: Any) -> Any:
        lists = output.logprobs
        if lists is not None and not isinstance(lists, _StepLogprobs):  # of a runner or sampler that is left as it is
            output.logprobs = _StepLogprobs(lists.logprobs[:, 0].tolist(), lists.cu_num_generated_tokens)
        return update(scheduled, output)

    scheduler.update_from_output = update_from_output
    try:
        with _sampler_of_numbers() if on_gpu else contextlib.nullcontext():
            yield
    finally:
        del scheduler.update_from_output  # the class's own is there again


@contextlib.contextmanager
def _sampler_of_numbers() -> Iterator[None]:
    """Have vLLM's sampler for GPUs leave a number for each sampled token, where nobody asks for more.

    For vLLM 0.25. Later samplers call it otherwise and keep their own, which gives the same numbers.
    """
    from vllm.v1.worker.gpu.sample import sampler
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler  # of steps with drafts

    original = getattr(sampler, "compute_topk_logprobs", None)
    if original is None:
        yield
        return

    def compute_topk_logprobs(
        logits: Tensor,
        num_logprobs: int,
        sampled_token_ids: Tensor,
        cu_num_logits: list[int] | None = None,
        max_per_req_token_ids: int = 0,
        **more: Any,
    ) -> Any:
        if num_logprobs or max_per_req_token_ids:
            more["max_per_req_token_ids"] = max_per_req_token_ids
            return original(logits, num_logprobs, sampled_token_ids, cu_num_logits, **more)
        return _StepLogprobsTensor(token_logprobs(logits, sampled_token_ids), cu_num_logits)

    for module in (sampler, rejection_sampler):
        module.compute_topk_logprobs = compute_topk_logprobs
    try:
        yield
    finally:
        for module in (sampler, rejection_sampler):
            module.compute_topk_logprobs = original
