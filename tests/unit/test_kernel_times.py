"""Kernels by kind: names as torch's profiler gives them on a Hopper GPU, and the sums over a step's pieces."""

from __future__ import annotations

import pytest
from kernel_times import kind_of, summed

PRODUCT = "nvjet_hsh_128x192_64x4_2x1_v_bz_coopA_TNT"
ATTENTION = "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<...>>>"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (PRODUCT, "products"),
        (ATTENTION, "attention"),
        ("void cutlass::device_kernel<vllm::cutlass_3x_gemm_fp8<cutlass::float_e4m3_t>>", "products"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>", "attention"),
        ("void vllm::dynamic_per_token_scaled_fp8_quant_kernel<c10::BFloat16>", "to fp8"),
        ("_gumbel_sample_kernel", "sampling"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("triton_poi_fused_mul_silu_slice_1", "norms, activations and sums"),
    ],
)
def test_a_name_has_its_kind(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_sums_are_over_pieces() -> None:
    found = summed({PRODUCT: 6.0, ATTENTION: 3.0, "nvjet_other": 3.0}, pieces=3)
    assert found["milliseconds"] == 4 and found["kinds"] == {"products": 3, "attention": 1}
    assert list(found["longest"].values()) == [2, 1, 1]
