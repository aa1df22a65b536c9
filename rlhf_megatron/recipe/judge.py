"""The ``judge`` section: a frozen language model that generates verdicts on responses, in engines of the job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from pydantic import Field, model_validator

from rlhf_megatron.recipe.placement import Ranks
from rlhf_megatron.recipe.rollout import LOWEST_TEMPERATURE, RolloutLayoutSection, RolloutSection
from rlhf_megatron.recipe.section import LARGEST_FLOAT, LARGEST_MEMORY_GB, Section

PROMPT_FIELDS = ("question", "response", "ground_truth")
# What str.format would take for a field; other braces, such as JSON's, are text.
_FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")


class JudgeSection(Section):
    """Frozen language model that generates a verdict on each response; the number in it is a reward."""

    weight: float = 1.0
    """Weight of its score, added to that of section reward (rule none: nothing)."""
    path: str
    """Folder of weights and tokenizer, or name on the hub."""
    revision: str | None = None
    """Of path on the hub; see model.revision."""
    tokenizer: str | None = None
    """Default: path."""
    chat_template: str | None = None
    """Jinja file in place of its tokenizer's."""
    prompt: str
    """The user's message to it, with {response}, and {question} and {ground_truth} where wanted."""
    verdict: str = r"(?i)score[^\w.-]*(-?(?:\d+(?:\.\d+)?|\.\d+))"
    """Regular expression whose one group is the score; the last match in the verdict counts."""
    score_range: list[float] | None = Field(default=None, min_length=2, max_length=2)
    """[lowest, highest]: mapped to 0 and 1, and a score outside is unparsable. Default: scores as they are."""
    unparsable_score: float | None = None
    """Where a verdict has no score, or a response is too long to judge. null: the row is masked in the loss."""
    temperature: float = Field(default=0.0, ge=0)
    """0: the likeliest tokens."""
    max_prompt_length: int = Field(gt=0)
    """Longest prompt in the judge's tokens, chat template included; longer ones are not judged."""
    max_response_length: int = Field(default=1024, gt=0)
    """Longest verdict in tokens."""
    ranks: Ranks | None = None
    """As for roles; default: rollout.ranks."""
    layout: RolloutLayoutSection = RolloutLayoutSection()
    """Degrees of parallelism."""
    sleep: bool = False
    """On GPUs of roles: weights in pinned host memory and no KV cache, except to judge."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of weights; default: model.dtype."""
    kv_cache_gb: float = Field(default=4.0, gt=0, le=LARGEST_MEMORY_GB)
    """KV cache per GPU, GB of 2^30 bytes."""
    max_num_seqs: int = Field(default=256, gt=0, le=2**16)
    """Per replica."""
    enforce_eager: bool = False
    """No CUDA graphs or compilation: faster start, slower generation."""

    @model_validator(mode="after")
    def _prompt_has_known_fields(self) -> JudgeSection:
        fields = _FIELD.findall(self.prompt)
        unknown = next((field for field in fields if field not in PROMPT_FIELDS), None)
        if unknown:
            known = ", ".join(f"{{{field}}}" for field in PROMPT_FIELDS)
            raise ValueError(f"prompt: {{{unknown}}} is no field; there are {known}")
        if "response" not in fields:
            raise ValueError("prompt: the judge would not see what it judges; put {response} into it")
        return self

    @model_validator(mode="after")
    def _verdict_has_one_group(self) -> JudgeSection:
        try:
            groups = re.compile(self.verdict).groups
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"verdict is not a regular expression: {error}") from None
        if groups != 1:
            raise ValueError(f"verdict has {groups} groups; give it one, around the score: (...); others are (?:...)")
        return self

    @model_validator(mode="after")
    def _scores_are_a_range(self) -> JudgeSection:
        if self.score_range is not None and not self.score_range[0] < self.score_range[1]:
            raise ValueError(f"score_range={self.score_range}: the first must be below the second")
        return self

    @model_validator(mode="after")
    def _temperature_is_sampled_at(self) -> JudgeSection:
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            raise ValueError(f"temperature={self.temperature:g} must be 0, or {LOWEST_TEMPERATURE} or more")
        return self

    def message(self, values: Mapping[str, str]) -> str:
        """Return the prompt with its fields replaced, once: braces in a value are text."""
        return _FIELD.sub(lambda match: values[match[1]], self.prompt)

    def score(self, verdict: str) -> float | None:
        """Return the score in a verdict; None where it has none, or one outside of ``score_range``."""
        matches = re.findall(self.verdict, verdict)
        try:
            score = float(matches[-1]) if matches else None
        except ValueError:
            return None
        if score is None or not abs(score) <= LARGEST_FLOAT:
            return None
        if self.score_range is None:
            return score
        lowest, highest = self.score_range
        return (score - lowest) / (highest - lowest) if lowest <= score <= highest else None

    @property
    def rollout(self) -> RolloutSection:
        """The settings of its engines, which are reproducible."""
        return RolloutSection(
            layout=self.layout,
            max_response_length=self.max_response_length,
            dtype=self.dtype,
            kv_cache_gb=self.kv_cache_gb,
            max_num_seqs=self.max_num_seqs,
            enforce_eager=self.enforce_eager,
            sleep=self.sleep,
            scheduling="static",
        )
