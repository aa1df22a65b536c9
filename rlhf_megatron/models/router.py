"""Routers that choose experts by more than a softmax of products: sigmoid scores, biases, groups of experts.

The formulas are transformers' (DeepSeek-V2, arXiv 2405.04434; DeepSeek-V3, arXiv 2412.19437), in the logits' own type.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from rlhf_megatron.models.description import Experts, Routing


class ScoreRouter(TopKRouter):
    """Megatron's router with the choice of ``experts.routing``.

    Correction biases are a parameter without a gradient, so that they are loaded, regathered, saved and exported as any
    other: Megatron's own are a buffer, which it moves after every step.
    """

    expert_bias: Tensor | None

    def __init__(self, *arguments: Any, experts: Experts, **options: Any) -> None:
        super().__init__(*arguments, **options)
        assert experts.routing is not None
        self._experts, self._routing = experts, experts.routing
        if self._routing.corrected:
            del self.expert_bias  # None, no parameter
            biases = torch.zeros(experts.count, dtype=torch.float32, device=self.weight.device)
            self.expert_bias = torch.nn.Parameter(biases, requires_grad=False)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map logits [s, 1, experts] -> weights and a map of the chosen, both [s, experts]."""
        scores = expert_scores(logits.flatten(0, -2), self._routing)
        chosen = chosen_experts(scores, self.expert_bias, self._routing, self._experts.chosen)
        if self.router_replay is not None:
            chosen = self.router_replay.taken(chosen)
        weights = scores.gather(1, chosen)
        if self._experts.normalized:
            total = weights.sum(-1, keepdim=True)
            # Softmax scores of experts that a bias has chosen may all be next to nothing.
            weights = weights / (total + 1e-20 if self._routing.score == "sigmoid" else total.clamp(min=1e-12))
        weights = weights * self._routing.scale
        return torch.zeros_like(scores).scatter(1, chosen, weights), torch.zeros_like(scores).scatter(1, chosen, 1) > 0

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Keep correction biases in float32 where a module is cast: a step of theirs is finer than bfloat16's
        digits."""
        kept = None if self.expert_bias is None else self.expert_bias.data
        super()._apply(fn, recurse)
        if kept is not None and self.expert_bias is not None:
            self.expert_bias.data = kept.to(self.weight.device)
        return self


class BiasedRouter(TopKRouter):
    """Megatron's router with a bias, as gpt-oss has one.

    Megatron has Transformer Engine multiply and add it at once, with numbers of 16 bits and a result of 32. That reads
    the bias as numbers of 32 bits, and past its end (Transformer Engine 2.20, TransformerEngine#3562).
    """

    def gating(self, input: Tensor) -> Tensor:
        """Return the logits [s, 1, experts] of hidden states, in the type of ``moe_router_dtype``."""
        dtype = {"fp32": torch.float32, "fp64": torch.float64}[self.config.moe_router_dtype]
        logits: Tensor = router_gating_linear(input, self.weight, None, dtype)
        return logits + self.bias.to(dtype)


def expert_scores(logits: Tensor, routing: Routing) -> Tensor:
    """Return the scores of [tokens, experts]."""
    return logits.sigmoid() if routing.score == "sigmoid" else logits.softmax(-1)


def chosen_experts(scores: Tensor, bias: Tensor | None, routing: Routing, count: int) -> Tensor:
    """Return the indices [tokens, count] of the experts with the highest scores and ``bias``, which only choose.

    With groups they are of the ``chosen_groups`` best alone; a group is as good as its best expert or its best two.
    """
    scores = scores.detach() if bias is None else scores.detach() + bias
    if routing.chosen_groups < routing.groups:
        by_group = scores.unflatten(-1, (routing.groups, -1))
        best = by_group.topk(min(routing.counted_of_group, by_group.size(-1)), dim=-1).values.sum(-1)
        kept = torch.zeros_like(best).scatter(1, best.topk(routing.chosen_groups, dim=-1).indices, 1) > 0
        scores = by_group.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    return scores.topk(count, dim=-1).indices
