"""The ``reward`` section: what a response is worth, and what happens when that cannot be found out."""

from __future__ import annotations

import re
from typing import Literal
from urllib.parse import parse_qsl, urlsplit

from pydantic import Field, model_validator

from rlhf_megatron.recipe.section import LARGEST_MEMORY_GB, LONGEST_SECONDS, MOST_WORKERS, Section, check_variable
from rlhf_megatron.redaction import is_secret_parameter

# Names of other metrics under reward/.
_TAKEN_NAMES = (
    "mean", "std", "latency_ms", "informative_group_fraction", "score_mean", "overlong_penalty_mean",
    "samples", "timeouts", "failures", "masked", "reward_model", "judge", "environment",
)  # fmt: skip


# What frames a request, or says what is in it, is the client's.
_HEADERS_OF_HTTP = (
    "host", "connection", "content-length", "content-type", "content-encoding", "transfer-encoding", "te", "trailer",
    "upgrade", "expect", "accept-encoding",
)  # fmt: skip


class RewardServiceSection(Section):
    """HTTP server that scores samples sent as JSON."""

    url: str
    """http:// or https://, for the POST."""
    samples_per_request: int = Field(default=1, gt=0)
    """Most samples in a request."""
    max_retries: int = Field(default=4, ge=0, le=1000)
    """Without an answer, or on 408, 425, 429, 5xx."""
    backoff_seconds: float = Field(default=0.5, gt=0, le=LONGEST_SECONDS)
    """Longest random wait before the first retry; doubles up to 30."""
    header: str = "Authorization"
    """Sent if header_environment is set."""
    header_environment: str | None = None
    """Variable with its value, such as "Bearer ..."."""

    @model_validator(mode="after")
    def _is_an_address_without_secrets(self) -> RewardServiceSection:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("url must begin with http:// or https:// and a host")
        _ = parts.port  # raises ValueError for one that is no number up to 65535
        if parts.username is not None or parts.password is not None:
            raise ValueError("url must hold no user or password; put the header's value into an environment variable")
        if any(is_secret_parameter(name) for name, _ in parse_qsl(parts.query, keep_blank_values=True)):
            raise ValueError("url must hold no credentials, as its query seems to; send a header (header_environment)")
        try:
            port = parts.port
        except ValueError as error:
            raise ValueError(f"url: {error}") from None
        if port == 0 or re.search(r"\s", self.url):
            raise ValueError("url has port 0 or blanks in it, which no address has")
        if not re.fullmatch(r"[A-Za-z0-9-]+", self.header) or self.header.lower() in _HEADERS_OF_HTTP:
            raise ValueError(f"header={self.header!r} is not the name of an HTTP header that authenticates")
        check_variable("header_environment", self.header_environment)
        if self.changed("header") and self.header_environment is None:
            raise ValueError("header: nothing would be sent in it; give header_environment too, or leave it out")
        return self


# The strongest first: no network, no other process and no file but Python's; no network; limits of time and memory.
Isolation = Literal["full", "network", "limits"]


class RewardCodeSection(Section):
    """Rule code: a response's program in a sandbox (docs/rewards.md#programs)."""

    score: Literal["fraction", "all"] = "fraction"
    """Of the test cases that pass; all: 1 or 0."""
    timeout_seconds: float = Field(default=5.0, gt=0, le=LONGEST_SECONDS)
    """Per test case; reward.timeout_seconds is that of all."""
    memory_limit_gb: float = Field(default=1.0, ge=0.125, le=4)
    """Of a program, Python included."""
    isolation: Isolation = "full"
    """Least to start with; network: programs may use your files; limits: the network too."""


