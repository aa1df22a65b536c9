"""Environments of others as recipes/environments has them, in worker processes, with the packages themselves."""

from __future__ import annotations

import base64
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlhf_megatron.generation.partners import Trajectory, TurnEnvironment
from rlhf_megatron.recipe import MultiTurnSection
from rlhf_megatron.rewards import worker
from rlhf_megatron.rewards.answers import Outcome

ENVIRONMENTS = Path(__file__).resolve().parents[2] / "recipes" / "environments"


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed; see the file of recipes/environments")


@contextmanager
def partner(name: str) -> Iterator[TurnEnvironment]:
    found = TurnEnvironment(MultiTurnSection(environment=str(ENVIRONMENTS / name)), saves=True)
    yield found
    found.close()


def row(values: dict[str, Any]) -> dict[str, Any]:
    """A row of a data set as an environment gets it."""
    truth = values["reward_model"]["ground_truth"]
    return {name: values[name] for name in ("prompt", "data_source", "extra_info")} | {"ground_truth": truth, "seed": 7}


def said_by(outcome: Outcome) -> str:
    assert outcome.state == worker.DONE, outcome.message
    return "\n".join(message["content"] for message in outcome.messages)


def step(trajectory: Trajectory, action: str) -> Outcome:
    return trajectory.reply([{"role": "assistant", "content": action}], None).result(60)


@needs("reasoning_gym")
def test_a_task_of_reasoning_gym_has_a_second_try() -> None:
    values = {"prompt": [{"role": "user", "content": "3 + 4 ="}], "data_source": "reasoning_gym/chain_sum"}
    values |= {"reward_model": {"ground_truth": "7"}, "extra_info": {}}
    with partner("reasoning_gym_task.py") as environment:
        first, second = environment.begin(row(values)), environment.begin(row(values))
        assert said_by(first.reset().result(60)) == ""
        wrong = step(first, "70")
        assert (wrong.score, wrong.ends) == (0.0, False) and said_by(wrong) == "No. Try again."
        second.load(base64.b64decode(wrong.saved or ""))
        for trajectory in (first, second):
            right = step(trajectory, "7")
            assert (right.score, right.ends) == (0.5, True)
        first.reset().result(60)
        assert step(first, "7").score == 1.0
        for trajectory in (first, second):
            trajectory.close()
