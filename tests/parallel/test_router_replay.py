"""Router replay: given experts are followed exactly in every layout, vLLM's are those of transformers, and trainer and
rollout agree better by them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hugging_face import load_model, make_model, random_rows, row_logprobs, train
from parallel.ranks import run_ranks
from parallel.replay_ranks import learn, mismatch, record
from rlhf_megatron.rollout.vllm.process_environment import has_gpu

OPTIMIZER = {"learning_rate": 1e-3, "clip_grad": 1.0, "weight_decay": 0.0, "epsilon": 1e-6}
STEPS = 2
UNKNOWN = 255
RECOMPUTED = {"recompute": {"granularity": "full"}}
without_gpu = pytest.mark.skipif(has_gpu(), reason="the engine of this machine needs a GPU, which is hidden here")


class Case(NamedTuple):
    """A family in a layout."""

    family: str
    layout: dict[str, int]
    section: Mapping[str, Any] = MappingProxyType({})


CASES = {
    "PP2 VP2, recomputed": Case("qwen2_moe", {"pipeline": 2, "virtual_pipeline": 2}, RECOMPUTED),
    "TP2 and EP2": Case("qwen3_moe", {"tensor": 2, "expert": 2, "expert_tensor": 1}),
    "CP2": Case("qwen3_moe", {"context": 2}),
    "DP2 EP2": Case("qwen3_moe_plain", {"data": 2, "expert": 2}),
    "sigmoid scores, TP2": Case("glm4_moe", {"tensor": 2}),
}


def random_choices(lengths: Sequence[int], routers: Sequence[Any], seed: int) -> list[Tensor]:
    """Return experts for each token in each layer, whatever a router would say; of some tokens nothing is known."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        scores = torch.rand(length, len(routers), routers[0].num_experts, generator=generator)
        choices = scores.topk(routers[0].top_k).indices
        choices[torch.rand(length, generator=generator) < 0.2] = UNKNOWN
        rows.append(choices)
    return rows


def routers_of(model: Any) -> list[Any]:
    """Return the routers of transformers' model, in the order of their layers."""
    names = "topkrouter", "gemma4textrouter", "moev1gate"  # as transformers before 5.19 calls that of Hunyuan
    return [module for module in model.modules() if type(module).__name__.lower().endswith(names)]


@contextmanager
def told(model: Any, choices: Sequence[Tensor]) -> Iterator[None]:
    """Have the routers of transformers' model take these experts, row by row in turn, again and again."""

    def replay(layer: int, calls: list[int]) -> Any:
        def hook(router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            logits, _, own = output
            given = choices[calls[0] % len(choices)][:, layer]
            calls[0] += 1
            taken = torch.where(given == UNKNOWN, own, given)
            scores = logits.sigmoid() if hasattr(router, "e_score_correction_bias") else logits.softmax(-1)
            weights = scores.gather(-1, taken)
            if router.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights * getattr(router, "routed_scaling_factor", 1.0), taken

        return hook

    handles = [router.register_forward_hook(replay(layer, [0])) for layer, router in enumerate(routers_of(model))]
    yield
    for handle in handles:
        handle.remove()


def test_given_experts_are_followed(tmp_path: Path) -> None:
    rows = random_rows(7, 250)
    lengths = [len(prompt) + len(response) for prompt, response in zip(*rows, strict=True)]
    arguments, choices = {}, {}
    for name, case in CASES.items():
        folder = tmp_path / case.family
        if not folder.exists():
            make_model(folder, case.family, tied=False)
        choices[name] = random_choices(lengths, routers_of(load_model(folder)), seed=5)
        arguments[name] = {
            "model": str(folder),
            "layout": case.layout,
            "section": {"tokens_per_gpu": 40, **case.section},
            "optimizer": OPTIMIZER,
            "rows": rows,
            "choices": [of_row.tolist() for of_row in choices[name]],
            "steps": STEPS,
        }
    results = run_ranks(learn, 2, {"cases": arguments})[0]
    for name, case in CASES.items():
        result, model = results[name], load_model(tmp_path / case.family)
        own = torch.cat([row_logprobs(model, *row) for row in zip(*rows, strict=True)])
        assert torch.tensor(result["own"]).sub(own).abs().max() < 1e-5, f"{name}: none are given"
        with told(model, choices[name]):
            wanted = torch.cat([row_logprobs(model, *row) for row in zip(*rows, strict=True)])
            losses, norms = train(model, *rows, STEPS, 1e-3, 1.0, 1e-6)
        assert own.sub(wanted).abs().max() > 0.05, "other experts make another model"
        assert torch.tensor(result["logprobs"]).sub(wanted).abs().max() < 1e-5, name
        assert result["losses"] == pytest.approx(losses, abs=1e-5), name
        assert result["grad_norms"] == pytest.approx(norms, rel=1e-4), name


@without_gpu
@pytest.mark.parametrize("speculative", [None, {"match": 1}])
def test_choices_of_vllm_are_those_of_transformers(tmp_path: Path, speculative: dict[str, int] | None) -> None:
    make_model(tmp_path / "model", "qwen2_moe", tied=False, hidden_size=128, head_dim=32)
    model = load_model(tmp_path / "model")
    chosen: list[Tensor] = []
    for router in routers_of(model):
        router.register_forward_hook(lambda _, __, output: chosen.append(output[2]))
    settings = {"max_num_seqs": 4, "speculative": speculative}
    rows = run_ranks(record, 1, {"model": str(tmp_path / "model"), **settings})[0]
    for tokens, choices in rows:
        chosen.clear()
        model(torch.tensor([tokens]))
        wanted = torch.stack(chosen, 1)[:-1].sort(-1).values
        assert torch.equal(torch.tensor(choices)[: len(wanted)].sort(-1).values, wanted)
        assert len(choices) == len(tokens) - 1, "nobody computes the last token"


@without_gpu
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3_moe", "bfloat16"),
        pytest.param("qwen3_moe", "float32", marks=pytest.mark.grid),
        pytest.param("qwen3_next", "bfloat16", marks=pytest.mark.grid),  # whose cache is of two kinds
        pytest.param("gemma4_text_experts", "bfloat16", marks=pytest.mark.grid),
    ],
)
def test_trainer_and_rollout_agree_by_replay(tmp_path: Path, family: str, dtype: str) -> None:
    fields = {"num_experts": 16, "top_k_experts" if family.startswith("gemma4") else "num_experts_per_tok": 4}
    rollout: dict[str, Any] = {"layout": {"tensor": 2, "expert_parallel": True}, "max_num_seqs": 8}
    if family == "qwen3_next":  # what vLLM's delta nets take on CPUs
        fields |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
        rollout["enable_prefix_caching"] = False
    make_model(tmp_path / "model", family, tied=False, **fields)
    arguments = {"model": str(tmp_path / "model"), "dtype": dtype, "layout": {"data": 2, "expert": 2}}
    of_replay = run_ranks(mismatch, 2, arguments | {"rollout": rollout})[0]
    off, replayed = of_replay["off"], of_replay["rollout"]
    if dtype == "float32":
        assert max(of_each["train/rollout_logprob_abs_diff_max"] for of_each in (off, replayed)) < 1e-4
    else:  # near ties of the routers fall differently
        assert replayed["train/mismatch_kl"] < off["train/mismatch_kl"] / 2
        assert replayed["train/rollout_logprob_abs_diff_max"] < off["train/rollout_logprob_abs_diff_max"] / 2
