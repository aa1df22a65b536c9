"""The ``batch`` section: how much a step takes. Every size has its unit in its name."""

from __future__ import annotations

from pydantic import Field, model_validator

from rlhf_megatron.recipe.section import Section

MOST_ROWS = 2**24  # of a step; each is on every rank for a moment


class BatchSection(Section):
    """Sizes of one step over all GPUs."""

    prompts_per_step: int = Field(gt=0, le=2**20)
    """sft: rows; reward_modeling: pairs."""

    @property
    def rows_per_prompt(self) -> int:
        """Responses to each prompt, or pairs."""
        return 1

    @property
    def prompts_per_update(self) -> int:
        """Prompts of one optimizer step."""
        return self.prompts_per_step

    @property
    def passes(self) -> int:
        """Passes over a step's batch."""
        return 1

    @property
    def minibatches_per_step(self) -> int:
        """Optimizer steps in one pass over a step's batch."""
        return self.prompts_per_step // self.prompts_per_update

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a role in one step of the run."""
        return self.minibatches_per_step * self.passes


class GroupedBatchSection(BatchSection):
    """Sizes of one step over all GPUs."""

    responses_per_prompt: int = Field(default=1, gt=0, le=2**16)
    """GRPO's group size."""
    minibatch_prompts: int | None = Field(default=None, gt=0)
    """Prompts per optimizer step; default: all."""
    epochs_per_step: int = Field(default=1, gt=0)
    """Passes over a step's batch."""

    @model_validator(mode="after")
    def _minibatches_are_whole(self) -> GroupedBatchSection:
        if self.minibatch_prompts is not None and self.prompts_per_step % self.minibatch_prompts:
            raise ValueError(
                f"minibatch_prompts={self.minibatch_prompts} must divide prompts_per_step={self.prompts_per_step}"
            )
        rows = self.prompts_per_step * self.responses_per_prompt
        if rows > MOST_ROWS:
            raise ValueError(
                f"prompts_per_step={self.prompts_per_step} x responses_per_prompt={self.responses_per_prompt} = "
                f"{rows:,} rows; at most {MOST_ROWS:,} are a step"
            )
        return self

    @property
    def rows_per_prompt(self) -> int:
        """See BatchSection."""
        return self.responses_per_prompt

    @property
    def prompts_per_update(self) -> int:
        """See BatchSection."""
        return self.minibatch_prompts or self.prompts_per_step

    @property
    def passes(self) -> int:
        """See BatchSection."""
        return self.epochs_per_step
