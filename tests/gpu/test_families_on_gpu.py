"""vLLM beside the trainer on a GPU in bfloat16, family by family, as tests/parallel/test_family_rollout.py on CPUs."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from parallel.parity import Launches, named, selected_names
from parallel.ranks import run_ranks
from parallel.regather_ranks import follow_families
from parallel.test_family_rollout import CASES, UPDATES, arguments, check_latent_halves, differences

# vLLM's sleep is for one engine of a process, and here each family has one.
ROLLOUT = {"kv_cache_gb": 0.5, "enforce_eager": True, "sleep": False}
# Processes that share the GPU: a start of vLLM is work of the CPU, and with the cache's size given it measures nothing.
AT_A_TIME = 6
WITH_GRAPHS = {
    "latent attention with CUDA graphs": "latent attention, yarn",
    "soft caps with CUDA graphs": "soft caps, norms around sublayers",
}
ONE_RANK = [name for name, case in CASES.items() if case.launch[:2] == (1, 1)]
NAMES = {**{name: name for name in ONE_RANK}, **WITH_GRAPHS}
# vLLM 0.25.1 refuses these configs as transformers writes them, and so does a start with them.
NOT_OF_VLLM_0_25 = {
    "windows and two rotary tables": "rotary parameters by type of layer (OLMo 3)",
    "factors, renamed tensors": "the layer type full_attention (Granite 4)",
    "without positions": "the layer type full_attention (Granite 4)",
    "norms of turned heads": "a Hunyuan without use_qk_norm",
    "norms of turned heads, experts": "a Hunyuan without moe_intermediate_size",
    **dict.fromkeys(
        (
            *("heads by the type of a layer", "heads by the type of a layer, of images and text"),
            *("experts beside dense layers", "experts beside dense layers, of images and text"),
        ),
        "head_dim by layers, which it takes for one (Gemma 4, transformers 5.17)",
    ),
}
# vLLM 0.25 has a head's size of the hidden size in some families, and loads no vocabulary by its general model that it
# would have to pad.
HIDDEN, PADDED = {"hidden_size": 128}, 256


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launches:
    home = tmp_path_factory.mktemp("families")

    def launch(names: list[str]) -> dict[str, list[Any]]:
        cases = {}
        for name in names:
            rollout = ROLLOUT | {"enforce_eager": name not in WITH_GRAPHS}
            cases[name] = arguments(home, NAMES[name], CASES[NAMES[name]], PADDED, HIDDEN)
            cases[name] |= {"dtype": "bfloat16", "rollout": rollout}
        parts = [{name: cases[name] for name in names[first::AT_A_TIME]} for first in range(min(AT_A_TIME, len(names)))]
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            ends = list(pool.map(lambda part: run_ranks(follow_families, 1, {"cases": part}, timeout=590), parts))
        return {name: [result[name]] for (result,) in ends for name in result}

    of_launch = {name: (CASES[of].experts, name if name in WITH_GRAPHS else "") for name, of in NAMES.items()}
    return Launches(of_launch, selected_names(request), launch)


@pytest.mark.parametrize("name", named({name: CASES[of] for name, of in NAMES.items()}))
def test_vllm_follows_the_trainer(name: str, results: Launches, record_property: Callable[[str, Any], None]) -> None:
    measured = CASES[NAMES[name]].description | {"dtype": "bfloat16", "graphs": name in WITH_GRAPHS}
    record_property("measured", measured)
    if name in NOT_OF_VLLM_0_25 and importlib.metadata.version("vllm").startswith("0.25."):
        pytest.skip(f"vLLM 0.25 does not read {NOT_OF_VLLM_0_25[name]}")
    (updates,) = results[name]
    measured |= differences(updates)
    sampled = []
    for number in range(UPDATES):
        result = updates[number]
        difference = torch.tensor(result["rollout_logprobs"]) - torch.tensor(result["trainer_logprobs"])
        print(f"update {number}: largest {difference.abs().max():.2e}, median {difference.abs().median():.2e}")
        # Delta nets sum over tokens, and rounding with them.
        assert difference.abs().median() < (5e-2 if CASES[NAMES[name]].dtype == "bfloat16" else 1.5e-2)
        if not CASES[NAMES[name]].experts:  # near ties of a router may fall otherwise, in few tokens
            assert difference.abs().max() < 0.15
        assert result["versions"] == [number + 1]
        assert result["differing"] == []  # bit for bit what vLLM's own loader makes of the exported files
        sampled.append(result["rollout_logprobs"])
    assert sampled[0] != sampled[1] != sampled[2]  # the weights did change
    check_latent_halves(updates, has_latents="latent" in name)
