"""The linear layers of a rank's experts, each a grouped product: the tokens of every expert by its own matrix.

Megatron's own have a parameter for each expert, and Transformer Engine a product for each expert's gradient: with
hundreds of them the host takes longer than the GPU. Here parameters hold the matrices of many experts behind each
other (``mixture.stack_sizes``), and products are torch's ``grouped_mm``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from rlhf_megatron.kernels.grouped_gradient import add_grouped_gradient
from rlhf_megatron.models.families.mixture import stack_sizes

_ALIGNED_BYTES = 16  # of which grouped_mm asks every row to be a multiple
_HOPPER = 9  # major compute capability


class _Tokens(NamedTuple):
    """The tokens of some experts that follow each other."""

    counts: Sequence[int]  # of each expert
    rows: slice  # among the tokens of all experts
    ends: Tensor  # [experts] int32: where each one's tokens end in ``rows``


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
        """Take what Megatron's ``TEGroupedMLP`` gives its layers; ``columns`` and ``rows`` are of a whole expert."""
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
        """Return the matrices of the experts, in their order; in memory one behind the other, as vLLM has them."""
        return [getattr(self, f"weight{stack}") for stack in range(len(self._counts))]

    def forward(self, inputs: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Sequence[Tensor] | None]:
        """Return ([t, rows], the biases that the caller is to add, by expert); ``inputs`` [t, columns] by expert."""
        outputs: Tensor = _GroupedProducts.apply(  # type: ignore[no-untyped-call]
            inputs, _tokens(tokens, inputs.device), self._counts, self.fuse_wgrad_accumulation, *self.weights()
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
    """Map [..., gate, up, gate, up, ...] -> [..., all gates, all ups]."""
    return values.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def in_pairs(values: Tensor) -> Tensor:
    """Return the inverse of ``gates_first``."""
    return values.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def behind_each_other(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the matrix whose rows are those of ``parts``, if these lie in memory one behind the other."""
    first, rows = parts[0].detach(), 0
    for part in parts:
        is_behind = part.storage_offset() == first.storage_offset() + rows * first.stride(0)
        in_one = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (is_behind and in_one and part.is_contiguous()):
            return None
        rows += len(part)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def _tokens(counts: Sequence[int], device: torch.device) -> _Tokens:
    """Return all tokens, of which each expert has so many."""
    ends = torch.tensor(counts, dtype=torch.int64).cumsum(0).to(torch.int32)
    return _Tokens(counts, slice(0, sum(counts)), ends.to(device, non_blocking=True))


def _parts(tokens: _Tokens, stacks: Sequence[int]) -> Iterator[_Tokens]:
    """Yield the tokens of each of the ``stacks``, of so many experts each."""
    first = begin = 0
    for experts in stacks:
        counts = tokens.counts[first : first + experts]
        end = begin + sum(counts)
        yield _Tokens(counts, slice(begin, end), tokens.ends[first : first + experts] - begin)
        first, begin = first + experts, end


class _GroupedProducts(torch.autograd.Function):
    """[t, columns] -> [t, rows]: of all experts at once where their matrices lie behind each other."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, tokens: _Tokens, stacks: Sequence[int], fused: bool, *weights: Tensor
    ) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.tokens, ctx.stacks, ctx.fused, ctx.weights = tokens, stacks, fused, weights  # which have their main_grad
        return _joined(
            [
                _product(inputs[part.rows], _by_expert(matrices, part).transpose(-2, -1), part)
                for matrices, part in _together(weights, tokens, stacks)
            ]
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        [inputs] = ctx.saved_tensors
        gradient, weights, of_inputs = gradient.contiguous(), ctx.weights, None
        if ctx.needs_input_grad[0]:
            of_inputs = _joined(
                [
                    _product(gradient[part.rows], _by_expert(matrices, part), part)
                    for matrices, part in _together(weights, ctx.tokens, ctx.stacks)
                ]
            )
        if not any(ctx.needs_input_grad[4:]):
            return of_inputs, *[None] * (3 + len(weights))
        if ctx.fused:
            sums = [weight.main_grad for weight in weights]
            for total, part in _together(sums, ctx.tokens, ctx.stacks):
                own = _by_expert(total, part)
                add_grouped_gradient(own, gradient[part.rows], inputs[part.rows], part.counts, part.ends)
            for weight in weights:
                weight.grad_added_to_main_grad = True
            # For Megatron's hooks, which count them and drop them; nobody reads what they have in common.
            empty = gradient.new_empty(max(weight.numel() for weight in weights))
            return of_inputs, None, None, None, *[empty[: weight.numel()].view_as(weight) for weight in weights]
        of_weights = _weight_gradient(gradient, inputs, ctx.tokens).split([len(weight) for weight in weights])
        return of_inputs, None, None, None, *of_weights


def _together(matrices: Sequence[Tensor], tokens: _Tokens, stacks: Sequence[int]) -> Iterable[tuple[Tensor, _Tokens]]:
    """Return stacks of ``matrices`` with the tokens of their experts: a single one if they lie behind each other."""
    whole = behind_each_other(matrices)
    return [(whole, tokens)] if whole is not None else zip(matrices, _parts(tokens, stacks), strict=True)


def _by_expert(matrices: Tensor, tokens: _Tokens) -> Tensor:
    """Return [experts, rows, columns]."""
    return matrices.view(len(tokens.counts), -1, matrices.shape[1])


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _product(values: Tensor, matrices: Tensor, tokens: _Tokens) -> Tensor:
    """Return [t, n], of ``values`` [t, m] and ``matrices`` [experts, m, n]."""
    if _can_be_grouped(values, *matrices.shape[1:]):
        return grouped_mm(values, matrices, offs=tokens.ends)
    parts = zip(values.split(list(tokens.counts)), matrices, strict=True)
    return torch.cat([own @ matrix for own, matrix in parts])


def _weight_gradient(gradient: Tensor, inputs: Tensor, tokens: _Tokens) -> Tensor:
    """Return [experts x rows, columns], of all experts."""
    if _can_be_grouped(inputs, gradient.shape[1], inputs.shape[1]):
        return grouped_mm(gradient.T, inputs, offs=tokens.ends).flatten(0, 1)
    counts = list(tokens.counts)
    return torch.cat([own.T @ values for own, values in zip(gradient.split(counts), inputs.split(counts), strict=True)])


def _can_be_grouped(values: Tensor, *widths: int) -> bool:
    """Return whether torch multiplies all experts together, and has no loop of its own that waits for a GPU."""
    if values.is_cuda:
        major, _ = torch.cuda.get_device_capability(values.device)
        if major < _HOPPER or values.dtype != torch.bfloat16:
            return False
    return len(values) > 0 and all(width * values.itemsize % _ALIGNED_BYTES == 0 for width in widths)
