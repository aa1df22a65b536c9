"""The ``rollout`` section: how vLLM generates."""

from __future__ import annotations

import ipaddress
import itertools
import math
import random
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from rlhf_megatron.recipe.placement import Ranks
from rlhf_megatron.recipe.section import LARGEST_INTEGER, LARGEST_MEMORY_GB, LONGEST_SECONDS, MOST_WORKERS, Section
from rlhf_megatron.recipe.speculative import SpeculativeSection

# vLLM would sample at this one instead of a lower one, and the trainer not.
LOWEST_TEMPERATURE = 0.01

Quantization = Literal["fp8", "fp8_blockwise"]


class RolloutLayoutSection(Section):
    """Parallelism of the rollout."""

    tensor: int = Field(default=1, gt=0)
    """GPUs per vLLM replica."""
    expert_parallel: bool = False
    """Whole experts over a replica's GPUs; else shards of each."""
    data: int | None = Field(default=None, gt=0)
    """Replicas; default: as many as fit."""


class DrawnLengthsSection(Section):
    """Response lengths from a lognormal distribution."""

    mean: float = Field(gt=0, le=LARGEST_INTEGER)
    """In tokens, untruncated."""
    sigma: float = Field(default=0.0, ge=0, le=100)
    """Of the log length; 0: all have the mean."""

    def of_row(self, row: int) -> int:
        """Return the length of a row, 1 or more: of a step, or where responses go on after an update, of the run."""
        location = math.log(self.mean) - self.sigma**2 / 2
        return max(1, round(random.Random(row).lognormvariate(location, self.sigma)))


class ToolServerSection(Section):
    """An MCP server, which lists its tools itself."""

    command: list[str] = Field(default=[])
    """Program and arguments, started per trajectory at its first call; stdio."""
    url: str | None = None
    """Instead: http://127.0.0.1:PORT/mcp, on each generating host."""

    @model_validator(mode="after")
    def _is_one_server(self) -> ToolServerSection:
        if (not self.command) == (self.url is None):
            raise ValueError("tools: an MCP server has one of command and url; give one")
        if self.url is not None and not _is_on_loopback(self.url):
            raise ValueError(
                f"tools: url={self.url}: only http:// on the loopback is allowed; give http://127.0.0.1:PORT"
            )
        return self

    @property
    def specification(self) -> str:
        """The server in messages."""
        return self.url or " ".join(self.command)


def _is_on_loopback(url: str) -> bool:
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        is_here = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
    return parts.scheme == "http" and is_here


