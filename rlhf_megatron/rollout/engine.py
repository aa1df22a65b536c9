"""The contract of rollout engines: requests in, completions out, weights written in place.

Everything outside of an engine's own folder knows it as a ``RolloutEngine``. ``engine_registry.make_engine`` makes one,
and tests/unit/test_engine_contract.py holds two to it: vLLM and a small one on transformers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from rlhf_megatron.rollout.work_queue import WorkQueue


class SamplingOfLength(NamedTuple):
    """Settings of sampling for prompts of ``up_to`` tokens."""

    up_to: int
    top_p: float
    top_k: int
    max_tokens: int


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings of sampling. Temperature 0 takes the likeliest token; ``top_k`` -1 is off.

    ``stop_token_ids`` alone end a response: what the model's generation_config.json says is not looked at.
    ``by_length``: of prompts up to a length, the shortest first; their ``max_tokens`` are not above those of all.
    """

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop_token_ids: Sequence[int]
    by_length: Sequence[SamplingOfLength] = ()

    def of_prompt(self, length: int) -> Sampling:
        """Return the sampling of a prompt of so many tokens."""
        for entry in self.by_length:
            if length <= entry.up_to:
                return dataclasses.replace(
                    self, top_p=entry.top_p, top_k=entry.top_k, max_tokens=entry.max_tokens, by_length=()
                )
        return self

    def greedy(self) -> Sampling:
        """Return it with the likeliest tokens, of responses as long as before."""
        by_length = [entry._replace(top_p=1.0, top_k=-1) for entry in self.by_length]
        return dataclasses.replace(self, temperature=0.0, top_p=1.0, top_k=-1, by_length=by_length)


class SampledTurn(NamedTuple):
    """Tokens that the model sampled in one turn; see Completion."""

    token_ids: list[int]
    logprobs: list[float]
    weight_versions: list[int]
    finish_reason: str


