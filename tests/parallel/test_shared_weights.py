"""Rollout weights as views of the actor's: which are, and that nothing that is generated tells them from copies."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from hugging_face import make_model, random_rows
from parallel.ranks import run_ranks
from parallel.sharing_ranks import compare_all
from rlhf_megatron.topology.layout import Layout

BENCH = Path("tools/bench/shared_weights.py").resolve()


class Case(NamedTuple):
    """A family, tied or not, in a layout, and the rollout's; ``copied``: parts of the names of what is not shared."""

    family: str
    tied: bool
    layout: dict[str, int]
    rollout_layout: dict[str, Any]
    copied: tuple[str, ...] = ()
    told: str = ""
    more: Mapping[str, Any] = MappingProxyType({})


CASES = {
    # Experts come first: vLLM makes their process groups with the first engine or not at all.
    "TP2 = TP2, experts": Case("qwen3_moe", False, {"tensor": 2}, {"tensor": 2}),
    "DP2 EP2 = TP2 EP2": Case(
        "qwen3_moe", False, {"data": 2, "expert": 2}, {"tensor": 2, "expert_parallel": True},
        ("proj", "embed", "lm_head"), "cut in another way",
    ),
    "TP1, bfloat16": Case("qwen2", False, {}, {"tensor": 1}, more={"dtype": "bfloat16"}),
    "rollout of another type": Case(
        "llama", True, {}, {"tensor": 1}, ("",), "have another type", {"rollout": {"dtype": "bfloat16"}}
    ),
    "TP2 = TP2": Case("llama", False, {"tensor": 2}, {"tensor": 2}),
    "DP2 = TP1 x 2, tied": Case("qwen3", True, {"data": 2}, {"tensor": 1}),
    "CP2 = TP1 x 2, whole optimizer": Case(
        "mistral", True, {"context": 2}, {"tensor": 1}, more={"distributed": False}
    ),
    "DP2 -> TP2": Case("qwen3", False, {"data": 2}, {"tensor": 2}, ("proj", "embed", "lm_head"), "cut in another way"),
    "TP2 -> TP1 x 2": Case(
        "qwen3", True, {"tensor": 2}, {"tensor": 1}, ("proj", "embed", "lm_head"), "come from other ranks"
    ),
    "PP2 -> TP1 x 2": Case(
        "qwen3", False, {"pipeline": 2}, {"tensor": 1}, ("layers.2", "layers.3", "lm_head", "model.norm"),
        "come from other ranks",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Return each case's results by rank; all cases of as many ranks, and as many of a replica, share a launch."""
    cases: dict[tuple[int, int], dict[str, Any]] = defaultdict(dict)
    rows, prompts = list(random_rows(9, 250)), random_rows(5, 250, seed=3)[0]
    for name, case in CASES.items():
        # vLLM takes a head of Qwen2 for a fourth of the hidden size, whatever its config says.
        fields = {"hidden_size": 128} if case.family == "qwen2" else {}
        folder = make_model(tmp_path_factory.mktemp("model"), case.family, tied=case.tied, **fields)
        if case.tied:
            add_a_needless_head(folder)
        arguments = {"layout": case.layout, "rollout_layout": case.rollout_layout, "rows": rows, "prompts": prompts}
        size = Layout(**case.layout).size, case.rollout_layout["tensor"]
        cases[size][name] = {"model": str(folder), **arguments, **case.more}
    found: dict[str, list[dict[str, Any]]] = {}
    for (ranks, _), of_size in cases.items():
        by_rank = run_ranks(compare_all, ranks, {"cases": of_size})
        found |= {name: [result[name] for result in by_rank] for name in of_size}
    return found


@pytest.mark.parametrize("name", CASES)
def test_what_is_equal_is_the_same_memory(name: str, results: dict[str, list[dict[str, Any]]]) -> None:
    copied = CASES[name].copied
    result = results[name][0]
    expected = [each for each in result["all"] if not any(part in each for part in copied)]
    assert result["views"] == expected
    assert f"{len(expected)} of {len(result['all'])} parameters, " in result["told"]
    assert CASES[name].told in result["told"]
    for each in results[name]:
        assert each["of_copies"] == []
        assert each["told_of_copies"].startswith("0 of ")
    if not copied:  # nothing moves
        assert all(each["views"] == each["all"] for each in results[name])
        assert [each["copied"][0] + each["received"] for each in results[name]] == [0] * len(results[name])
    assert all(each["copied"][0] < each["copied"][1] for each in results[name]) == (copied != ("",))


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_copies_to_the_bit(name: str, results: dict[str, list[dict[str, Any]]]) -> None:
    for result in results[name]:
        for shared, copied in result["answers"]:
            assert shared == copied
        bound = 3e-2 if "bfloat16" in str(CASES[name].more) else 1e-4
        for (shared, _), of_trainer in zip(result["answers"], result["of_trainer"], strict=True):
            of_rollout = torch.tensor([value for _, logprobs in shared for value in logprobs])
            assert (of_rollout - torch.tensor(of_trainer)).abs().median() < bound  # both are the actor
        tokens = [[tokens for tokens, _ in shared] for shared, _ in result["answers"]]
        assert all(one != other for one, other in itertools.pairwise(tokens))  # the weights did change


def add_a_needless_head(folder: Path) -> None:
    """Write the output layer of tied embeddings down again, as some tools do; vLLM would then untie them."""
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_the_benchmark_copies_nothing_and_follows_the_weights(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3", tied=False)
    arguments = {"model": str(model), "way": "shared", "rows": 4, "length": 12, "repeats": 1, "kv_cache_gb": 0.0625}
    found = run_ranks(f"{BENCH}:measure", 1, arguments)[0]
    assert found["bytes_copied"] == found["bytes_received"] == 0
    assert found["tokens_digests"][0] != found["tokens_digests"][1]
