"""A feed-forward layer of Gemma 4 with experts: a dense one and a mixture, whose normed outputs are added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from rlhf_megatron.models.router import ScoreRouter


class DenseAndExperts(MoELayer):
    """Megatron's mixture, whose shared expert is the dense layer; each of the two has a norm before and after it.

    The router reads what comes in as it is.
    """

    def __init__(self, config: Any, *arguments: Any, norm: Callable[..., Any], **options: Any) -> None:
        super().__init__(config, *arguments, **options)

        def normed() -> Any:
            return norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

        self.before_dense, self.after_dense = normed(), normed()
        self.before_experts, self.after_experts = normed(), normed()

    def shared_experts_compute(self, hidden_states: Tensor) -> Tensor:
        """Return the dense layer's part of the output."""
        output: Tensor = self.after_dense(super().shared_experts_compute(self.before_dense(hidden_states)))
        return output

    def preprocess(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Any:
        """See MoELayer."""
        return super().preprocess(self.before_experts(hidden_states), probs, routing_map)

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """Return the sum of both parts."""
        of_experts: Tensor = self.after_experts(super().postprocess(output, None))
        return of_experts if shared_expert_output is None else of_experts + shared_expert_output


class NormedRouter(ScoreRouter):
    """A router of normed hidden states, times the learned ``scale`` and hidden^-0.5; experts' weights are multiplied
    with ``expert_scale``, which is learned too."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.scale, self.expert_scale = self._ones(self.config.hidden_size), self._ones(self._experts.count)

    def _ones(self, size: int) -> torch.nn.Parameter:
        ones = torch.nn.Parameter(torch.ones(size, dtype=self.weight.dtype, device=self.weight.device))
        ones.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]  # Megatron sums these
        return ones

    def gating(self, input: Tensor) -> Tensor:
        """Return the logits [s, 1, experts] of hidden states; the norm is computed in float32."""
        size = input.shape[-1:]
        normed = functional.rms_norm(input.float(), size, eps=self.config.layernorm_epsilon).type_as(input)
        logits: Tensor = super().gating(normed * self.scale * size[0] ** -0.5)
        return logits

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See ScoreRouter."""
        weights, chosen = super().routing(logits, padding_mask)
        return weights * self.expert_scale, chosen
