"""Moments in bfloat16: rounded to a neighbour, right in the mean, and good for AdamW. Master weights as remainders."""

from __future__ import annotations

import torch

from rlhf_megatron.roles.rounding import remainder_of, rounded_at_random, with_remainder


def test_values_become_one_of_their_neighbours_and_keep_their_mean() -> None:
    values = torch.tensor([1.0, -1.0, 1.0 + 2**-9, -(1.0 + 2**-10), 3e-30, 0.0, 1.0 + 2**-7])
    tries = torch.stack([rounded_at_random(values, seed).double() for seed in range(4000)])
    below, above = tries.amin(0), tries.amax(0)
    exact = values.to(torch.bfloat16).float() == values
    assert torch.equal(below[exact], values[exact].double()) and torch.equal(above[exact], values[exact].double())
    assert (below <= values).all() and (values <= above).all()
    assert ((above - below) <= values.double().abs() * 2**-7).all()
    torch.testing.assert_close(tries.mean(0), values.double(), rtol=2**-7 * 3 / 4000**0.5, atol=0.0)


def test_a_seed_decides_and_what_is_not_finite_stays() -> None:
    values = torch.cat([torch.randn(1000), torch.tensor([torch.inf, -torch.inf, torch.nan])])
    rounded = rounded_at_random(values, 3)
    assert torch.equal(rounded[:-1], rounded_at_random(values, 3)[:-1])
    assert not torch.equal(rounded[:-1], rounded_at_random(values, 4)[:-1])
    assert rounded[-3] == torch.inf and rounded[-2] == -torch.inf and rounded[-1].isnan()


def test_adamw_learns_as_with_moments_in_float32() -> None:
    """Gradients fall a hundredfold: moments rounded to the nearest would not follow, at a decay of a thousandth."""

    def learned(narrow: bool) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        parameter = torch.nn.Parameter(torch.zeros(2000))
        optimizer = torch.optim.AdamW([parameter], lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0)
        for step in range(1500):
            scale = 1.0 if step < 100 else 0.01
            parameter.grad = scale * (1.0 + 0.5 * torch.randn(2000, generator=generator))
            state = optimizer.state[parameter]
            optimizer.step()
            for order, name in enumerate(("exp_avg", "exp_avg_sq") if narrow else ()):
                state[name] = rounded_at_random(state[name], 2 * step + order).float()
        return parameter.detach(), optimizer.state[parameter]["exp_avg_sq"]

    (expected, expected_square), (found, square) = learned(False), learned(True)
    assert (square / expected_square).mean().sub(1).abs() < 0.01
    assert (found - expected).abs().mean() < 0.02 * expected.abs().mean()


def test_bfloat16_and_a_remainder_are_the_number() -> None:
    bits = torch.randint(-(2**31), 2**31, (200_000,), dtype=torch.int64, generator=torch.Generator().manual_seed(1))
    values = torch.cat([bits.to(torch.int32).view(torch.float32), torch.tensor([0.0, -0.0, torch.inf, -torch.inf])])
    values = values[~values.isnan()]
    back = with_remainder(values.bfloat16(), remainder_of(values, values.bfloat16()))
    assert torch.equal(back.view(torch.int32), values.view(torch.int32))


def test_half_of_a_bfloat16_unit_is_off_by_one_of_float32_at_most() -> None:
    whole = torch.tensor([1.0, 1.0 + 2**-7, -1.0, -1.0 - 2**-7, 2.0**-126])
    values = (
        whole + torch.sign(whole) * (whole.bfloat16().view(torch.int16) + 1).view(torch.bfloat16).sub(whole).abs() / 2
    )
    back = with_remainder(values.bfloat16(), remainder_of(values, values.bfloat16()))
    assert (back.view(torch.int32) - values.view(torch.int32)).abs().tolist() == [1, 0, 1, 0, 1]
    assert torch.equal(back.bfloat16(), values.bfloat16()), "the model's weights follow from it"
    kept = remainder_of(torch.tensor([torch.nan]), torch.tensor([torch.nan]).bfloat16())
    assert with_remainder(torch.tensor([torch.nan]).bfloat16(), kept).isnan().all()
