"""Lengths of a step's rows, and what a model has to compute for them: worked out once for all layouts of a search."""

from __future__ import annotations

import functools
import math
from statistics import NormalDist, fmean

from rlhf_megatron.models import flops
from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.recipe import RLRecipe

_SIGMA = 0.6  # of the logarithm of a response's length, where the recipe does not know it


class RowLengths(tuple[float, ...]):
    """Lengths of rows, the same as these objects alone: all layouts of a search have those of one step, a million."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        """Return whether it is the same object."""
        return self is other

    @functools.cached_property
    def tokens(self) -> float:
        """All of them together."""
        return sum(self)

    @functools.cached_property
    def mean(self) -> float:
        """Mean length."""
        return fmean(self)


NO_ROWS, _ONE_TOKEN = RowLengths(), RowLengths([1])


@functools.lru_cache(maxsize=8)
def whole_rows(prompt: float, responses: RowLengths) -> RowLengths:
    """Return the lengths of rows with their prompts."""
    return RowLengths(prompt + response for response in responses)


@functools.lru_cache(maxsize=8)
def alike_rows(length: float, rows: int) -> RowLengths:
    """Return ``rows`` rows of one length."""
    return RowLengths([length] * rows)


@functools.lru_cache(maxsize=64)
def forward_flops(model: Architecture, rows: RowLengths, outputs: float, spared: RowLengths = NO_ROWS) -> float:
    """Return the operations of a forward pass over rows, as ``flops.forward_flops``."""
    return flops.forward_flops(model, rows, outputs, spared=spared)


@functools.lru_cache(maxsize=64)
def training_flops(model: Architecture, rows: RowLengths, outputs: float, frozen: bool, spared: RowLengths) -> float:
    """Return the operations of learning from rows, as ``flops.training_flops``."""
    return flops.training_flops(model, rows, outputs, frozen=frozen, spared=spared)


def lengths(recipe: RLRecipe, rows: int) -> tuple[float, RowLengths]:
    """Return (tokens of a prompt, of each response): evenly spaced quantiles of the distribution, cut at the
    longest."""
    drawn, longest = recipe.rollout.drawn_lengths, recipe.rollout.max_response_length
    mean, sigma = (drawn.mean, drawn.sigma) if drawn else (longest / 2, _SIGMA)
    return recipe.data.max_prompt_length / (1 if drawn else 2), _response_lengths(mean, sigma, longest, rows)


@functools.lru_cache(maxsize=8)
def _response_lengths(mean: float, sigma: float, longest: int, rows: int) -> RowLengths:
    spread = NormalDist(math.log(mean) - sigma**2 / 2, sigma) if sigma else None
    quantiles = ((row + 0.5) / rows for row in range(rows))
    return RowLengths(min(longest, math.exp(spread.inv_cdf(q)) if spread else mean) for q in quantiles)


@functools.lru_cache(maxsize=16)  # a plan asks for each token of each layout
def used_weights(model: Architecture) -> float:
    """Return weights that one token is multiplied with: all but the embedding."""
    return forward_flops(model, _ONE_TOKEN, 1) / 2


def routed_weights(model: Architecture, experts: float) -> float:
    """Return the weights of ``experts`` routed experts in all layers that have them."""
    if model.experts is None:
        return 0.0
    layers = sum(count for kind, count in model.kind_counts.items() if kind.feed_forward == "experts")
    return 3.0 * layers * experts * model.hidden * model.experts.feed_forward
