"""The section ``rollout.speculative``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlhf_megatron.recipe.optimizer import OptimizerSection
from rlhf_megatron.recipe.section import Section


class SpeculativeSection(Section):
    """Speculative decoding: drafts are text that was sampled before, or a small model's. What is sampled stays the
    same."""

    method: Literal["ngram", "suffix", "eagle3", "mtp"] = "suffix"
    """Drafts of text, from the response and its prompt (ngram) or its group's too (suffix); of the checkpoint's layer
    (mtp), or of a head (eagle3)."""
    num_speculative_tokens: int = Field(default=3, gt=0, le=64)
    """Longest draft."""
    match: int = Field(default=3, gt=0, le=64)
    """Draft what followed the last so many tokens."""
    max_running: int = Field(default=32, gt=0, le=2**16)
    """Draft while a replica runs at most so many sequences."""
    synthetic_acceptance_length: float | None = Field(default=None, ge=1)
    """For benchmarks: accepted tokens per step and sequence; samples are wrong."""

    path: str | None = None
    """eagle3: a head's folder, or name on the hub; default: a new one."""
    revision: str | None = None
    """As model.revision."""
    optimizer: OptimizerSection | None = None
    """mtp, eagle3: trains what drafts; default: frozen."""

    @property
    def has_draft_model(self) -> bool:
        """True if a model drafts, whose weights are written as the policy's are."""
        return self.method in ("eagle3", "mtp")

    @property
    def learns(self) -> bool:
        """True if that model is trained."""
        return self.has_draft_model and self.optimizer is not None

    @model_validator(mode="after")
    def _a_model_learns(self) -> SpeculativeSection:
        if self.optimizer is not None and not self.has_draft_model:
            raise ValueError(f"optimizer: method={self.method} drafts without a model that could learn; leave it out")
        if self.optimizer is not None and self.optimizer.overlap_grad_reduce:
            raise ValueError("optimizer.overlap_grad_reduce: what drafts learns in the actor's passes; leave it out")
        if self.path is not None and self.method != "eagle3":
            raise ValueError(f"path: method={self.method} has no head; leave it out, or set method to eagle3")
        return self

    @model_validator(mode="after")
    def _synthetic_length_is_reached(self) -> SpeculativeSection:
        asked, most = self.synthetic_acceptance_length, self.num_speculative_tokens + 1
        if asked is not None and asked > most:
            raise ValueError(
                f"synthetic_acceptance_length={asked:g}: a step gives at most num_speculative_tokens + 1 = {most} "
                "tokens; lower it"
            )
        return self
