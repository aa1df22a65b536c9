"""Gradients of low-rank factors against torch's own, in float64, in a layer that has them merged into its weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlhf_megatron.models.experts import gates_first
from rlhf_megatron.models.lora import fused_with
from rlhf_megatron.models.low_rank import Adapted, LowRank, attach, factor_gradients

RANK, SCALE, TOKENS = 3, 0.7, 11


def factors(*shapes: tuple[int, int]) -> list[Tensor]:
    """Return A and B of each shape (rows, columns)."""
    draw = torch.Generator().manual_seed(0)
    sizes = [size for rows, columns in shapes for size in ((RANK, columns), (rows, RANK))]
    return [torch.randn(size, generator=draw, dtype=torch.float64, requires_grad=True) for size in sizes]


def expected(base: Tensor, x: Tensor, learning: list[Tensor]) -> list[Tensor]:
    """Return gradients by autograd of a loss of a layer whose weights, one behind the other, are base + scale x B A."""
    merged = base + SCALE * torch.cat([b @ a for a, b in zip(learning[::2], learning[1::2], strict=True)])
    return list(torch.autograd.grad(((x @ merged.T) ** 2).sum(), learning))


class Layer(torch.nn.Module):
    """A linear layer as Megatron's are called, perhaps behind a norm of its own as Transformer Engine's are."""

    def __init__(self, weight: Tensor, norm: Tensor | None, offset: float = 0.0) -> None:
        super().__init__()
        self.weight, self.layer_norm_weight, self.offset = weight, norm, offset

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        if self.layer_norm_weight is not None:
            x = torch.nn.functional.rms_norm(x, x.shape[-1:], self.layer_norm_weight + self.offset, 1e-5)
        return x @ self.weight.T, None


@pytest.mark.parametrize(
    ("normed", "offset"),
    [(False, 0.0), (True, 0.0), (True, 1.0)],
    ids=["plain", "behind a norm", "behind a norm counted from 1"],
)
def test_a_layer_gives_the_gradients_of_its_factors_and_lets_others_pass(normed: bool, offset: float) -> None:
    learning = factors((6, 8), (4, 8))
    base, x = torch.randn(10, 8, dtype=torch.float64), torch.randn(TOKENS, 1, 8, dtype=torch.float64)
    norm = torch.rand(8, dtype=torch.float64) + 0.5 if normed else None
    x.requires_grad_()
    read = x if norm is None else torch.nn.functional.rms_norm(x, (8,), norm + offset, 1e-5)
    wanted = expected(base, read[:, 0], learning)
    with torch.no_grad():
        merged = base + SCALE * torch.cat([b @ a for a, b in zip(learning[::2], learning[1::2], strict=True)])
    [of_input] = torch.autograd.grad(((read @ merged.T) ** 2).sum(), x)
    layer = Layer(merged, norm, offset)
    weights = [Adapted((0, 8), [((0, 6), (0, 6))]), Adapted((0, 8), [((6, 10), (0, 4))])]
    attach(layer, [LowRank(weights, SCALE, False, None, 1e-5 if normed else None, offset)], learning)
    output, _ = layer(x)
    (output**2).sum().backward()
    for factor, value in zip(learning, wanted, strict=True):
        torch.testing.assert_close(factor.grad, value)
    torch.testing.assert_close(x.grad, of_input)


class GroupedLayer(torch.nn.Module):
    """The layers of several experts, called as Transformer Engine's grouped ones are; perhaps with gates first."""

    def __init__(self, weights: list[Tensor], pairs: bool) -> None:
        super().__init__()
        self.weights, self.pairs = weights, pairs

    def forward(self, x: Tensor, tokens: list[int]) -> tuple[Tensor, None]:
        parts = zip(x.split(tokens), self.weights, strict=True)
        output = torch.cat([own @ weight.T for own, weight in parts])
        return gates_first(output) if self.pairs else output, None