class RewardSource(Section):
    """One way to score a response: a rule, a function or a service."""

    rule: Literal[
        "data_source",
        "gsm8k",
        "math",
        "dapo_math",
        "multiple_choice",
        "reasoning_gym",
        "code",
        "format",
        "length",
        "none",
    ] = "data_source"
    """data_source: by the row's; none: reward model, judge or environment alone."""
    pattern: str | None = None
    """format: regular expression of the whole response."""
    length_low: int = Field(default=0, ge=0)
    """length: score 0 up to this many tokens."""
    length_high: int | None = Field(default=None, gt=0)
    """length: score 1 from this many tokens."""
    function: str | None = None
    """"path/to/file.py:name", instead of a rule."""
    service: RewardServiceSection | None = None
    """HTTP server that scores samples, instead of a rule."""

    @model_validator(mode="after")
    def _is_one_whole_source(self) -> RewardSource:
        chosen = [self.rule != "data_source", self.function is not None, self.service is not None]
        if sum(chosen) > 1:
            raise ValueError("give one of rule, function and service; to add rewards up, list them in reward.parts")
        if (self.rule == "format") != (self.pattern is not None):
            raise ValueError("rule: format and pattern go together; give both or neither")
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except (re.error, OverflowError, RecursionError) as error:
                raise ValueError(f"pattern is not a regular expression: {error}") from None
        if (self.rule == "length") != (self.length_high is not None):
            raise ValueError("rule: length and length_high go together; give both or neither")
        if self.length_low and self.rule != "length":
            raise ValueError(f"length_low={self.length_low} is for rule length; it is {self.rule}, leave it out")
        if self.length_high is not None and self.length_low >= self.length_high:
            raise ValueError(f"length_low={self.length_low} must be below length_high={self.length_high}")
        return self


class RewardPartSection(RewardSource):
    """One of several summed rewards."""

    name: str = Field(pattern="^[A-Za-z][A-Za-z0-9_]*$")
    """Mean logged as reward/NAME."""
    weight: float = 1.0
    """Weight in the sum; negative: a penalty."""


class RewardSection(RewardSource):
    """Rewards (docs/rewards.md)."""

    parts: list[RewardPartSection] = Field(default=[])
    """Weighted sum. The first decides what is right in an evaluation."""
    on_failure: Literal["stop", "zero", "mask"] = "stop"
    """After a failed function or service: stop, score 0, or mask in the loss."""
    timeout_seconds: float = Field(default=10.0, gt=0, le=LONGEST_SECONDS)
    """Per sample, or request to a service."""
    workers: int = Field(default=2, gt=0, le=MOST_WORKERS)
    """Processes per replica, and as many per function."""
    memory_limit_gb: float = Field(default=16.0, gt=0, le=LARGEST_MEMORY_GB)
    """Per worker of a function, with children; killed above."""
    concurrency: int = Field(default=64, gt=0, le=2**16)
    """Concurrent samples per async worker, or requests to a service."""
    code: RewardCodeSection = RewardCodeSection()
    """Sandbox of rule code."""

    @model_validator(mode="after")
    def _parts_agree(self) -> RewardSection:
        if self.parts and (self.function or self.service or self.rule != "data_source"):
            raise ValueError("reward.parts stands instead of rule, function and service; put them into a part")
        if any(part.rule == "none" for part in self.parts):
            raise ValueError("reward.parts: rule none is no reward; leave that part out")
        if self.parts and not any(part.weight for part in self.parts):
            raise ValueError("reward.parts: all weights are 0, and so would be each reward; give one another")
        sources: list[RewardSource] = [*self.parts] or [self]
        rules = {source.rule for source in sources}
        if self.changed("code") and not rules & {"code", "data_source"}:
            raise ValueError("reward.code is for rule code, and no rule here is; leave it out")
        names = self.part_names
        for name in names:
            if names.count(name) > 1 or name in _TAKEN_NAMES:
                raise ValueError(f"reward.parts: the name {name!r} is taken; choose another")
        return self

    @property
    def part_names(self) -> list[str]:
        """Names of the parts in their order; none where there is a single reward."""
        return [part.name for part in self.parts]
