"""The loss scale of float16: it falls until gradients are finite, rises after a while, and is saved."""

from __future__ import annotations

import math

import torch

from rlhf_megatron.roles.loss_scale import LossScale


class Chunk:
    """What of Megatron's DistributedDataParallel is asked for."""

    def __init__(self, gradient: float) -> None:
        self.gradient = gradient

    def scale_gradients(self, factor: float) -> None:
        self.gradient *= factor


def test_what_is_scaled_is_unscaled_exactly() -> None:
    scale, chunk = LossScale(), Chunk(0.3 * 2.0**20)
    assert float(scale.scaled(torch.tensor(0.3))) == float(torch.tensor(0.3)) * scale.value
    scale.unscale([chunk])
    assert chunk.gradient == 0.3 * 2.0**20 / scale.value
    assert math.log2(scale.value).is_integer()


def test_it_falls_until_the_gradient_is_finite_and_stays() -> None:
    scale = LossScale()
    first = scale.value
    assert scale.was_too_high(math.inf) and scale.was_too_high(math.nan)
    assert scale.value == first / 256
    assert not scale.was_too_high(1.0) and scale.value == first / 256


def test_what_no_scale_makes_finite_changes_nothing() -> None:
    scale = LossScale()
    scale.was_too_high(math.inf)
    assert not scale.was_too_high(1.0)
    before, passes = scale.value, 1
    while scale.was_too_high(math.nan):
        passes += 1
        assert passes < 20
    assert scale.value == before


def test_it_rises_after_a_while_of_finite_gradients_and_goes_on_from_a_checkpoint() -> None:
    scale = LossScale()
    first = scale.value
    for _ in range(49):
        assert not scale.was_too_high(1.0)
    assert scale.value == first
    again = LossScale()
    again.load(scale.state())
    for each in (scale, again):
        each.was_too_high(1.0)
        assert each.value == 2 * first
    scale.load([2.0**40, 49])
    scale.was_too_high(1.0)
    assert scale.value == 2.0**40, "not without end: float32 holds the sums"