class MultiTurnSection(Section):
    """Multi-turn responses: a function, tools or an environment of yours replies between the model's turns."""

    function: str | None = None
    """path/to/file.py:function (default name: respond)."""
    tools: list[str | ToolServerSection] = Field(default=[])
    """Instead: functions (path/to/file.py:function), MCP servers ({command: [...]} or {url: ...})
    (docs/multi_turn.md#tools)."""
    tool_parser: str | None = None
    """vLLM's, such as hermes; needed with tools."""
    reasoning_parser: str | None = None
    """vLLM's, such as deepseek_r1; calls within reasoning are none."""
    environment: str | None = None
    """Instead of function: path/to/file.py:Class (default name: Environment), one instance per trajectory."""
    context: str | None = None
    """path/to/file.py:function (default name: context) that may rewrite the conversation before a further turn
    (docs/multi_turn.md#long-conversations)."""
    max_assistant_turns: int = Field(default=4, gt=1)
    """The last gets no reply; environments still score it."""
    max_answer_tokens: int = Field(default=1024, gt=0)
    """Longer replies are truncated. Part of max_response_length, not trained on."""
    timeout_seconds: float = Field(default=60.0, gt=0, le=LONGEST_SECONDS)
    """Per reply; a late or failed one ends the response (an environment's: not trained on)."""
    workers: int = Field(default=4, gt=0, le=MOST_WORKERS)
    """Processes per replica; with tools or an environment one per trajectory."""
    memory_limit_gb: float = Field(default=16.0, gt=0, le=LARGEST_MEMORY_GB)
    """Per process with children; killed above."""
    network: bool = True
    """false: no network for processes; needs network namespaces."""
    journal: bool | None = None
    """Log trajectories, so that a killed run continues them. Default: with checkpoints and scheduling queue."""

    @model_validator(mode="after")
    def _someone_replies(self) -> MultiTurnSection:
        if sum(map(bool, (self.function, self.environment, self.tools))) != 1:
            raise ValueError("multi_turn: give one of function, tools and environment")
        if not self.function and not self.context and self.changed("workers"):
            raise ValueError(f"workers={self.workers}: environments and tools have a process each; leave it out")
        return self

    @model_validator(mode="after")
    def _context_is_of_texts(self) -> MultiTurnSection:
        if self.context and self.tools:
            raise ValueError(
                f"context={self.context}: calls of tools are no plain messages; use function or environment, or leave "
                "it out"
            )
        return self

    @model_validator(mode="after")
    def _calls_are_read(self) -> MultiTurnSection:
        if self.tools and self.tool_parser is None:
            raise ValueError("tools: nothing reads the model's calls; set tool_parser to vLLM's, such as hermes")
        parsers = [] if self.tools else self.changed("tool_parser", "reasoning_parser")
        if parsers:
            raise ValueError(f"{parsers[0]}: it is read with tools alone; give tools, or leave it out")
        url = next((each.url for each in self.tool_servers if each.url), None)
        if url and not self.network:
            raise ValueError(f"network=false: the server at {url} is out of reach; start it by command, or use true")
        return self

    @property
    def tool_functions(self) -> list[str]:
        """The tools that are functions of files."""
        return [each for each in self.tools if isinstance(each, str)]

    @property
    def tool_servers(self) -> list[ToolServerSection]:
        """The MCP servers among the tools."""
        return [each for each in self.tools if not isinstance(each, str)]


class AgentSection(Section):
    """Agents: a program of yours plays each trajectory through an OpenAI-compatible endpoint."""

    function: str
    """path/to/file.py:function (default name: run) of base_url, api_key and row; returns a reward."""
    branches: Literal["all", "last"] = "all"
    """A rewritten history begins a branch. all: each is trained, with one advantage and weight per trajectory; or the
    last."""
    tool_parser: str | None = None
    """vLLM's, such as hermes; default: calls stay in the text."""
    reasoning_parser: str | None = None
    """vLLM's, such as deepseek_r1; default: reasoning stays in the text."""
    max_turns: int = Field(default=32, gt=0, le=LARGEST_INTEGER)
    """Answers per trajectory."""
    timeout_seconds: float = Field(default=600.0, gt=0, le=LONGEST_SECONDS)
    """Per trajectory; beyond it, or failed, left out of training."""
    memory_limit_gb: float = Field(default=16.0, gt=0, le=LARGEST_MEMORY_GB)
    """Per process with children; killed above."""
    journal: bool | None = None
    """Log answers, so that a killed run gives them again. Default: with checkpoints and scheduling queue."""


class PromptLengthSection(Section):
    """Sampling of prompts up to a length, beyond that of the entry before; what is not given is rollout's own."""

    up_to: int = Field(gt=0)
    """Longest prompt in tokens."""
    max_response_length: int | None = Field(default=None, gt=0)
    """At most rollout's."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus sampling."""
    top_k: int | None = Field(default=None, ge=-1)
    """-1: off."""

    @model_validator(mode="after")
    def _something_differs(self) -> PromptLengthSection:
        if self.max_response_length is None and self.top_p is None and self.top_k is None:
            raise ValueError(f"up_to={self.up_to}: nothing is set; give max_response_length, top_p or top_k")
        if self.top_k == 0:
            raise ValueError("top_k=0 would leave no token to sample; -1 is off")
        return self


