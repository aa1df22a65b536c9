"""The kernel of rotary embeddings on the hardware that it is for, beside Transformer Engine's."""

from __future__ import annotations

import pytest
import torch

from rlhf_megatron.kernels.rotary import rotate
from rotary_embeddings import angles_of, check_kernel, sequences


def test_the_kernel_equals_float64() -> None:
    check_kernel("cuda")


@pytest.mark.parametrize(("parts", "part"), [(1, 0), (4, 2)], ids=["all", "the third of four ranks"])
def test_it_turns_as_transformer_engine_does(parts: int, part: int) -> None:
    from megatron.core.extensions import transformer_engine

    if not transformer_engine.HAVE_TE:
        pytest.skip("Transformer Engine is not installed")
    lengths = [24, 1000, 8, 16]
    cu_seqlens, angles = sequences(lengths).cuda(), angles_of(max(lengths), 128, step=1.0).cuda()
    values = torch.randn(sum(lengths) // parts, 6, 128, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    frequencies = torch.cat([angles, angles], dim=-1)[:, None, None]
    theirs = transformer_engine.fused_apply_rotary_pos_emb_thd(
        values, cu_seqlens, frequencies, cp_size=parts, cp_rank=part
    )
    torch.testing.assert_close(rotate(values, cu_seqlens, angles, parts, part), theirs, rtol=0, atol=1e-4)
