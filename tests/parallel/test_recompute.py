"""Steps whose backward pass recomputes modules are to the bit those of one that keeps everything."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from hugging_face import make_model, random_rows
from parallel.parity import VOCABULARY, Launches, case, launches, named, one_result, selected_names

ADAPTERS = {"lora": {"rank": 4, "target_modules": ["down_proj"]}}
TENSOR, STAGES = {"tensor": 2}, {"pipeline": 2}


class Recomputed(NamedTuple):
    """Modules that a family recomputes in a layout, of a role with these keys besides."""

    family: str
    modules: list[str]
    layout: dict[str, int] = TENSOR
    section: dict[str, Any] | None = None
    grid: bool = False


CASES = {
    "mlp": Recomputed("qwen3", ["mlp"]),
    "mlp, in a pipeline": Recomputed("qwen3", ["mlp", "core_attn"], STAGES, {"tokens_per_gpu": 25}, grid=True),
    "experts": Recomputed("qwen3_moe", ["moe"]),
    "shared experts": Recomputed("qwen2_moe", ["shared_experts"]),
    "all of DeepSeek": Recomputed("deepseek_v3", ["core_attn", "mlp", "moe"], STAGES, grid=True),
    "side by side": Recomputed("cohere", ["mlp"]),
    "norms around": Recomputed("gemma2", ["mlp", "core_attn"], grid=True),
    "experts beside dense layers": Recomputed("gemma4_text_experts", ["core_attn", "shared_experts"], grid=True),
    "adapters": Recomputed("qwen2", ["mlp"], TENSOR, ADAPTERS),
    "delta nets": Recomputed("qwen3_next", ["moe"], {"data": 2}, grid=True),
    "biased experts": Recomputed("gpt_oss", ["moe"], {"data": 2}, grid=True),
}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    home = tmp_path_factory.mktemp("recompute")
    rows, wanted = list(random_rows(7, VOCABULARY)), selected_names(request)
    both = {f"{name}{kept}": given for name, given in CASES.items() for kept in ("", ", kept")}

    def told(name: str) -> dict[str, Any]:
        given = both[name]
        model = make_model(home / name, given.family, vocabulary=VOCABULARY)
        section = dict(given.section or {})
        if not name.endswith(", kept"):
            section["recompute"] = {"granularity": "selective", "modules": given.modules}
        return case(model, given.layout, rows, section=section)

    ranks = dict.fromkeys(both, 2)
    return launches(ranks, [f"{name}{kept}" for name in wanted for kept in ("", ", kept")], told)


@pytest.mark.parametrize("name", named(CASES))
def test_recomputed_modules_change_nothing(name: str, results: Launches) -> None:
    recomputed, kept = (one_result(results[each]) for each in (name, f"{name}, kept"))
    # Gradients of what shared and other experts read are added up in another order.
    within = 1e-6 if CASES[name].modules == ["shared_experts"] else 0.0
    assert recomputed.pop("grad_norms") == pytest.approx(kept.pop("grad_norms"), rel=within, abs=0.0)
    assert recomputed == kept
