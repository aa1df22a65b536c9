"""A user's agent: a function that plays one trajectory with whatever client or framework, and returns its reward.

``run(base_url, api_key, row)`` asks the model at an OpenAI-compatible endpoint; it may be async. Loading and calling
happen in a worker process (worker.py).
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable
from typing import Any

from rlhf_megatron.rewards import user_function
from rlhf_megatron.rewards.user_environment import Reply, TimedOut, _limited, _seed
from rlhf_megatron.rewards.user_function import FunctionFailure, Interface

_PARAMETERS = ("base_url", "api_key", "row")
INTERFACE = Interface("rollout.agent.function", "run", _PARAMETERS, "return a number, the trajectory's reward")


def call(job: dict[str, Any]) -> Reply:
    """Have the function play a trajectory, within its time; ``done`` of the reply says that it gave a reward.

    Raises:
        FunctionUnusable: it cannot be loaded.
        FunctionFailure: it raised, or returned something else than a finite number or None.
        TimedOut: it took too long.
    """
    specification = job["function"]
    with _limited(job["timeout_seconds"]):
        function = user_function.load(specification, INTERFACE)
        _seed(job["row"]["seed"])
        result = _result(specification, function, {name: job[name] for name in _PARAMETERS})
    if result is None:
        return Reply([])
    if isinstance(result, numbers.Real) and abs(float(result)) <= user_function.LARGEST_SCORE:
        return Reply([], float(result), True)
    raise FunctionFailure(
        f"{specification}: returned {user_function.shown_value(result)}; return a finite number or None"
    )


def _result(specification: str, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Return what the function returns, awaited where it is to be."""
    try:
        result = function(**arguments)
        return user_function.event_loop().run_until_complete(result) if inspect.isawaitable(result) else result
    except TimedOut:
        raise
    except BaseException as error:
        raise user_function.failure(error, specification, INTERFACE) from error
