"""The section ``optimizer`` of the roles that learn: AdamW, its schedule, and what of it is sharded and overlapped."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlhf_megatron.recipe.section import LARGEST_FLOAT, Section


class OptimizerSection(Section):
    """AdamW and its schedule, in optimizer steps."""

    learning_rate: float = Field(gt=0)
    """Peak."""
    min_learning_rate: float = Field(default=0.0, ge=0)
    """At the end of decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay after warmup."""
    warmup_steps: int = Field(default=0, ge=0)
    """Linear."""
    decay_steps: int | None = Field(default=None, gt=0)
    """End of decay; default: the last."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled; not of norms and biases."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Adam's epsilon."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Largest global norm; 0: off."""
    skip_grad_norm: float | None = Field(default=None, gt=0)
    """Skip steps with a larger norm."""
    distributed: bool = True
    """Shard optimizer state over data-parallel ranks."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of Adam's moments between steps; bfloat16 rounds stochastically."""
    master_remainders: bool = False
    """Between steps, master weights as what bfloat16 lacks."""
    overlap_grad_reduce: bool = False
    """Sum gradients during the backward pass."""
    overlap_param_gather: bool = False
    """Gather weights in the next passes."""

    @model_validator(mode="after")
    def _first_step_fits(self) -> OptimizerSection:
        if self.learning_rate > LARGEST_FLOAT * (1 - self.beta1):
            raise ValueError(
                f"learning_rate={self.learning_rate:g}: Adam's first step, learning_rate / (1 - beta1), is beyond "
                "float32; lower it"
            )
        return self

    @model_validator(mode="after")
    def _only_sharded_state_is_narrow(self) -> OptimizerSection:
        for name in ("state_dtype", "master_remainders"):
            if self.changed(name) and not self.distributed:
                value = getattr(self, name)
                raise ValueError(f"{name}={value} needs optimizer.distributed: leave out distributed=false")
        return self

    @model_validator(mode="after")
    def _only_sharded_weights_are_gathered(self) -> OptimizerSection:
        if self.overlap_param_gather and not self.distributed:
            raise ValueError("overlap_param_gather=True needs optimizer.distributed: leave out distributed=false")
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise ValueError("overlap_param_gather=True needs overlap_grad_reduce, whose buckets it gathers; set it")
        return self

    @model_validator(mode="after")
    def _weights_remain(self) -> OptimizerSection:
        if self.learning_rate * self.weight_decay >= 1:
            raise ValueError(
                f"weight_decay={self.weight_decay:g} x learning_rate={self.learning_rate:g} takes all of each weight "
                "away in a step; lower one"
            )
        return self

    @model_validator(mode="after")
    def _schedule_falls(self) -> OptimizerSection:
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(f"min_learning_rate={self.min_learning_rate} is above learning_rate={self.learning_rate}")
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(f"decay_steps={self.decay_steps} must be above warmup_steps={self.warmup_steps}")
        falling = self.changed("min_learning_rate", "decay_steps") if self.schedule == "constant" else []
        if falling:
            key = falling[0]
            raise ValueError(f"{key}={getattr(self, key)} is for schedules that fall; it is constant, leave it out")
        return self
