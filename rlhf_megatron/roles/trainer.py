"""The training side of a role: gradients, Megatron's optimizer, learning rate, loss scale, and skipped steps.

Which passes give the gradients, and towards what, is not known here.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from rlhf_megatron.monitor.stopwatch import Stopwatch
from rlhf_megatron.recipe import OptimizerSection
from rlhf_megatron.roles.learning_rate import learning_rate
from rlhf_megatron.roles.loss_scale import LossScale
from rlhf_megatron.roles.megatron_optimizer import make_optimizer
from rlhf_megatron.roles.model_shard import ModelShard
from rlhf_megatron.roles.parameter_gather import ParameterGather
from rlhf_megatron.runtime import faults
from rlhf_megatron.runtime.finite import describe_nonfinite, nonfinite_gradients


class Trainer:
    """Trainer of what learns of a ``ModelShard``; every call is collective over the role's ranks.

    Attributes:
        chunks: Megatron's DistributedDataParallel, around the model's chunks or those of its adapters.
        optimizer: Megatron's. Some of its state may be off the device between steps (see ``RoleMemory``).
        moments_dtype: of Adam's moments between steps (see ``StreamedState``).
        keeps_remainders: whether those are all that master weights are between steps.
        steps_taken: optimizer steps so far, skipped ones included.
        loss_scale: in float16, else None.
    """

    def __init__(self, section: OptimizerSection, shard: ModelShard, dtype: str, training_steps: int) -> None:
        """Set up; ``training_steps``: of the whole run, where the learning rate falls over all of them."""
        self._section, self._training_steps = section, training_steps
        self._trainable, self._role_group = shard.trainable, shard.groups.intra_dist_opt
        self.moments_dtype: torch.dtype = getattr(torch, section.state_dtype)
        self.keeps_remainders = section.master_remainders
        self._gradient_sync = Stopwatch()
        self.chunks, self.optimizer = make_optimizer(
            section,
            shard.config,
            self._trainable.chunks,
            self._trainable.groups,
            "float32" if shard.adapters else dtype,
            self._gradient_sync,
            shard.adapters is not None,
        )
        self._gather = ParameterGather(self.chunks) if section.overlap_param_gather else None
        self.loss_scale = LossScale() if dtype == "float16" else None
        config: Any = shard.config
        config.grad_scale_func = self.loss_scale.scaled if self.loss_scale else None
        self.steps_taken = 0
        self._bad_gradients = ""

    def set_learning_rate(self) -> float:
        """Give the optimizer the learning rate of the next step, and return it."""
        rate = learning_rate(self.steps_taken, self._section, self._training_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def zero_gradients(self) -> None:
        """Clear the gradients, for the passes of a step to add theirs."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        faults.corrupt_gradients(self._trainable.module.parameters())

    def gradient_norm(self) -> float:
        """Hand the gradients to the optimizer, and return the norm of all; not finite where one of them is not."""
        if self.loss_scale:
            self.loss_scale.unscale(self.chunks)
        # Megatron looks for infinities under a loss scale of its own only.
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def scale_was_too_high(self, grad_norm: float) -> bool:
        """Return whether the passes are to be made again, with a lower loss scale, which is set."""
        return self.loss_scale is not None and self.loss_scale.was_too_high(grad_norm)

    def step(self, grad_norm: float) -> bool:
        """Take the optimizer's step, and return whether it did: not where the norm is not finite or too high."""
        highest = self._section.skip_grad_norm or math.inf
        taken = math.isfinite(grad_norm) and grad_norm <= highest
        if taken:
            self.optimizer.step()
            faults.corrupt_weights(self._trainable.module.parameters())
            if self._gather:
                self._gather.start()
        elif math.isfinite(grad_norm):
            self._bad_gradients = f"its norm {grad_norm:.4g} is above optimizer.skip_grad_norm={highest:g}"
        else:
            parameters = self._trainable.module.named_parameters()
            bad = nonfinite_gradients((name.replace("/", "."), parameter) for name, parameter in parameters)
            self._bad_gradients = "not finite: " + describe_nonfinite(bad, self._role_group)
        self.steps_taken += 1
        return taken

    def settle(self) -> None:
        """Wait for weights that are on their way from other ranks, which only passes do by themselves."""
        if self._gather:
            self._gather.finish()

    def take_bad_gradients(self) -> str:
        """Return why the last skipped step since the last call was skipped, or ""."""
        reason, self._bad_gradients = self._bad_gradients, ""
        return reason

    def take_gradient_sync_ms(self) -> float:
        """Return the milliseconds that this rank has only summed its gradients with others' since the last call, the
        wait for these included; waits for the device."""
        return self._gradient_sync.take()
