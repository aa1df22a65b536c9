"""What a rollout engine is to the rest of the system. ``vllm_engine`` is the one there is."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from rlhf_megatron.recipe.errors import UserError


class RolloutError(UserError):
    """A request or a setting that the engine cannot carry out."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Temperature 0 takes the likeliest; ``top_k`` -1 is off.

    ``stop_token_ids`` alone end a response: what the model's generation_config.json says is not looked at.
    """

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop_token_ids: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Request:
    """One trajectory to generate. ``row_id`` is the caller's name for it; the seed (0 or more) is the row's own."""

    row_id: int
    prompt_token_ids: Sequence[int]
    seed: int


@dataclasses.dataclass(frozen=True)
class Completion:
    """One generated trajectory; a stop token, if it ended by one, is its last token."""

    row_id: int
    token_ids: list[int]
    logprobs: list[float]  # of each sampled token, under the distribution that it was drawn from
    finish_reason: str  # "stop" or "length"
    weight_version: int


def request_seed(seed: int, step: int, row: int) -> int:
    """The sampling seed of one trajectory: the same in every layout, unrelated between rows and steps."""
    digest = hashlib.blake2b(f"{seed}/{step}/{row}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF


class RolloutEngine(Protocol):
    """One replica's share on this rank. All ranks of a replica make the same calls in the same order."""

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        on_progress: Callable[[int, int], None] | None = None,
        on_completion: Callable[[Completion], None] | None = None,
    ) -> list[Completion]:
        """Completions in the order of ``requests``.

        As they finish, ``on_completion`` is called with each, and ``on_progress`` with (done, total).
        """
        ...

    def parameters(self) -> dict[str, Tensor]:
        """The live storage of this rank's weights by the engine's names; written to in place by a regathering."""
        ...

    def weights_updated(self, version: int) -> None:
        """Says that new weights are in place: cached prefixes are dropped, completions carry ``version``."""
        ...

    def sleep(self) -> None:
        """Gives weights and cache back to the device, where the platform can; the weights are lost."""
        ...

    def wake_weights(self) -> None:
        """Takes memory for the weights again; they are to be written before the next generation."""
        ...

    def wake_kv_cache(self) -> None:
        """Takes memory for the cache again."""
        ...

    def close(self) -> None:
        """Ends the engine."""
        ...
