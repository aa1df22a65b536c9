"""Interface of an inference engine to the scheduler: take a request, step, say what room there is, pause, abort.

The scheduling policy (``scheduler.GenerationScheduler``) talks to an engine through this and nothing else. An engine
names requests by the numbers that the scheduler gives them.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from torch import Tensor

from rlhf_megatron.rollout.engine import Sampling


@dataclasses.dataclass(frozen=True)
class EngineRequest:
    """Tokens to continue; ``seed`` alone decides the samples, whatever is batched with them."""

    number: int
    token_ids: list[int]
    seed: int
    max_tokens: int  # to be sampled
    begun: int = 0  # of the tokens, those after the prompt


@dataclasses.dataclass(frozen=True)
class EngineOutput:
    """Tokens that a request has sampled; a stop token, if it ended by one, is the last of them."""

    number: int
    token_ids: list[int]
    logprobs: list[float]  # of each token, under the distribution that it was drawn from
    finish_reason: str  # "stop", "length" or "abort"; an engine's own word for anything else is an error
    expert_choices: Tensor | None = None  # of the request's tokens and these, where they are recorded


class EngineCore(Protocol):
    """One replica's engine on this rank. All ranks of a replica make the same calls in the same order."""

    name: str
    """For error lines."""
    max_num_seqs: int
    """Most sequences that it runs at a time."""
    block_size: int
    """Tokens of a cache block; the last one of a sequence is not full."""
    enable_prefix_caching: bool
    """True if the responses to one prompt share its cache blocks."""
    prompt_tokens: int
    """Tokens of all requests that have sampled at least one."""
    prefilled_tokens: int
    """Those of them that were not found in the cache."""

    def add_request(self, request: EngineRequest, sampling: Sampling) -> None:
        """Queue a request; it runs from one of the next steps on."""
        ...

    def step(self) -> list[EngineOutput]:
        """Sample a token for each running request, and return those that have ended."""
        ...

    def abort_requests(self) -> list[EngineOutput]:
        """Drop all requests, and return what they have sampled; nothing of them is computed any more then."""
        ...

    def abort_request(self, number: int) -> None:
        """Drop one request while none is computed: the engine is paused."""
        ...

    def pause(self) -> list[EngineOutput]:
        """Halt until the next step: nothing is computed any more; return those that have ended on the way."""
        ...

    def unfinished(self) -> list[EngineOutput]:
        """Return what each request has sampled so far, which ends none of them."""
        ...

    def running(self) -> dict[int, int]:
        """Return the sampled tokens of each request that is in the cache, not those that wait or were preempted."""
        ...

    def free_tokens(self) -> float:
        """Return for how many tokens the cache has room; infinite where that is not known."""
        ...
