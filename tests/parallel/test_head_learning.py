"""Heads in EAGLE-3's form learn beside an actor as by torch and torch.optim.AdamW, in any layout of one stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from hugging_face import make_model, random_rows, stored_tensors
from parallel.head_ranks import learn_heads
from parallel.parity import CLIP, OPTIMIZER, VOCABULARY
from parallel.ranks import run_ranks
from rlhf_megatron.models.architecture import read_architecture
from rlhf_megatron.models.draft_heads import read_head
from rlhf_megatron.topology.layout import Layout
from small_heads import HeadReference, make_head

STEPS, TEMPERATURE, DRAFTED = 2, 0.7, 90


class Case(NamedTuple):
    """An actor in a layout, and the layers whose hidden states its head reads."""

    family: str
    layout: dict[str, int]
    layers: tuple[int, ...] = (1, 2, 3)
    drafted: int = DRAFTED
    section: dict[str, Any] = {}  # noqa: RUF012
    hands_over: bool = False


CASES = {
    "one rank": Case("qwen3", {}, hands_over=True),
    "all tokens are drafted": Case("qwen3", {}, (0, 4), VOCABULARY),
    "layers are computed again": Case("qwen3", {}, section={"recompute": {"granularity": "full"}}),
    "scaled embeddings": Case("granite", {}, (0, 1, 3)),
    "TP2": Case("qwen3", {"tensor": 2}, section={"sequence_parallel": False}, hands_over=True),
    "TP2 SP": Case("qwen3", {"tensor": 2}, section={"sequence_parallel": True}),
    "DP2": Case("qwen3", {"data": 2}, hands_over=True),
    "CP2": Case("qwen3", {"context": 2}),
    "experts": Case("qwen3_moe", {}),
    "experts, TP2": Case("qwen3_moe", {"tensor": 2}),
    "experts, DP2 EP2": Case("qwen3_moe", {"data": 2, "expert": 2}),
}


def make_folders(home: Path, name: str) -> tuple[Path, Path]:
    """Return the folders of a case's model and of its head, made in ``home``."""
    case = CASES[name]
    model = home / case.family
    if not model.exists():
        make_model(model, case.family, tied=False, vocabulary=VOCABULARY, num_hidden_layers=4)
    return model, make_head(home / name, model, case.drafted, case.layers)


def arguments(name: str, folders: tuple[Path, Path], **section: Any) -> dict[str, Any]:
    """Return the arguments of a case in a launch, which writes its head beside where it was."""
    model, head = folders
    return {
        "model": str(model),
        "head": str(head),
        "layout": CASES[name].layout,
        "rows": list(random_rows(7, VOCABULARY)),
        "optimizer": OPTIMIZER,
        "temperature": TEMPERATURE,
        "steps": STEPS,
        "exported": f"{head}, exported",
        "section": CASES[name].section | section,
        "hands_over": CASES[name].hands_over,
    }


def learn_by_torch(model: Path, head: Path) -> tuple[HeadReference, list[float], list[float]]:
    """Return a head after all steps, and the losses and gradient norms of these."""
    reference, losses, norms = HeadReference(model, head), [], []
    own = list(reference.own.parameters())
    optimizer = torch.optim.AdamW(
        own, lr=OPTIMIZER["learning_rate"], eps=OPTIMIZER["epsilon"], betas=(0.9, 0.999), weight_decay=0.0
    )
    rows = random_rows(7, VOCABULARY)
    for _ in range(STEPS):
        optimizer.zero_grad()
        of_rows = [reference.row_logprobs(p, r, TEMPERATURE) for p, r in zip(*rows, strict=True)]
        loss = -torch.cat(of_rows).mean()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(own, CLIP)))
        optimizer.step()
        losses.append(loss.item())
    return reference, losses, norms


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Return the folders of each case's model and of its head."""
    home = tmp_path_factory.mktemp("heads")
    return {name: make_folders(home, name) for name in CASES}


@pytest.fixture(scope="module")
def learned(folders: dict[str, tuple[Path, Path]]) -> dict[str, list[list[dict[str, float]]]]:
    """Return the metrics of each case's steps, by rank."""
    results = {}
    for ranks in (1, 2):
        names = [name for name, case in CASES.items() if Layout(**case.layout).size == ranks]
        by_rank = run_ranks(learn_heads, ranks, {"cases": [arguments(name, folders[name]) for name in names]})
        results |= {name: [of_rank[place] for of_rank in by_rank] for place, name in enumerate(names)}
    return results


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_torch(
    name: str, folders: dict[str, tuple[Path, Path]], learned: dict[str, list[list[dict[str, float]]]]
) -> None:
    model, head = folders[name]
    by_rank = learned[name]
    assert all(metrics == by_rank[0] for metrics in by_rank)
    reference, losses, norms = learn_by_torch(model, head)
    assert [metrics["draft_loss"] for metrics in by_rank[0]] == pytest.approx(losses, abs=1e-5)
    assert [metrics["draft_grad_norm"] for metrics in by_rank[0]] == pytest.approx(norms, rel=1e-5)
    assert not any(metrics["draft_skipped"] for metrics in by_rank[0])
    written, expected = stored_tensors(Path(f"{head}, exported")), reference.tensors()
    assert written.keys() == stored_tensors(head).keys()
    for tensor in written.keys() - expected.keys():
        assert torch.equal(written[tensor], stored_tensors(head)[tensor])
    for tensor, value in expected.items():
        torch.testing.assert_close(written[tensor], value, atol=1e-5, rtol=0)
    target = read_architecture(model)
    assert read_head(f"{head}, exported", target) == read_head(head, target)
