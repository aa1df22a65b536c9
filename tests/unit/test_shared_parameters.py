"""Parameters give up memory that views will take, and only those that nobody writes before."""

from __future__ import annotations

import torch

from rlhf_megatron.compat.vllm.shared_weights import parameters_without_memory


class Layer(torch.nn.Module):
    """As vLLM makes its layers."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(shape))


def test_only_parameters_of_given_shapes_that_are_not_filled_later_give_up_memory() -> None:
    registration = parameters_without_memory({torch.Size((64, 256))})
    try:
        given_up, of_another_shape, filled = Layer(64, 256), Layer(256, 64), torch.nn.Linear(256, 64)
    finally:
        registration.remove()
    assert given_up.weight.untyped_storage().nbytes() == 0
    assert of_another_shape.weight.untyped_storage().nbytes() == 256 * 64 * 4
    assert filled.weight.abs().max() > 0 and filled.weight.isfinite().all()
    assert Layer(64, 256).weight.untyped_storage().nbytes() == 64 * 256 * 4
