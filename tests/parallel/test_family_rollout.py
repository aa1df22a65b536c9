"""vLLM beside the trainer, family by family: after each of three updates and regatherings both are one model.

Many models share a launch, each with an engine of its own. ``make test`` runs a sample, ``make grid`` the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from hugging_face import SPECIAL, describe, make_model, random_rows
from parallel.parity import VOCABULARY, Launches, layout_name, named, selected_names
from parallel.ranks import run_ranks
from parallel.regather_ranks import follow_families
from rlhf_megatron.rollout.vllm.process_environment import has_gpu
from rlhf_megatron.topology.layout import Layout

pytestmark = pytest.mark.skipif(has_gpu(), reason="the engines of this machine need a GPU each")

UPDATES = 3


class Case(NamedTuple):
    """A family in a layout, over how many ranks a replica of vLLM is sharded, and how near their logprobs are.

    ``fields`` of the config: vLLM's attention on CPUs has heads of 32 numbers and more. ``experts``: vLLM makes the
    groups of a process for its first model, so mixtures have launches of their own. ``beyond``: the share of tokens
    whose logprobs may be further apart than ``within``.
    """

    family: str
    layout: Mapping[str, int] = MappingProxyType({})
    tensor: int = 1
    fields: Mapping[str, Any] = MappingProxyType({})
    experts: bool = False
    grid: bool = True
    tied: bool = False
    dtype: str = "float32"
    within: float = 1e-4
    beyond: float = 0.0
    rollout: Mapping[str, Any] = MappingProxyType({})
    lora: Mapping[str, Any] | None = None

    @property
    def description(self) -> dict[str, Any]:
        """The property of a measurement on a config and layouts, as tools/bench/families.py reads it."""
        layout = f"{layout_name(self.layout)} to {layout_name({'tensor': self.tensor} if self.tensor > 1 else {})}"
        adapted = " LoRA" if self.lora else ""
        own = describe(self.family, **self.fields)
        return {"compared": "rolled out", "layout": layout + adapted, "dtype": self.dtype, **own}

    @property
    def launch(self) -> tuple[int, int, bool]:
        """What cases of one launch have in common."""
        return Layout(**self.layout).size, self.tensor, self.experts


# vLLM takes hidden_size / num_attention_heads for the size of a head, whatever config.json says.
DIVIDED = {"hidden_size": 128, "head_dim": 32}
# vLLM has latents of these sizes alone.
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}


def both(name: str, family: str, **fields: Any) -> dict[str, Case]:
    """Return a family on one rank, and sharded over two in another way by trainer and vLLM."""
    return {name: Case(family, fields=fields), f"{name}, TP2": Case(family, {"pipeline": 2}, 2, fields)}


# The limit that vLLM has, and widths that its kernels for CPUs take.
GPT_OSS = {"swiglu_limit": 7.0, "intermediate_size": 128}
# On CPUs vLLM computes delta nets in bfloat16 alone, and cannot cache prefixes of them, for which it cuts prompts.
DELTA: dict[str, Any] = {
    "fields": {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "dtype": "bfloat16",
    # By more than this in at most a sixth of the tokens, and in six tenths and more where an engine missed an update.
    "within": 0.05,
    "beyond": 0.25,
    "rollout": {"enable_prefix_caching": False},
}
# Where a router's near tie falls the other way a logprob is off by up to 1: in at most a third of the tokens.
DELTA_EXPERTS: dict[str, Any] = DELTA | {"experts": True, "beyond": 0.4}
# Its growth and the second mscale are 0.
DEVSTRAL_2 = {
    "head_dim": 32,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64,
        "mscale": 1.0, "mscale_all_dim": 0.0, "llama_4_scaling_beta": 0.0, "beta_fast": 4.0, "beta_slow": 1.0,
    },
}  # fmt: skip
# Which vLLM reads itself in versions before 0.30.
ATTN_FACTOR = {"rope_parameters": SPECIAL["qwen2_yarn"]["rope_parameters"] | {"attn_factor": 0.6}}
CASES = {
    "delta nets and experts": Case("qwen3_next", grid=False, **DELTA_EXPERTS),
    "delta nets and experts, TP2": Case("qwen3_next", {"tensor": 2}, 2, **DELTA_EXPERTS),
    "delta nets of images and text": Case("qwen3_5", **DELTA),
    "delta nets of images and text, TP2": Case("qwen3_5", {"pipeline": 2}, 2, **DELTA),
    "delta nets and experts of images and text": Case("qwen3_5_moe", **DELTA_EXPERTS),
    "delta nets, a language model alone": Case(
        "qwen3_5_text", **DELTA | {"fields": DELTA["fields"] | {"output_gate_type": "swish"}}
    ),
    "delta nets and experts, a language model alone": Case("qwen3_5_moe_text", **DELTA_EXPERTS),
    **both("biases", "llama_biases"),
    "biases of attention": Case("llama_attention_biases"),
    "scaled rotary embeddings": Case("llama3"),
    "norms of heads": Case("qwen3", tied=True),
    "window": Case("mistral_window"),
    "yarn of both mscales": Case("ministral3", fields={"head_dim": 32}),
    "yarn, queries that do not grow": Case("ministral3", fields=DEVSTRAL_2),
    "experts": Case("qwen3_moe", experts=True),
    "Mixtral": Case("mixtral", experts=True),
    "layers without positions": Case("smollm3", grid=False),
    "layers without positions, TP2": Case("smollm3", {"tensor": 2}, 2),
    "YaRN": Case("qwen2_yarn", fields=DIVIDED),
    "YaRN with attn_factor": Case("qwen2_yarn", fields=DIVIDED | ATTN_FACTOR, grid=False),
    "soft caps, norms around sublayers": Case("gemma2", grid=False, tied=True),
    "soft caps, norms around sublayers, TP2": Case("gemma2", {"pipeline": 2}, 2),
    "heads by the type of a layer": Case("gemma4_text", tied=True),
    "heads by the type of a layer, TP2": Case("gemma4_text", {"pipeline": 2}, 2),
    "experts beside dense layers": Case("gemma4_text_experts", experts=True, tied=True),
    "experts beside dense layers, TP2": Case(
        "gemma4_text_experts", {"tensor": 2, "expert_tensor": 1, "expert": 2}, 2, experts=True
    ),
    "heads by the type of a layer, of images and text": Case("gemma4", tied=True),
    "experts beside dense layers, of images and text": Case("gemma4:experts", experts=True),
    "two rotary tables": Case("gemma3_text"),
    "two rotary tables, TP2": Case("gemma3_text", {"pipeline": 2}, 2),
    "of images and text": Case("gemma3", tied=True),
    "of images and text, TP2": Case("gemma3", {"pipeline": 2}, 2),
    "of images and text, Qwen2-VL": Case("qwen2_vl", tied=True),
    **both("of images and text, Qwen2.5-VL", "qwen2_5_vl"),
    "of images and text, Qwen3-VL": Case("qwen3_vl", tied=True),
    "of images and text, Qwen3-VL with experts": Case("qwen3_vl_moe", experts=True),
    "of images and text, Qwen3-VL with experts, TP2": Case("qwen3_vl_moe", {"tensor": 2}, 2, experts=True),
    **both("of images and text, GLM-4V", "glm4v"),
    "of images and text, GLM-4V with experts": Case("glm4v_moe", experts=True),
    "of images and text, Mistral": Case("mistral3", fields={"head_dim": 32}),
    "of images and text, Kimi, latent attention": Case("kimi_k25", fields=LATENT, experts=True),
    "of images and text, Kimi, latent attention, TP2": Case(
        "kimi_k25", {"data": 2, "expert": 2}, 2, LATENT, experts=True
    ),
    "Gemma": Case("gemma", tied=True),
    "Gemma, TP2": Case("gemma", {"pipeline": 2}, 2),
    **both("factors", "granite"),
    "parallel sublayers": Case("cohere", tied=True),
    "parallel sublayers, some without positions": Case("cohere2", fields={"sliding_window": 256}, tied=True),
    "parallel sublayers, some without positions, TP2": Case("cohere2", {"pipeline": 2}, 2, {"sliding_window": 256}),
    **both("norms after sublayers and of all heads", "olmo2"),
    **both("windows and two rotary tables", "olmo3"),
    "latent attention, yarn": Case("deepseek_v3", fields=LATENT, experts=True, grid=False),
    "latent attention, yarn, TP2": Case("deepseek_v3", {"data": 2, "expert": 2}, 2, LATENT, experts=True),
    "latent attention without ranks of queries": Case("deepseek_v3_plain", {"tensor": 2}, 2, LATENT, experts=True),
    "latent attention, groups by their best": Case("deepseek_v2", fields=LATENT, experts=True),
    "latent attention, softmax": Case("deepseek_v2_lite", fields=LATENT, experts=True),
    **both("partial rotary embeddings of neighbours", "glm4"),
    **both("fused tensors", "phi3"),
    **both("fused tensors, LongRoPE", "phi3_long"),
    **both("norms after sublayers, full layers without positions", "exaone4"),
    "norms after sublayers": Case("exaone4_full"),
    **both("pairs of neighbours", "ernie4_5"),
    **both("Seed-OSS", "seed_oss"),
    **both("GLM-4 of 2024", "glm"),
    **both("feed-forward layers without a gate", "arcee"),
    **both("activation that learns", "apertus"),
    **both("factors, renamed tensors", "granitemoehybrid", **DIVIDED, logits_scaling=16.0),  # else all are certain
    "without positions": Case("granitemoehybrid_plain", fields=DIVIDED),
    "latent attention, GLM": Case("glm4_moe_lite", fields=LATENT, experts=True),
    "sigmoid scores and correction biases": Case("glm4_moe", experts=True, grid=False),
    "sigmoid scores and correction biases, EP2": Case("glm4_moe", {"data": 2, "expert": 2}, 2, experts=True),
    "sigmoid scores, full layers without positions": Case("exaone_moe", experts=True),
    "sigmoid scores, full layers without positions, EP2": Case("exaone_moe", {"data": 2, "expert": 2}, 2, experts=True),
    "sinks, experts in one tensor": Case("gpt_oss", fields=GPT_OSS, experts=True),
    "sinks, experts in one tensor, EP2": Case("gpt_oss", {"data": 2, "expert": 2}, fields=GPT_OSS, experts=True),
    "norms of each head": Case("cohere_norms", tied=True),
    "norms of each head, TP2": Case("cohere_norms", {"pipeline": 2}, 2),
    "norms of all heads, experts": Case("olmoe", fields=DIVIDED, experts=True),
    "norms of all heads, experts, TP2": Case("olmoe", {"data": 2, "expert": 2}, 2, DIVIDED, experts=True),
    **both("norms of turned heads", "hunyuan_v1_dense"),
    "norms of turned heads, experts": Case("hunyuan_v1_moe", experts=True),
    "norms of turned heads, experts, TP2": Case("hunyuan_v1_moe", {"data": 2, "expert": 2}, 2, experts=True),
    "softmax scores and correction biases": Case("ernie4_5_moe", experts=True, tied=True),
    "softmax scores and correction biases, TP2": Case(
        "ernie4_5_moe", {"data": 2, "expert": 2}, 2, experts=True, tied=True
    ),
    "norms of all heads, sigmoid scores": Case("minimax_m2", experts=True),
    "norms of all heads, sigmoid scores, TP2": Case("minimax_m2", {"data": 2, "expert": 2}, 2, experts=True),
    "factors, experts in one tensor": Case("granitemoe", fields=DIVIDED, experts=True),
    "factors, experts in one tensor, TP2": Case("granitemoe", {"data": 2, "expert": 2}, 2, DIVIDED, experts=True),
    "a shared expert": Case("qwen2_moe", fields=DIVIDED, experts=True),
    "adapters of experts, EP2": Case("qwen3_moe", {"data": 2, "expert": 2}, 2, experts=True, lora={"rank": 4}),
    "adapters of delta nets": Case("qwen3_5", **DELTA, lora={"rank": 4, "alpha": 64}),
    "adapters of delta nets and experts, TP2": Case(
        "qwen3_next", {"tensor": 2}, 2, **DELTA_EXPERTS, lora={"rank": 4, "alpha": 64}
    ),
    "adapters of experts in one tensor, EP2": Case(
        "gpt_oss", {"data": 2, "expert": 2}, fields=GPT_OSS, experts=True, lora={"rank": 4, "alpha": 16}
    ),
}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    home = tmp_path_factory.mktemp("rollout")

    def launch(names: list[str]) -> dict[str, list[Any]]:
        told = {name: arguments(home, name, CASES[name]) for name in names}
        by_rank = run_ranks(follow_families, CASES[names[0]].launch[0], {"cases": told}, timeout=590)
        return {name: [result[name] for result in by_rank] for name in names}

    return Launches({name: case.launch for name, case in CASES.items()}, selected_names(request), launch)


def arguments(
    home: Path, name: str, case: Case, vocabulary: int = VOCABULARY, sizes: Mapping[str, int] = MappingProxyType({})
) -> dict[str, Any]:
    tied = case.tied or "pipeline" in case.layout
    folder = make_model(home / name, case.family, tied=tied, vocabulary=vocabulary, **{**sizes, **case.fields})
    return {
        "model": str(folder),
        "layout": dict(case.layout),
        "rollout_layout": {"tensor": case.tensor},
        "rows": list(random_rows(9, VOCABULARY)),
        "prompts": random_rows(5, VOCABULARY, seed=3)[0],
        "updates": UPDATES,
        "dtype": case.dtype,
        "rollout": dict(case.rollout),
        "lora": case.lora,
        "exported": str(home / f"{name}, exported"),
    }


@pytest.mark.parametrize("name", named(CASES))
def test_vllm_follows_the_trainer(name: str, results: Launches, record_property: Callable[[str, Any], None]) -> None:
    case, by_rank = CASES[name], results[name]
    sampled = []
    record_property("measured", case.description | differences([update for rank in by_rank for update in rank]))
    for number in range(UPDATES):
        for rank in by_rank:
            result = rank[number]
            assert share_beyond(case.within, result["rollout_logprobs"], result["trainer_logprobs"]) <= case.beyond
            assert result["versions"] == [number + 1]
            assert result["differing"] == []  # bit for bit what vLLM's own loader makes of the exported files
            # An engine with the weights before the last update would be beyond the bound above.
            if number + 1 < UPDATES:
                stale = share_beyond(case.within, result["rollout_logprobs"], result["later_logprobs"])
                assert stale > (case.beyond or 0.5)
        sampled.append(by_rank[0][number]["rollout_logprobs"])
    assert sampled[0] != sampled[1] != sampled[2]  # the weights did change
    for updates in by_rank:
        check_latent_halves(updates, has_latents="latent" in name)


def check_latent_halves(updates: Sequence[Mapping[str, Any]], has_latents: bool) -> None:
    """Check that tensors that vLLM derives of latents' up projections are of the last update, where CUDA graphs know
    them."""
    for result in updates:
        assert bool(result["latent"]) == has_latents
        assert all(is_right for is_right, _ in result["latent"].values())
        assert result["latent"] == updates[0]["latent"]  # their addresses


def differences(updates: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the largest and the median difference of the engine's logprobs and the trainer's."""
    of_engine, of_trainer = (
        torch.tensor([value for result in updates for value in result[f"{which}_logprobs"]])
        for which in ("rollout", "trainer")
    )
    apart = (of_engine - of_trainer).abs()
    return {"logprobs": float(apart.max()), "median": float(apart.median())}


def share_beyond(level: float, these: list[float], those: list[float]) -> float:
    """Return the share of tokens whose two logprobs differ by more than ``level``, or are no numbers."""
    is_near = (torch.tensor(these) - torch.tensor(those)).abs() <= level
    return 1.0 - float(is_near.float().mean())
