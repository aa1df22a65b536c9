"""The activation xIELU beside transformers' own, whose gradients torch derives."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import XIELUActivation

from rlhf_megatron.models.xielu import xielu

# Both sides of 0 and of eps, where the branches meet, and where an exponential overflows or is 0.
EDGES = [-200.0, -3.0, -2e-6, -1e-6, -5e-7, -0.0, 0.0, 5e-7, 1e-6, 2.0, 200.0]


@pytest.mark.parametrize("alphas", [(0.8, 0.8), (0.05, 3.0)], ids=str)
def test_values_and_gradients_are_those_of_transformers(alphas: tuple[float, float]) -> None:
    theirs = XIELUActivation(*alphas, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    values = torch.cat([torch.tensor(EDGES), torch.randn(500, generator=generator)])
    weights = torch.randn(values.shape, generator=generator)
    inputs = [values.clone().requires_grad_(), theirs.alpha_p, theirs.alpha_n]
    wanted = theirs(inputs[0])
    wanted_gradients = torch.autograd.grad((wanted * weights).sum(), inputs)
    own = [each.detach().clone().requires_grad_() for each in inputs]
    found = xielu(*own, theirs.beta, theirs.eps)
    gradients = torch.autograd.grad((found * weights).sum(), own)
    torch.testing.assert_close(found, wanted)
    at_eps = values == theirs.eps  # torch halves the gradient of a minimum there
    assert at_eps.sum() == 1
    torch.testing.assert_close(gradients[0][~at_eps], wanted_gradients[0][~at_eps])
    torch.testing.assert_close(gradients[1:], wanted_gradients[1:])


def test_half_precision_is_rounded_once() -> None:
    numbers = [torch.tensor(number) for number in (0.3, -0.4, 0.5, -1e-6)]
    values = torch.randn(500, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(xielu(values, *numbers), xielu(values.float(), *numbers).bfloat16())
