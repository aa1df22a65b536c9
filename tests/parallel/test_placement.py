"""Roles in layouts of their own on ranks of their own, all in one job, against each of them trained alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hugging_face import make_model, random_rows
from parallel.layout_ranks import learn_placed
from parallel.ranks import run_ranks

ACTOR = {"head": "language", "learns": True}
CRITIC = {"head": "scalar", "learns": True}
REFERENCE = {"head": "language", "learns": False}
REWARD_MODEL = {"head": "scalar", "learns": False}
ON_THE_SAME_RANKS: dict[str, dict[str, Any]] = {
    "actor": ACTOR | {"layout": {"tensor": 2, "pipeline": 2}, "ranks": [0, 1, 2, 3]},
    "critic": CRITIC | {"layout": {"data": 4}, "ranks": [0, 1, 2, 3]},
    "reference": REFERENCE | {"layout": {"context": 2, "data": 2}, "ranks": [0, 1, 2, 3]},
    "reward_model": REWARD_MODEL | {"layout": {"context": 2, "data": 2}, "ranks": [0, 1, 2, 3]},
}
ON_THEIR_OWN: dict[str, dict[str, Any]] = {
    "actor": ACTOR | {"layout": {"tensor": 2}, "ranks": [0, 1]},
    "critic": CRITIC | {"layout": {"data": 2}, "ranks": [2, 3]},
    "reference": REFERENCE | {"layout": {"pipeline": 2}, "ranks": [1, 2]},
    "reward_model": REWARD_MODEL | {"layout": {"pipeline": 2}, "ranks": [0, 3]},
}


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    home: Path = tmp_path_factory.mktemp("placement")
    return {
        "models": {
            "language": str(make_model(home / "language", "qwen3", vocabulary=250)),
            "scalar": str(make_model(home / "scalar", "qwen2", vocabulary=250, classifier=True, seed=1)),
        },
        "rows": list(random_rows(8, 250)),
        "section": {"tokens_per_gpu": 60},
        "optimizer": {"learning_rate": 1e-3, "clip_grad": 1.0, "epsilon": 1e-6},
    }


@pytest.fixture(scope="module")
def alone(arguments: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return each head on one rank, with nothing beside it; the frozen ones are the models as they were."""
    found = {}
    for name, about in (("actor", ACTOR), ("critic", CRITIC), ("reference", REFERENCE), ("reward_model", REWARD_MODEL)):
        roles = {name: about | {"layout": {}, "ranks": [0]}}
        found |= run_ranks(learn_placed, 1, arguments | {"roles": roles})[0]
    return found


@pytest.mark.parametrize("roles", [ON_THE_SAME_RANKS, ON_THEIR_OWN], ids=["the same ranks", "ranks of their own"])
def test_every_role_is_as_if_it_were_alone(
    roles: dict[str, dict[str, Any]], arguments: dict[str, Any], alone: dict[str, dict[str, Any]]
) -> None:
    by_rank = run_ranks(learn_placed, 4, arguments | {"roles": roles})
    for rank, found in enumerate(by_rank):
        for name, about in roles.items():
            assert found[name]["here"] == (rank in about["ranks"])
            assert found[name]["steps"] == by_rank[0][name]["steps"]
            assert found[name]["output"] == by_rank[0][name]["output"]
    for name in roles:
        steps, expected = by_rank[0][name]["steps"], alone[name]["steps"]
        assert len(steps) == (3 if roles[name]["learns"] else 0)
        for step, alone_step in zip(steps, expected, strict=True):
            assert step["loss"] == pytest.approx(alone_step["loss"], abs=1e-6)
            assert step["grad_norm"] == pytest.approx(alone_step["grad_norm"], rel=1e-5)
        assert by_rank[0][name]["output"] == pytest.approx(alone[name]["output"], abs=1e-5)
