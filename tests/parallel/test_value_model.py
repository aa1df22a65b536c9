"""Critics and reward models in several layouts against transformers and torch.optim.AdamW on one process in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

from hugging_face import (
    PAD,
    load_classifier,
    load_model,
    make_model,
    optimise,
    random_rows,
    row_logprobs,
    row_score,
    row_values,
)
from parallel.ranks import run_ranks
from parallel.value_ranks import head_over_a_cut_sequence, learn_scalars
from tiny_tokenizer import write_bpe_tokenizer, write_sentencepiece_model

LEARNING_RATE, CLIP, STEPS = 1e-3, 1.0, 2
# As in test_parity.py: AdamW's default epsilon blows rounding in tiny gradients up to whole learning rates.
OPTIMIZER = {"learning_rate": LEARNING_RATE, "clip_grad": CLIP, "weight_decay": 0.0, "epsilon": 1e-6}
# Of three rows, one rank of two has one and the other two.
CONVERSATIONS = [
    [{"role": "user", "content": "What is two plus three?"}],
    [{"role": "system", "content": "answer"}, {"role": "user", "content": "State the final answer"}],
    [{"role": "user", "content": "Natalia sold clips in May."}],
]
ANSWERS = ["The answer is five.", "it is 38", "half as many clips"]
FAMILIES = {
    "one": ("mistral", False),
    "data": ("llama", True),
    "pipeline": ("qwen2", False),
    "context": ("qwen2", True),
    "experts": ("qwen3_moe", False),
    "tensor": ("qwen3", True),
}
ON_TWO_RANKS = {
    "data": {"data": 2},
    "pipeline": {"pipeline": 2},
    "context": {"context": 2},
    "experts": {"data": 2, "expert": 2},
    "tensor": {"tensor": 2},
}


@pytest.mark.parametrize("layouts", [{"one": {}}, ON_TWO_RANKS], ids=["1", "2"])
def test_critics_and_reward_models_equal_transformers(layouts: dict[str, dict[str, int]], tmp_path: Path) -> None:
    """On two ranks, roles of five layouts and families are alive together with a policy of TP2."""
    prompts, responses = random_rows(8, 250)
    rows = [prompts, responses]
    # A row is read before closing padding, as transformers does (which gives the padding's embedding no gradient).
    pairs = [prompts, [*responses[:3], [*responses[3], PAD, PAD], *responses[4:]]]
    generator = torch.Generator().manual_seed(3)
    returns = torch.randn(sum(map(len, responses)), generator=generator).tolist()
    margins = [0.0, 0.5, 0.0, 1.25]
    models = {
        name: make_model(
            tmp_path / name, FAMILIES[name][0], tied=FAMILIES[name][1], vocabulary=400, classifier=True, seed=seed
        )
        for seed, name in enumerate(layouts)
    }
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }} {% endfor %}")
    rollouts = {
        "conversations": CONVERSATIONS,
        "answers": ANSWERS,
        "policy_tokenizer": str(write_sentencepiece_model(tmp_path)),
        "chat_template": str(template),
        "judge_tokenizer": str(write_bpe_tokenizer(tmp_path / "tokenizer")),
    }
    actor = make_model(tmp_path / "actor", "qwen3", seed=9)
    results: list[dict[str, Any]] = run_ranks(
        learn_scalars,
        1 if "one" in layouts else 2,
        {
            "models": {name: str(folder) for name, folder in models.items()},
            "layouts": layouts,
            "section": {"tokens_per_gpu": 60},
            "optimizer": OPTIMIZER,
            "steps": STEPS,
            "rows": rows,
            "pairs": pairs,
            "returns": returns,
            "margins": margins,
            "folder": str(tmp_path),
            "actor": str(actor),
            "rollouts": rollouts,
        },
    )
    assert all(result == results[0] for result in results), "every rank has the whole result"
    with torch.no_grad():
        expected = torch.cat([row_logprobs(load_model(actor), p, r) for p, r in zip(*rows, strict=True)])
    assert_close(results[0]["logprobs"], expected)

    for name, folder in models.items():
        result = results[0][name]
        check_import_and_export(folder, tmp_path / f"{name}_imported")
        critic, judge = load_classifier(folder), load_classifier(folder)
        with torch.no_grad():
            assert_close(result["values"], each(row_values, critic, rows))
            assert_close(result["scores"], each(row_score, critic, pairs))
            assert_close(result["of_rollouts"], scores_of_conversations(critic, Path(rollouts["judge_tokenizer"])))
        assert result["elsewhere"] == 0.0
        check_updates(
            result["value_updates"],
            critic,
            lambda model=critic: (each(row_values, model, rows) - torch.tensor(returns)).square().mean(),
            tmp_path / f"{name}_critic",
        )
        first, last = check_updates(
            result["score_updates"],
            judge,
            lambda model=judge: pair_loss(each(row_score, model, pairs), margins),
            tmp_path / f"{name}_judge",
        )
        ahead = torch.tensor(result["scores"])[0::2] - torch.tensor(result["scores"])[1::2]
        assert first["accuracy"] == float((ahead > 0).double().mean())
        assert first["margin"] == pytest.approx(float(ahead.mean()), abs=1e-5)
        assert last["margin"] > first["margin"]


def test_the_head_of_a_cut_sequence_has_the_whole_gradient_in_parts() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, push = (torch.randn(size, generator=generator) for size in ((6, 4), (4,), (6,)))
    arguments = {"hidden": hidden.tolist(), "weight": weight.tolist(), "push": push.tolist()}
    results = run_ranks(head_over_a_cut_sequence, 2, arguments)
    for result in results:
        assert_close(result["values"], hidden @ weight)
    assert_close([row for result in results for [row] in result["of_hidden"]], push[:, None] * weight)
    assert_close(torch.tensor([result["of_weight"] for result in results]).sum(0).tolist(), push @ hidden)


def scores_of_conversations(model: Any, tokenizer_folder: Path) -> Tensor:
    """Return what transformers says of the conversations in the reward model's own chat template."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    rows = [
        tokenizer.apply_chat_template(
            [*messages, {"role": "assistant", "content": answer}], tokenize=True, return_dict=True
        )["input_ids"]
        for messages, answer in zip(CONVERSATIONS, ANSWERS, strict=True)
    ]
    return each(row_score, model, [rows, [[]] * len(rows)])