@dataclasses.dataclass(frozen=True)
class Completion:
    """One generated trajectory, or as much of it as there is; a stop token, if it ended by one, is its last token."""

    row_id: int
    token_ids: list[int]
    logprobs: list[float]  # of each sampled token, under the distribution that it was drawn from
    finish_reason: str  # "stop" or "length"; "abort": it was given up or paused, and can be resumed
    weight_versions: list[int]  # of the weights that sampled each token
    sampled: list[bool] | None = None  # which tokens are the model's, where an environment has spoken between its turns
    turn_rewards: list[float] | None = None  # of each turn that an environment has seen; NaN where it failed
    prompt_token_ids: list[int] | None = None  # where an environment has begun it with others than its request's
    # [tokens, layers, chosen] of prompt and response, as far as known, where the engine records them
    expert_choices: Tensor | None = dataclasses.field(default=None, compare=False)
    branches: tuple[Completion, ...] = ()  # earlier ones of its trajectory, each a prompt and turns of its own

    @property
    def turns(self) -> int:
        """Number of the model's turns."""
        marks = self.sampled if self.sampled is not None else [True] * len(self.token_ids)
        return sum(mark and not before for before, mark in itertools.pairwise([False, *marks]))

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that are the model's."""
        return len(self.token_ids) if self.sampled is None else sum(self.sampled)

    def of_row(self, row_id: int) -> Completion:
        """Return it under another id, its branches too."""
        branches = tuple(dataclasses.replace(branch, row_id=row_id) for branch in self.branches)
        return dataclasses.replace(self, row_id=row_id, branches=branches)

    def continued(self, turn: SampledTurn) -> Completion:
        """Return it with what the model has said next."""
        return dataclasses.replace(
            self,
            token_ids=[*self.token_ids, *turn.token_ids],
            logprobs=[*self.logprobs, *turn.logprobs],
            weight_versions=[*self.weight_versions, *turn.weight_versions],
            finish_reason=turn.finish_reason,
            sampled=None if self.sampled is None else [*self.sampled, *[True] * len(turn.token_ids)],
        )

    def answered(self, token_ids: Sequence[int]) -> Completion:
        """Return it with ``token_ids`` appended that the model did not sample."""
        count, before = len(token_ids), self.sampled or [True] * len(self.token_ids)
        return dataclasses.replace(
            self,
            token_ids=[*self.token_ids, *token_ids],
            logprobs=[*self.logprobs, *[0.0] * count],
            weight_versions=[*self.weight_versions, *self.weight_versions[-1:] * count],
            sampled=[*before, *[False] * count],
        )

    def cut(self, count: int) -> Completion:
        """Return it with its first ``count`` tokens alone."""
        prompt = len(self.prompt_token_ids or ())
        return dataclasses.replace(
            self,
            token_ids=self.token_ids[:count],
            logprobs=self.logprobs[:count],
            weight_versions=self.weight_versions[:count],
            sampled=self.sampled and self.sampled[:count],
            finish_reason="stop",
            expert_choices=None if self.expert_choices is None else self.expert_choices[: prompt + count],
        )

    def rewarded(self, reward: float) -> Completion:
        """Return it with a reward of its last turn, added to what that turn has."""
        rewards = [*(self.turn_rewards or ()), 0.0][: max(self.turns, 1)]
        return dataclasses.replace(self, turn_rewards=[*rewards[:-1], rewards[-1] + reward])

    def replied(self, reply: EnvironmentReply) -> Completion:
        """Return it up to the model's next turn, after a reply; the tokens of an opening are the prompt's."""
        rewarded = self if reply.reward is None else self.rewarded(reply.reward)
        if not self.token_ids:
            return dataclasses.replace(rewarded, prompt_token_ids=reply.token_ids or None, finish_reason="abort")
        assert not reply.branches, "what begins with another prompt is another completion"
        return dataclasses.replace(rewarded.answered(reply.token_ids or ()), finish_reason="abort")

    @property
    def is_whole(self) -> bool:
        """True if it is complete."""
        return self.finish_reason != "abort"

    @property
    def weight_version(self) -> int:
        """Oldest weight version of its tokens; 0 where there are none."""
        return min(self.weight_versions, default=0)


@dataclasses.dataclass(frozen=True)
class Request:
    """One trajectory to generate. ``row_id`` is the caller's name for it; the seed (0 or more) is the row's own.

    Neighbours with the same ``group_id`` are generated together, by one replica, which computes their prompt once.
    ``begun`` is what there is of the trajectory already; its tokens count among ``max_tokens``, which default to the
    sampling's and cannot be more. ``key`` names the trajectory over several generations, where it may be paused.
    """

    row_id: int
    prompt_token_ids: Sequence[int]
    seed: int
    group_id: int = 0
    begun: Completion | None = None
    max_tokens: int | None = None
    key: Hashable = None


@dataclasses.dataclass(frozen=True)
class GenerationRecord:
    """Counts and time of one call of ``generate`` on this replica."""

    seconds: float = 0.0
    steps: int = 0  # of the engine
    sampled_tokens: int = 0
    resumed: int = 0  # rows that were begun
    aborted: int = 0  # rows that were aborted
    paused: int = 0  # rows that were paused
    in_flight: float = 0.0  # mean over the steps of the rows that ran
    engine_seconds: float = 0.0  # in steps
    idle_seconds: float = 0.0  # of the engine, until an environment answered
    waiting_seconds: float = 0.0  # of all rows together, for their environment
    prompt_tokens: int = 0  # of requests to the engine, each turn's with all before it
    prefilled_tokens: int = 0  # of these, computed and not found in the cache
    verifications: int = 0  # of a row with drafted tokens, in a step
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of the drafted ones