class RolloutSection(Section):
    """vLLM's settings, under vLLM's names where it has them."""

    ranks: Ranks = "all"
    """As for roles. A replica takes neighbours."""
    steps_ahead: Literal[0, 1] = 0
    """1: one-step off-policy: own GPUs generate the next batch. Needs algorithm.rollout_correction or old_logprobs
    rollout."""
    layout: RolloutLayoutSection = RolloutLayoutSection()
    """Degrees of parallelism."""
    max_response_length: int = Field(gt=0)
    """Longest response in tokens."""
    multi_turn: MultiTurnSection | None = None
    """Your function replies between turns (docs/multi_turn.md)."""
    agent: AgentSection | None = None
    """Your program plays each trajectory (docs/agents.md)."""
    drawn_lengths: DrawnLengthsSection | None = None
    """For benchmarks: lognormal response lengths."""
    temperature: float = Field(default=1.0, gt=0)
    """Also of the trainer's logprobs; above 0."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling."""
    top_k: int = Field(default=-1, ge=-1)
    """-1: off."""
    by_prompt_length: list[PromptLengthSection] = Field(default=[])
    """By prompt length in training: the first entry that fits."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of weights; default: model.dtype."""
    quantization: Quantization | None = None
    """Linear layers (by rows, or blocks like actor.fp8) and experts in e4m3. Same needs as steps_ahead."""
    kv_cache_dtype: Literal["fp8"] | None = None
    """Keys and values in e4m3; default: dtype. Same needs as steps_ahead."""
    gpu_memory_utilization: float = Field(default=0.5, gt=0, le=1)
    """vLLM's share of each GPU's memory."""
    kv_cache_gb: float | None = Field(default=None, gt=0, le=LARGEST_MEMORY_GB)
    """KV cache per GPU; default: what the share leaves (CPUs: 0.0625)."""
    max_num_seqs: int = Field(default=256, gt=0, le=2**16)
    """Per replica."""
    max_num_batched_tokens: int | None = Field(default=None, gt=0, le=2**24)
    """Tokens per engine step."""
    enable_chunked_prefill: bool = True
    """Split long prefills; never on CPUs."""
    enable_prefix_caching: bool = True
    """Prefill a group's prompt once."""
    enforce_eager: bool = False
    """No CUDA graphs or compilation: faster start, slower decode."""
    share_weights: Literal["auto", "never"] = "auto"
    """auto: shards equal to the actor's are its memory, on the GPU, unless actor.offload.parameters; never: copies."""
    sleep: bool = True
    """Free KV cache and unshared weights during the update on shared GPUs; never with steps_ahead."""
    async_scheduling: bool = True
    """Schedule the next engine step during this one; never with speculative."""
    speculative: SpeculativeSection | None = None
    """Speculative decoding (docs/rollout.md#speculative-decoding)."""
    scheduling: Literal["queue", "static"] = "queue"
    """Replicas claim groups from one queue, or get fixed shares, bit-for-bit repeatable."""
    oversample: float = Field(default=1.0, ge=1, le=100)
    """Times the needed groups to start. With partial resume, 1: all that max_staleness allows."""
    partial: Literal["discard", "resume"] = "discard"
    """Responses still running when enough groups are done: abort, or pause until after the update (same needs as
    steps_ahead)."""
    max_staleness: int = Field(default=1, ge=1, le=8)
    """partial resume: most updates between a group's first token and its update."""

    @property
    def draft_method(self) -> str | None:
        """The kind of model that drafts; None: there is none."""
        return self.speculative.method if self.speculative and self.speculative.has_draft_model else None

    @property
    def updates_in_flight(self) -> int:
        """Over how many updates a group may be generated; 0: it is whole before the next."""
        return 0 if self.partial == "discard" else self.max_staleness - self.steps_ahead

    @property
    def groups_begun(self) -> float:
        """The groups that a step begins with, those that go on included, over the groups that it gives."""
        if self.oversample > 1 or not self.updates_in_flight:
            return self.oversample
        return self.updates_in_flight + 1.0  # see generation.staleness

    @model_validator(mode="after")
    def _slow_groups_can_wait(self) -> RolloutSection:
        if self.partial == "discard":
            if self.oversample > 1 and self.scheduling == "static":
                raise ValueError(
                    f"oversample={self.oversample:g} needs scheduling queue: with static, replicas know nothing of "
                    "each other's groups; use queue, partial: resume, or leave oversample out"
                )
            if self.max_staleness > 1:
                raise ValueError(
                    f"max_staleness={self.max_staleness}: with partial=discard nothing goes on after an update; set "
                    "partial: resume, or leave it out"
                )
        elif self.steps_ahead >= self.max_staleness:
            raise ValueError(
                f"max_staleness={self.max_staleness}: with steps_ahead=1 every group is an update old, and partial="
                "resume adds to that; raise it to 2"
            )
        elif self.oversample > self.updates_in_flight + 1:
            raise ValueError(
                f"oversample={self.oversample:g}: the last of so many groups would be older than max_staleness="
                f"{self.max_staleness}; lower it to {self.updates_in_flight + 1}, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _turns_are_of_one_generation(self) -> RolloutSection:
        if self.multi_turn is None and self.agent is None:
            return self
        if self.multi_turn and self.agent:
            raise ValueError("agent: with multi_turn two would reply to the model; leave one out")
        name = "multi_turn" if self.multi_turn else "agent"
        if self.partial == "resume":
            raise ValueError(f"partial=resume: with {name} what was given up begins anew; use discard")
        if self.drawn_lengths:
            raise ValueError(f"drawn_lengths: with {name} a turn ends where the model ends it; leave one out")
        return self

    @model_validator(mode="after")
    def _draft_models_are_in_full(self) -> RolloutSection:
        if self.quantization and self.speculative and self.speculative.has_draft_model:
            raise ValueError(
                f"speculative.method={self.speculative.method}: with quantization={self.quantization} the model that "
                "drafts would be quantized too, which is not known to work; leave one out"
            )
        return self

    @model_validator(mode="after")
    def _temperature_is_sampled_at(self) -> RolloutSection:
        if self.temperature < LOWEST_TEMPERATURE:
            raise ValueError(f"temperature={self.temperature:g} must be {LOWEST_TEMPERATURE} or more")
        return self

    @model_validator(mode="after")
    def _sequences_have_tokens(self) -> RolloutSection:
        most = self.max_num_batched_tokens
        if most is not None and most < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={most} is below max_num_seqs={self.max_num_seqs}, each of which takes a token "
                "of an engine step; change one"
            )
        return self

    @model_validator(mode="after")
    def _lengths_rise(self) -> RolloutSection:
        entries, longest = self.by_prompt_length, self.max_response_length
        for before, entry in itertools.pairwise(entries):
            if entry.up_to <= before.up_to:
                raise ValueError(
                    f"by_prompt_length: up_to={entry.up_to} follows {before.up_to}, which prompts fit first; let them "
                    "rise"
                )
        beyond = next((each for each in entries if (each.max_response_length or 0) > longest), None)
        if beyond:
            raise ValueError(
                f"by_prompt_length: max_response_length={beyond.max_response_length} of up_to={beyond.up_to} is above "
                f"rollout.max_response_length={longest}; raise that, or lower it"
            )
        if entries and (self.multi_turn or self.agent):
            name = "multi_turn" if self.multi_turn else "agent"
            raise ValueError(f"by_prompt_length: with {name} prompts grow from turn to turn; leave one out")
        return self

    @model_validator(mode="after")
    def _top_k_is_a_number(self) -> RolloutSection:
        if self.top_k == 0:
            raise ValueError("top_k=0 would leave no token to sample; -1 is off")
        return self