@pytest.mark.parametrize("pairs", [False, True], ids=["gate, then up", "gate and up in pairs"])
def test_a_grouped_layer_gives_those_of_each_expert(pairs: bool) -> None:
    tokens, learning = [4, 0, 7], factors(*[(6, 8)] * 3)
    base = torch.randn(3, 6, 8, dtype=torch.float64)
    x = torch.randn(TOKENS, 8, dtype=torch.float64, requires_grad=True)
    downs, ups = learning[::2], learning[1::2]
    merged = [weight + SCALE * b @ a for weight, a, b in zip(base, downs, ups, strict=True)]
    weighting = torch.randn(TOKENS, 6, dtype=torch.float64)
    output, _ = GroupedLayer(merged, pairs)(x, tokens)
    wanted = torch.autograd.grad((output * weighting).sum(), [x, *learning])
    layer = GroupedLayer([weight.detach() for weight in merged], pairs)
    part = LowRank([Adapted((0, 8), [((0, 6), (0, 6))])], SCALE, False, None, gates_first=pairs)
    attach(layer, [part] * 3, learning)
    output, _ = layer(x, tokens)
    (output * weighting).sum().backward()
    for found, value in zip([x, *learning], wanted, strict=True):
        torch.testing.assert_close(found.grad, value)


def test_nothing_is_kept_where_no_gradient_is_asked_for() -> None:
    layer = Layer(torch.randn(6, 8, dtype=torch.float64), None)
    attach(layer, [LowRank([Adapted((0, 8), [((0, 6), (0, 6))])], SCALE, False, None)], factors((6, 8)))
    with torch.no_grad():
        output, _ = layer(torch.randn(TOKENS, 1, 8, dtype=torch.float64))
    assert not output.requires_grad


@pytest.mark.parametrize("by_columns", [False, True], ids=["rows", "columns"])
def test_what_parts_of_a_layer_find_adds_up(by_columns: bool) -> None:
    """Two ranks have half of the rows, in windows that do not follow each other, or half of the columns."""
    learning = factors((6, 8))
    x, g = torch.randn(TOKENS, 8, dtype=torch.float64), torch.randn(TOKENS, 6, dtype=torch.float64)
    merged = SCALE * learning[1] @ learning[0]
    wanted = torch.autograd.grad((x @ merged.T * g).sum(), learning)
    halves = []
    for rank in range(2):
        if by_columns:
            columns = (4 * rank, 4 * rank + 4)
            weight = Adapted(columns, [((0, 6), (0, 6))])
            halves.append(factor_gradients(x[:, slice(*columns)], g, LowRank([weight], SCALE, True, None), learning))
        else:  # rows 0, 1, 4 and 2, 3, 5
            rows = [(2 * rank, 2 * rank + 2), (4 + rank, 5 + rank)]
            weight = Adapted((0, 8), [((0, 2), rows[0]), ((2, 3), rows[1])])
            own = torch.cat([g[:, slice(*span)] for span in rows], dim=1)
            halves.append(factor_gradients(x, own, LowRank([weight], SCALE, False, None), learning))
    for value, *parts in zip(wanted, *halves, strict=True):
        torch.testing.assert_close(sum(parts), value)


def test_a_rank_without_rows_of_a_weight_has_no_gradient_of_it() -> None:
    learning = factors((6, 8), (4, 8))
    weights = [Adapted((0, 8), [((0, 6), (0, 6))]), Adapted((0, 8), [])]
    x, g = torch.randn(TOKENS, 8, dtype=torch.float64), torch.randn(TOKENS, 6, dtype=torch.float64)
    found = factor_gradients(x, g, LowRank(weights, SCALE, False, None), learning)
    assert all(float(each.abs().max()) > 0 for each in found[:2])
    assert all(float(each.abs().max()) == 0 for each in found[2:])


def test_which_weights_are_one_layer() -> None:
    names = [f"model.layers.3.self_attn.{part}_proj.weight" for part in ("q", "k", "v")]
    assert all(fused_with(name) == names for name in names)
    assert fused_with("model.layers.0.mlp.up_proj.weight")[0] == "model.layers.0.mlp.gate_proj.weight"
    assert fused_with("model.layers.0.mlp.down_proj.weight") == ["model.layers.0.mlp.down_proj.weight"]