def request_seed(seed: int, step: int, row: int) -> int:
    """Return the sampling seed of one trajectory: the same in every layout, unrelated between rows and steps."""
    digest = hashlib.blake2b(f"{seed}/{step}/{row}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF


class EnvironmentReply(NamedTuple):
    """Tokens that follow a completion, up to the beginning of the model's next turn, and the last turn's reward.

    At the opening the tokens are those of the whole prompt, or none where the request's stays.
    """

    token_ids: list[int] | None  # None where the response ends
    reward: float | None = None  # None where there are none; NaN where the response is to be left out
    branches: bool = False  # the tokens are a whole prompt, with which another branch of the trajectory begins
    max_tokens: int | None = None  # of the next turn
    kept: int | None = None  # how many tokens of the completion stay; None: all
    recorded: SampledTurn | None = None  # the next turn, where it was sampled before; None: the engine samples it


class Environment(Protocol):
    """Replies between the model's turns. Of a replica's ranks only the first asks and reads.

    Attributes:
        repeatable: the engine waits for all answers that it has asked for, and then goes on with all of them: what it
            computes together depends on no answer's speed.
        opens: it is asked before the model's first turn too, about a completion without tokens.
    """

    repeatable: bool
    opens: bool

    def goes_on(self, completion: Completion) -> bool:
        """Return whether it is asked about what the model has said, up to a stop token or its length; the same on all
        ranks of a replica."""
        ...

    def ask(self, completion: Completion) -> Future[Any]:
        """Begin to find the answer, and return at once."""
        ...

    def read(self, completion: Completion, answer: Any, /) -> EnvironmentReply | Future[Any]:
        """Return the reply to ``completion``, out of ``ask``'s result; or what has to come before that, to be read
        next."""
        ...


class RolloutEngine(Protocol):
    """One replica's share on this rank. All ranks of a replica make the same calls in the same order."""

    record: GenerationRecord
    """Of the latest generation."""

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
        """Return completions in the order of ``requests``; with an ``environment`` they may have several turns.

        With a ``queue`` of all groups this replica answers those that it claims, and there are completions of these
        only; what is aborted when enough groups are done comes as far as it went. Without one all are this replica's.

        With ``pauses`` it is not aborted: the engine keeps what it has computed, and a request of the same ``key`` with
        these tokens as its ``begun`` goes on there, if its group is among the first of the next generation. What else
        is paused is dropped then.

        As they finish, ``on_completion`` is called with each, and ``on_progress`` with (done, begun by this replica).

        Raises:
            RolloutError: a prompt or the sampling cannot be carried out.
            RuntimeError: there are no weights, since none came yet or the engine slept.
        """
        ...

    def expect(self, lengths: Sequence[int]) -> None:
        """Take the lengths of the latest responses in place of what it has learned itself; it admits groups by them."""
        ...

    def reset_prefix_cache(self) -> None:
        """Drop cached prefixes, so that the next generation does as one of a new engine would.

        Raises:
            RuntimeError: requests are running.
        """
        ...

    def drop_paused(self) -> None:
        """Drop requests that are paused and cached prefixes: resumed rows are computed anew, as by a new engine."""
        ...

    def parameters(self) -> dict[str, Tensor]:
        """Return the live storage of this rank's weights by the engine's names; weight sync writes to it in place."""
        ...

    def draft_parameters(self) -> dict[str, Tensor]:
        """Return the same of the model that drafts, without what it shares with the policy; empty where none does."""
        ...

    def weights_updated(self, version: int) -> None:
        """Drop cached prefixes since new weights are in place; completions carry ``version`` from now on.

        Paused requests keep what they have computed, which no request shares that begins from now on.
        """
        ...

    def sleep(self, keeps_weights: bool = False) -> None:
        """Give weights and cache back to the device, where the platform can; no generating until ``weights_updated``.

        Weights are lost that are not another's memory, unless ``keeps_weights``: then ``wake_weights`` brings them back
        from the host. The cache of paused requests comes back by ``wake_kv_cache``.
        """
        ...

    def wake_weights(self) -> None:
        """Take memory for the weights again; lost ones are to be written before the next generation."""
        ...

    def wake_kv_cache(self) -> None:
        """Take memory for the cache again."""
        ...

    def close(self) -> None:
        """End the engine."""
        ...
