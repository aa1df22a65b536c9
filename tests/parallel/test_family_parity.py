"""Model families and their parts in several layouts against transformers and torch.optim.AdamW, in float32.

``make test`` runs a sample of the cases, ``make grid`` the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hugging_face import WINDOW, load_model, random_rows, row_logprobs
from parallel.parity import (
    VOCABULARY,
    Case,
    Launches,
    check_against_transformers,
    named,
    one_result,
    parity_launches,
    selected_names,
)

EXPERTS_SHARED_OUT = {"tensor": 2, "expert": 2, "expert_tensor": 1}


def dense(name: str, family: str, *, grid: bool = False) -> dict[str, Case]:
    """Return the cases of a family of dense layers; ``name`` says what it has of its own.

    ``grid``: all are the grid's, since another family has its parts.
    """
    interleaved = {"pipeline": 2, "virtual_pipeline": 2}
    cases = {
        "one rank": Case(family, True, {}, grid=grid),
        "TP2, then PP2 VP2": Case(family, False, {"tensor": 2}, then=interleaved, grid=grid),
        "TP2, sequence parallel": Case(family, True, {"tensor": 2}, {"sequence_parallel": True}, grid=True),
        "PP2": Case(family, True, {"pipeline": 2}, grid=True),
        "CP2": Case(family, False, {"context": 2}, {"cp_comm_type": "all_gather"}, grid=True),
        "CP2, Ulysses": Case(family, False, {"context": 2}, {"cp_comm_type": "a2a"}, grid=True),
    }
    return {f"{name}, {layout}": case for layout, case in cases.items()}


def mixture(name: str, family: str) -> dict[str, Case]:
    """Return the cases of a family of experts; ``name`` says what it has of its own."""
    cases = {
        "one rank": Case(family, True, {}, grid=True),
        "EP2, then TP2 and EP2": Case(family, False, {"data": 2, "expert": 2}, then=EXPERTS_SHARED_OUT),
        "TP2": Case(family, False, {"tensor": 2}, grid=True),
        "PP2, then TP2 and EP2": Case(family, True, {"pipeline": 2}, then=EXPERTS_SHARED_OUT, grid=True),
        "CP2 EP2": Case(family, False, {"context": 2, "expert": 2}, grid=True),
        "TP2 EP2": Case(family, False, {"tensor": 2, "data": 2, "expert": 2}, grid=True),
    }
    return {f"{name}, {layout}": case for layout, case in cases.items()}


def gpt_oss() -> dict[str, Case]:
    """Return the cases of experts with biases, which are not cut."""
    cases = {
        "one rank": Case("gpt_oss", True, {}, grid=True),
        "EP2, then TP2 and EP2": Case("gpt_oss", False, {"data": 2, "expert": 2}, then=EXPERTS_SHARED_OUT),
        "PP2": Case("gpt_oss", True, {"pipeline": 2}, grid=True),
        "CP2": Case("gpt_oss", False, {"context": 2}, {"cp_comm_type": "all_gather"}, grid=True),
        "CP2, Ulysses": Case("gpt_oss", False, {"context": 2}, {"cp_comm_type": "a2a"}, grid=True),
    }
    return {f"gpt-oss, {layout}": case for layout, case in cases.items()}


CASES = {
    "TP2, scaled rotary embeddings": Case("llama3", True, {"tensor": 2}),
    **dense("yarn", "qwen2_yarn", grid=True),
    "yarn, TP2": Case("qwen2_yarn", False, {"tensor": 2}),
    "linear, one rank": Case("mistral_linear", False, {}, grid=True),
    "linear, TP2": Case("mistral_linear", True, {"tensor": 2}),
    **dense("biases", "llama_biases"),
    "biases of attention, one rank": Case("llama_attention_biases", False, {}, grid=True),
    "biases of attention, TP2": Case("qwen3_biases", False, {"tensor": 2}, grid=True),
    **dense("layers without positions", "smollm3"),
    **dense("window", "mistral_window"),
    **dense("window in some layers", "qwen2_window"),
    **dense("Gemma", "gemma", grid=True),
    **dense("soft caps, norms around sublayers", "gemma2"),
    **dense("two rotary tables", "gemma3_text"),
    # Two steps of transformers' own in float32 are 6.2e-6 from those in float64, and ours as far on the other side.
    **{
        name: case._replace(weights_within=2e-5)
        for name, case in dense("heads by the type of a layer", "gemma4_text").items()
    },
    **dense("of images and text, Gemma 4", "gemma4", grid=True),
    **{
        name: case._replace(grid=True)
        for name, case in mixture("of images and text, Gemma 4 with experts", "gemma4:experts").items()
    },
    "of images and text, TP2, then PP2 VP2": dense("", "gemma3")[", TP2, then PP2 VP2"],
    **{name: case._replace(grid=True) for name, case in dense("of images and text, Gemma", "gemma3").items()},
    **{name: case._replace(grid=True) for name, case in dense("of images and text, Mistral", "mistral3").items()},
    **dense("of images and text, Qwen2.5-VL", "qwen2_5_vl", grid=True),
    **dense("of images and text, Qwen2-VL", "qwen2_vl", grid=True),
    **dense("of images and text, Qwen3-VL", "qwen3_vl", grid=True),
    **{
        name: case._replace(grid="EP2, then" not in name)
        for name, case in mixture("of images and text, Qwen3-VL with experts", "qwen3_vl_moe").items()
    },
    # Two steps of AdamW make 1.4e-5 of rounding in one of its embeddings.
    **{
        name: case._replace(weights_within=2e-5)
        for name, case in dense("of images and text, GLM-4V", "glm4v", grid=True).items()
    },
    **{
        name: case._replace(grid=True)
        for name, case in mixture("of images and text, GLM-4V with experts", "glm4v_moe").items()
    },
    **{
        name: case._replace(grid=True)
        for name, case in mixture("of images and text, Kimi with experts", "kimi_k25").items()
    },
    **dense("yarn of both mscales", "ministral3", grid=True),
    **dense("factors", "granite"),
    **dense("Command R", "cohere", grid=True),
    **dense("parallel sublayers", "cohere2"),
    **dense("norms of each head", "cohere_norms", grid=True),
    **dense("norms after sublayers and of all heads", "olmo2", grid=True),
    **dense("windows and two rotary tables", "olmo3"),
    **dense("partial rotary embeddings of neighbours", "glm4"),
    **dense("fused tensors", "phi3"),
    **dense("fused tensors, LongRoPE", "phi3_long", grid=True),
    **dense("norms after sublayers, full layers without positions", "exaone4"),
    "norms after sublayers, one rank": Case("exaone4_full", True, {}, grid=True),
    "norms after sublayers, TP2": Case("exaone4_full", False, {"tensor": 2}, grid=True),
    **dense("feed-forward layers without a gate", "arcee", grid=True),
    **dense("activation that learns", "apertus"),
    **dense("GLM-4 of 2024", "glm", grid=True),
    **dense("factors, renamed tensors", "granitemoehybrid", grid=True),
    "factors, renamed tensors, without positions, TP2": Case("granitemoehybrid_plain", False, {"tensor": 2}),
    **dense("pairs of neighbours", "ernie4_5"),
    **dense("Seed-OSS", "seed_oss"),
    **dense("norms of turned heads", "hunyuan_v1_dense"),
    "norms of turned heads, keys shared by ranks, TP4": Case("hunyuan_v1_dense", False, {"tensor": 4}, grid=True),
    **dense("latent attention in dense layers", "youtu"),
    **mixture("latent attention, softmax, groups by their best two", "mistral4"),
    **{
        name: case._replace(grid=True)
        for name, case in mixture("of images and text, Mistral with experts", "mistral3:mistral4").items()
    },
    **gpt_oss(),
    **mixture("shared expert and a dense layer", "qwen2_moe"),
    **mixture("experts beside dense layers", "gemma4_text_experts"),
    **mixture("Mixtral", "mixtral"),
    **mixture("latent attention, yarn, groups by their best two", "deepseek_v3"),
    **mixture("latent attention without ranks of queries", "deepseek_v3_plain"),
    **mixture("latent attention, groups by their best", "deepseek_v2"),
    **mixture("latent attention, yarn, softmax", "deepseek_v2_lite"),
    **{name: case._replace(grid=True) for name, case in mixture("latent attention, GLM", "glm4_moe_lite").items()},
    **mixture("sigmoid scores and correction biases", "glm4_moe"),
    **mixture("norms of turned heads, experts", "hunyuan_v1_moe"),
    **mixture("norms of all heads, experts", "olmoe"),
    **mixture("softmax scores and correction biases", "ernie4_5_moe"),
    **mixture("norms of all heads, sigmoid scores", "minimax_m2"),
    **mixture("norms of each head, sigmoid scores, windows", "dots1"),
    **mixture("sigmoid scores, full layers without positions", "exaone_moe"),
    **{
        name: case._replace(grid=True) for name, case in mixture("sigmoid scores, no dense layer", "solar_open").items()
    },
    **mixture("factors, experts in one tensor", "granitemoe"),
}


# In delta nets queries and keys of small numbers are made as long as others, so that rounding in a step is large in the
# next.
WITHIN: dict[str, Any] = {"norms_within": 2e-4, "weights_within": 5e-5}


def delta_nets(name: str, family: str, experts: bool) -> dict[str, Case]:
    """Return the cases of a family with delta nets."""
    cut, over_data = ({"expert": 2, "expert_tensor": 1}, {"expert": 2}) if experts else ({}, {})
    spread = {"EP2": Case(family, False, {"data": 2, "expert": 2}, grid=True)} if experts else {}
    cases = {
        "one rank": Case(family, True, {}, grid=True),
        "TP2": Case(family, False, {"tensor": 2}, grid=True),
        "PP2, then TP2": Case(family, False, {"pipeline": 2}, then={"tensor": 2} | cut),
        "PP2 VP2, recomputed": Case(
            family, True, {"pipeline": 2, "virtual_pipeline": 2}, {"recompute": {"granularity": "full"}}, grid=True
        ),
        "TP2 DP2": Case(family, False, {"tensor": 2, "data": 2} | over_data, grid=True),
        "CP2": Case(family, False, {"context": 2} | over_data, grid=experts),
        "CP2, Ulysses, recomputed": Case(
            family, True, {"context": 2}, {"cp_comm_type": "a2a", "recompute": {"granularity": "full"}}, grid=True
        ),
        **spread,
    }
    return {f"{name}, {layout}": case._replace(**WITHIN) for layout, case in cases.items()}


def more_heads(name: str, family: str, experts: bool) -> dict[str, Case]:
    """Return the cases of a family with delta nets of which four ranks share out the heads; some rows have fewer tokens
    than the parts that they are cut into."""
    over_data = {"expert": 2} if experts else {}
    cases = {
        "TP2 CP2": Case(family, False, {"tensor": 2, "context": 2} | over_data, grid=not experts),
        "CP4": Case(family, True, {"context": 4} | over_data, grid=True),
        "PP2 CP2": Case(family, True, {"pipeline": 2, "context": 2} | over_data, grid=True),
        "CP2 DP2": Case(family, False, {"context": 2, "data": 2} | over_data, grid=True),
    }
    return {f"{name}, {layout}": case._replace(**WITHIN) for layout, case in cases.items()}


CASES |= delta_nets("delta nets and experts", "qwen3_next", experts=True)
CASES |= {
    name: case._replace(grid=True)
    for name, case in delta_nets("Qwen3.5 with experts", "qwen3_5_moe_text", experts=True).items()
}
CASES |= delta_nets("delta nets", "qwen3_5_text", experts=False)
CASES |= more_heads("delta nets", "qwen3_5_text_heads", experts=False)
CASES |= more_heads("delta nets and experts", "qwen3_next_heads", experts=True)
CASES |= {
    name: case._replace(grid=True)
    for family in ("qwen3_5", "qwen3_5_moe")
    for name, case in delta_nets(f"of images and text, {family}", family, experts=family.endswith("moe")).items()
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, home: Path) -> Launches:
    return parity_launches(CASES, selected_names(request), home)


@pytest.mark.parametrize("name", named(CASES))
def test_outputs_and_steps_equal_transformers(
    name: str, home: Path, results: Launches, record_property: Callable[[str, Any], None]
) -> None:
    result, case = one_result(results[name]), CASES[name]
    exported = home / f"{name}, exported"
    found = check_against_transformers(home / name, exported, result, case.norms_within, case.weights_within)
    record_property("measured", case.description | found)


def test_a_window_of_one_token_more_or_less_is_seen(home: Path, results: Launches) -> None:
    name, (prompts, responses) = "window, one rank", random_rows(7, VOCABULARY)
    found = torch.tensor(results[name][0]["logprobs"])
    for other in (WINDOW - 1, WINDOW + 1):
        model = load_model(home / name, sliding_window=other)
        with torch.no_grad():
            logprobs = torch.cat([row_logprobs(model, p, r) for p, r in zip(prompts, responses, strict=True)])
        assert (found - logprobs).abs().max() > 1e-2
