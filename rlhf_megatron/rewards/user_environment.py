"""A user's environment: a class in a file. A worker process (worker.py) holds the one instance of a trajectory.

``reset(row)`` returns the first observation, or None where the row's prompt says all; ``step(action)`` returns
(observation, reward, done). Optional are ``score(ending)``, a last reward, ``close()``, and, for killed runs,
``state()``, which returns bytes, and ``load(row, state)``, in place of ``reset``. Each may be async.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import numbers
import random
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from rlhf_megatron.rewards import user_function
from rlhf_megatron.rewards.user_function import FunctionFailure, FunctionUnusable, Interface

INTERFACE = Interface(
    "rollout.multi_turn.environment", "Environment", (), "return an observation that says so", "class"
)
# What is asked of an environment.
RESET, STEP, SCORE, CLOSE, STATE, LOAD = "reset", "step", "score", "close", "state", "load"
# Why a trajectory ends: the environment says so, the model has had its turns, or its tokens.
DONE, TURNS, LENGTH = "done", "turns", "length"
MOST_STATE_BYTES = 2**24


class TimedOut(BaseException):
    """A call that took longer than it may; no ``except Exception`` of the environment's holds it up."""


class Reply(NamedTuple):
    """One answer: messages, the reward of the action, whether the environment ends the trajectory, and its state where
    that was asked for and can be had."""

    messages: list[dict[str, str]]
    reward: float = 0.0
    done: bool = False
    state: bytes | None = None


class _Process:
    """Of this process: the environment of its trajectory, and what names it."""

    environment: Any = None
    specification = ""


def load(specification: str) -> Callable[[], Any]:
    """Run the file and return the class.

    Raises:
        FunctionUnusable: it is missing, fails when it is run, or lacks reset or step.
    """
    functions = user_function.load(specification, INTERFACE)
    missing = [name for name in (RESET, STEP) if not callable(getattr(functions, name, None))]
    if missing:
        raise FunctionUnusable(f"{specification} has no method {missing[0]}; an environment has reset and step")
    return functions


def call(job: dict[str, Any]) -> Reply:
    """Do what a job asks of the environment, within its time.

    Raises:
        FunctionFailure: it raised, or returned something else than it should.
        TimedOut: it took too long.
    """
    specification = job["environment"]
    with _limited(job["timeout_seconds"]):
        if "state" in job:
            _begin(specification, job["row"])
            _method(specification, LOAD, job["row"], job["state"])
        if job["call"] == RESET:
            return _with_state(job, _reset(specification, job["row"]))
        if job["call"] == STEP:
            return _with_state(job, _step(specification, job["action"], job["last"]))
        if job["call"] == SCORE:
            return Reply([], _score(specification, LENGTH))
        _close(specification)
        return Reply([])


def _begin(specification: str, row: dict[str, Any]) -> None:
    _seed(row["seed"])
    _Process.environment, _Process.specification = None, specification
    _Process.environment = _guarded(specification, load(specification))


def _reset(specification: str, row: dict[str, Any]) -> Reply:
    _begin(specification, row)
    return Reply(_observed(specification, RESET, _method(specification, RESET, row)))


def _with_state(job: dict[str, Any], reply: Reply) -> Reply:
    """Return a reply after which the trajectory goes on, with the environment's state if the job asks for it."""
    environment, specification = _Process.environment, job["environment"]
    if reply.done or job.get("last") or not job.get("saves"):
        return reply
    if not (hasattr(environment, STATE) and hasattr(environment, LOAD)):
        return reply
    state = _method(specification, STATE)
    if state is not None and not isinstance(state, bytes):
        raise _wrong(specification, STATE, state, "bytes or None", TypeError())
    if state is not None and len(state) > MOST_STATE_BYTES:
        raise FunctionFailure(f"{specification}: state returned {len(state):,} bytes; at most {MOST_STATE_BYTES:,}")
    return reply._replace(state=state)


def _step(specification: str, action: str, last: bool) -> Reply:
    result = _method(specification, STEP, action)
    try:
        observation, given, ended = result
        reward, done = _number(given), bool(ended)
    except BaseException as error:
        raise _wrong(specification, STEP, result, "(observation, reward, done)", error) from error
    if done or last:
        return Reply([], reward + _score(specification, DONE if done else TURNS), done)
    return Reply(_observed(specification, STEP, observation), reward)


def _score(specification: str, ending: str) -> float:
    if not hasattr(_Process.environment, SCORE):
        return 0.0
    result = _method(specification, SCORE, ending)
    try:
        return _number(result)
    except BaseException as error:
        raise _wrong(specification, SCORE, result, "a finite number", error) from error


def _close(specification: str) -> None:
    environment, _Process.environment = _Process.environment, None
    if hasattr(environment, CLOSE):
        _guarded(specification, environment.close)


def close_left(seconds: float) -> None:
    """Close an environment that is still open, since nobody will ask any more; raises as ``call`` does."""
    if _Process.environment is not None:
        with _limited(seconds):
            _close(_Process.specification)


def _method(specification: str, name: str, *arguments: Any) -> Any:
    return _guarded(specification, lambda: getattr(_Process.environment, name)(*arguments))


def _guarded(specification: str, function: Callable[[], Any]) -> Any:
    """Return the result, awaited where it is to be, of code that may raise anything."""
    try:
        result = function()
        return user_function.event_loop().run_until_complete(result) if inspect.isawaitable(result) else result
    except TimedOut:
        raise
    except BaseException as error:
        raise user_function.failure(error, specification, INTERFACE) from error


def _observed(specification: str, name: str, observation: Any) -> list[dict[str, str]]:
    """Return an observation as messages; a text alone is the user's."""
    try:
        return user_function.messages_of(observation, "user")
    except BaseException as error:
        raise _wrong(specification, name, observation, "a text, {'role', 'content'}, or None", error) from error


def _number(value: Any) -> float:
    number = 0.0 if value is None else float(value) if isinstance(value, numbers.Real) else math.nan
    if not abs(number) <= user_function.LARGEST_SCORE:
        raise ValueError(f"the reward {number}")
    return number


def _wrong(specification: str, name: str, result: Any, wanted: str, error: BaseException) -> BaseException:
    if isinstance(error, TimedOut):
        return error
    return FunctionFailure(f"{specification}: {name} returned {user_function.shown_value(result)}; return {wanted}")


def _seed(seed: int) -> None:
    """Seed the generators of this process, from which many games draw."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise TimedOut in what runs longer; code that never comes back to Python is ended by the pool."""

    def interrupt(*_: Any) -> None:
        raise TimedOut

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