def each(of_row: Callable[..., Tensor], model: Any, rows: list[Any]) -> Tensor:
    """Return what transformers says of every row, one after the other."""
    return torch.cat([of_row(model, p, r).reshape(-1) for p, r in zip(*rows, strict=True)])


def pair_loss(scores: Tensor, margins: list[float]) -> Tensor:
    """Return Bradley-Terry as cross-entropy: the chosen response against the rejected one with its margin added."""
    pairs = scores.view(-1, 2) + torch.tensor([[0.0, margin] for margin in margins])
    return functional.cross_entropy(pairs, torch.zeros(len(pairs), dtype=torch.int64))


def check_updates(
    updates: list[dict[str, float]], model: Any, loss: Callable[[], Tensor], exported: Path
) -> list[dict[str, float]]:
    """Return losses, gradient norms, and every weight of the export afterwards."""
    losses, norms = optimise(model, loss, STEPS, LEARNING_RATE, CLIP, OPTIMIZER["epsilon"])
    assert [update["loss"] for update in updates] == pytest.approx(losses, abs=1e-5)
    assert [update["grad_norm"] for update in updates] == pytest.approx(norms, rel=1e-5)
    after = load_classifier(exported).state_dict()
    expected = model.state_dict()
    assert set(after) == set(expected)
    for name, parameter in expected.items():
        assert (after[name] - parameter).abs().max() < 1e-5, name
    return updates


def check_import_and_export(folder: Path, imported: Path) -> None:
    """Check that what was read and written without a step is the same, to the bit, and says what it is."""
    before, after = load_file(folder / "model.safetensors"), load_file(imported / "model.safetensors")
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    config, original = (json.loads((path / "config.json").read_text()) for path in (imported, folder))
    assert config["architectures"] == original["architectures"] and config["num_labels"] == 1
    assert config["id2label"] == original["id2label"]


def assert_close(found: list[float], expected: Tensor) -> None:
    assert (torch.tensor(found) - expected).abs().max() < 1e-5
