"""The linear layers of a rank's experts, each a grouped product: the tokens of every expert by its own matrix.

Megatron's own have a parameter for each expert, and Transformer Engine a product for each expert's gradient: with
hundreds of them the host takes longer than the GPU. Here parameters hold the matrices of many experts behind each
other (``mixture.stack_sizes``), and products are torch's ``grouped_mm``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from rlhf_megatron.kernels.grouped_gradient import add_grouped_gradient
from rlhf_megatron.models.families.mixture import stack_sizes

_ALIGNED_BYTES = 16  # of which grouped_mm asks every row to be a multiple
_HOPPER = 9  # major compute capability


class _Stack(NamedTuple):
    """Experts whose matrices are one parameter, and their tokens."""

    tokens: Sequence[int]
    rows: slice  # of the tokens of all experts
    ends: Tensor  # [experts] int32: where each one's tokens end among those of the stack


class ExpertLinear(torch.nn.Module):
    """y = x W^T + b, for each expert of this rank by its own W and b.

    Attributes:
        weight0, weight1 and so on: [experts x rows, columns] each, in ``config.params_dtype``, not yet filled in.
        bias: [experts of the rank x rows], or None.
        fuse_wgrad_accumulation: whether a weight's gradient is added to its ``main_grad``, as Transformer Engine's
            layers do under this name.
    """

    cut_by_columns = False  # over the ranks that share an expert; by rows otherwise
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        experts: int,
        columns: int,
        rows: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        tp_comm_buffer_name: str | None,
        pg_collection: Any,
        name: str | None = None,
    ) -> None:
        """Takes what Megatron's ``TEGroupedMLP`` gives its layers; ``columns`` and ``rows`` are of a whole expert."""
        super().__init__()
        parts = pg_collection.expt_tp.size()
        rows, columns = (rows, columns // parts) if self.cut_by_columns else (rows // parts, columns)
        self.experts, self.rows, self.adds_bias = experts, rows, not skip_bias_add
        self.fuse_wgrad_accumulation = False
        self._counts = stack_sizes(experts, rows, columns)
        shapes: dict[str, tuple[int, ...]] = {
            f"weight{stack}": (count * rows, columns) for stack, count in enumerate(self._counts)
        }
        sizes = [math.prod(shape) for shape in shapes.values()]
        device = torch.device("cpu" if config.use_cpu_initialization else "cuda")
        behind_each_other = torch.empty(sum(sizes), dtype=config.params_dtype, device=device).split(sizes)
        parameters = {
            name: torch.nn.Parameter(own.view(shapes[name]))
            for name, own in zip(shapes, behind_each_other, strict=True)
        }
        # The last one first: in this order Megatron's buffers too have one behind the other.
        for name_of_parameter in reversed(parameters):
            self.register_parameter(name_of_parameter, parameters[name_of_parameter])
        biases = torch.empty(experts * rows, dtype=config.params_dtype, device=device)
        self.register_parameter("bias", torch.nn.Parameter(biases) if bias else None)
        # Megatron's marks: of gradients that are summed over the ranks with the same experts, and of what is cut.
        own_groups = (
            config.expert_model_parallel_size > 1
            or config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        )
        marked: Iterator[tuple[str, Any]] = self.named_parameters()
        for name_of_parameter, parameter in marked:
            parameter.allreduce = not own_groups
            parameter.tensor_model_parallel = name_of_parameter != "bias" or not self.cut_by_columns
            if parameter.tensor_model_parallel:
                parameter.partition_dim, parameter.partition_stride = int(self.cut_by_columns), 1

    def weights(self) -> list[torch.nn.Parameter]:
        """Returns the matrices of the experts, in their order; in memory one behind the other, as vLLM has them."""
        return [getattr(self, f"weight{stack}") for stack in range(len(self._counts))]

    def forward(self, inputs: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Sequence[Tensor] | None]:
        """Returns ([t, rows], the biases that the caller is to add, by expert); ``inputs`` [t, columns] by expert."""
        stacks = list(_stacks(self._counts, tokens, inputs.device))
        outputs: Tensor = _GroupedProducts.apply(  # type: ignore[no-untyped-call]
            inputs, stacks, self.fuse_wgrad_accumulation, *self.weights()
        )
        if self.bias is None:
            return outputs, None
        biases = self.bias.view(self.experts, self.rows).unbind()
        if not self.adds_bias:
            return outputs, biases
        return torch.cat([own + bias for own, bias in zip(outputs.split(list(tokens)), biases, strict=True)]), None


class ExpertRows(ExpertLinear):
    """The first linear layer: gate and up."""


class ExpertColumns(ExpertLinear):
    """The second linear layer: down."""

    cut_by_columns = True


class ExpertPairs(ExpertRows):
    """The first linear layer of experts in whose matrix the rows of gate and up follow each other pair by pair.

    Such weights are held in the order of checkpoints and of vLLM; what they make is put in Megatron's, gates first.
    """

    def forward(self, inputs: Tensor, tokens: Sequence[int]) -> tuple[Tensor, None]:
        """See ExpertLinear."""
        outputs, _ = super().forward(inputs, tokens)
        return gates_first(outputs), None


def gates_first(values: Tensor) -> Tensor:
    """[..., gate, up, gate, up, ...] -> [..., all gates, all ups]."""
    return values.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def in_pairs(values: Tensor) -> Tensor:
    """Return the inverse of ``gates_first``."""
    return values.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def _stacks(counts: Sequence[int], tokens: Sequence[int], device: torch.device) -> Iterator[_Stack]:
    """Yield the stacks of ``counts`` experts, of which each has as many ``tokens``."""
    per_stack, first = [], 0
    for count in counts:
        per_stack.append(tokens[first : first + count])
        first += count
    ends = torch.cat([torch.tensor(own, dtype=torch.int64).cumsum(0) for own in per_stack])
    on_device = ends.to(torch.int32).to(device, non_blocking=True).split(list(counts))
    begin = 0
    for own, own_ends in zip(per_stack, on_device, strict=True):
        yield _Stack(own, slice(begin, begin + sum(own)), own_ends)
        begin += sum(own)


class _GroupedProducts(torch.autograd.Function):
    """[t, columns] -> [t, rows], stack by stack."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, stacks: Sequence[_Stack], fused: bool, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.stacks, ctx.fused, ctx.weights = stacks, fused, weights  # which have their main_grad
        return _joined(
            [
                _product(inputs[stack.rows], _matrices(weight, stack).transpose(-2, -1), stack)
                for stack, weight in zip(stacks, weights, strict=True)
            ]
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        [inputs] = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_inputs: list[Tensor] = []
        of_weights: list[Tensor | None] = []
        for number, (stack, weight) in enumerate(zip(ctx.stacks, ctx.weights, strict=True)):
            own = gradient[stack.rows]
            if ctx.needs_input_grad[0]:
                of_inputs.append(_product(own, _matrices(weight, stack), stack))
            asked = ctx.needs_input_grad[3 + number]
            of_weights.append(_weight_gradient(weight, own, inputs[stack.rows], stack, ctx.fused) if asked else None)
        return _joined(of_inputs) if of_inputs else None, None, None, *of_weights


def _matrices(weight: Tensor, stack: _Stack) -> Tensor:
    """[experts, rows, columns]."""
    return weight.view(len(stack.tokens), -1, weight.shape[1])


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _product(values: Tensor, matrices: Tensor, stack: _Stack) -> Tensor:
    """[t, n], of ``values`` [t, m] and ``matrices`` [experts, m, n]."""
    if _can_be_grouped(values, *matrices.shape[1:]):
        return grouped_mm(values, matrices, offs=stack.ends)
    parts = zip(values.split(list(stack.tokens)), matrices, strict=True)
    return torch.cat([own @ matrix for own, matrix in parts])


def _weight_gradient(weight: Any, gradient: Tensor, inputs: Tensor, stack: _Stack, fused: bool) -> Tensor:
    """Return the gradient of ``weight``; with ``fused`` it is in its ``main_grad`` then, and nobody reads this one."""
    if fused:
        total = _matrices(weight.main_grad, stack)
        add_grouped_gradient(total, gradient, inputs, stack.tokens, stack.ends)
        weight.grad_added_to_main_grad = True
        return torch.empty_like(weight)  # for Megatron's hook, which counts it and drops it
    if _can_be_grouped(inputs, gradient.shape[1], inputs.shape[1]):
        return grouped_mm(gradient.T, inputs, offs=stack.ends).view(weight.shape)
    parts = zip(gradient.split(list(stack.tokens)), inputs.split(list(stack.tokens)), strict=True)
    return torch.cat([own.T @ values for own, values in parts])


def _can_be_grouped(values: Tensor, *widths: int) -> bool:
    """Return whether torch multiplies all experts together, and has no loop of its own that waits for a GPU."""
    if values.is_cuda:
        major, _ = torch.cuda.get_device_capability(values.device)
        if major < _HOPPER or values.dtype != torch.bfloat16:
            return False
    return len(values) > 0 and all(width * values.itemsize % _ALIGNED_BYTES == 0 for width in widths)
