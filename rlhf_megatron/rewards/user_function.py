"""A user's own functions in a file: a reward `compute_score(data_source, solution_str, ground_truth, extra_info)`, as
in verl, or what answers a turn, `respond(messages, ground_truth, extra_info)`. Either may be async.

Loading and calling happen in a worker process (worker.py); failures come back as text and become `RewardError` in
score.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import inspect
import math
import numbers
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

Result = float | dict[str, Any]
RewardFunction = Callable[[str, str, str, dict[str, Any]], Result | Awaitable[Result]]


@dataclass(frozen=True)
class Interface:
    """What a function is called with by name, what it is called by default, and the key that names it."""

    key: str
    default_name: str
    parameters: tuple[str, ...]
    instead: str  # of raising an error


REWARD = Interface(
    "reward.function",
    "compute_score",
    ("data_source", "solution_str", "ground_truth", "extra_info"),
    "return a number for such a sample",
)
TURN = Interface(
    "rollout.multi_turn.function",
    "respond",
    ("messages", "ground_truth", "extra_info"),
    "return None, which ends the response",
)


class FunctionUnusable(Exception):
    """A user's function that cannot be loaded; the text is for the user."""


class FunctionFailure(Exception):
    """A user's function that failed on a sample; the text is for the user."""


def split_specification(specification: str, default_name: str = REWARD.default_name) -> tuple[Path, str]:
    """Return file and function name of "path.py:function" or "path.py"."""
    path, found, name = specification.rpartition(":")
    if found and name.isidentifier():
        return Path(path), name
    return Path(specification), default_name


@lru_cache(maxsize=4)
def load(specification: str, interface: Interface = REWARD) -> Callable[..., Any]:
    """Run the file as a module of its own and return the function.

    Raises:
        FunctionUnusable: the file or the name is missing, the file fails when it is run, or the function does not take
            the interface's arguments by name.
    """
    path, name = split_specification(specification, interface.default_name)
    if not path.is_file():
        raise FunctionUnusable(f"there is no file {path}; set {interface.key} to path/to/file.py:function")
    unique = hashlib.md5(str(path.resolve()).encode(), usedforsecurity=False).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(f"rlhf_megatron_user_reward_{unique}", path)
    if spec is None or spec.loader is None:
        raise FunctionUnusable(f"{path} is not a Python file; set {interface.key} to path/to/file.py:function")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look there for what the file defines
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise FunctionUnusable(f"{path} cannot be imported: {describe(error, path)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        defined = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise FunctionUnusable(f"{path} has no function {name}; it defines {', '.join(defined) or 'none'}")
    try:
        inspect.signature(function).bind(**dict.fromkeys(interface.parameters))
    except TypeError as error:
        wanted = ", ".join(interface.parameters)
        raise FunctionUnusable(f"{name} in {path} must take ({wanted}) by name: {error}") from error
    return function  # type: ignore[no-any-return]  # getattr of a module has no type


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether calls can be awaited together."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def call(specification: str, *sample: Any) -> float:
    """Return the function's score of one sample: data_source, solution, ground_truth, extra_info.

    Raises:
        FunctionUnusable: it cannot be loaded.
        FunctionFailure: it raised, or returned neither a finite number nor a dictionary with such a "score".
    """
    function = load(specification)
    with _failures_told(specification):
        result = function(**dict(zip(REWARD.parameters, sample, strict=True)))
    return _number(specification, result)


def call_turn(specification: str, *conversation: Any) -> list[dict[str, str]]:
    """Return the messages that come next in a conversation: messages, ground_truth, extra_info; none where it ends.

    A text alone is a tool's message. Raises FunctionUnusable and FunctionFailure like `call`.
    """
    function = load(specification, TURN)
    with _failures_told(specification, TURN):
        result = function(**dict(zip(TURN.parameters, conversation, strict=True)))
        if inspect.isawaitable(result):
            result = _event_loop().run_until_complete(result)
    listed = result if isinstance(result, list) else [] if result is None else [result]
    messages = [{"role": "tool", "content": each} if isinstance(each, str) else each for each in listed]
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            shown, name = repr(result), split_specification(specification, TURN.default_name)[1]
            raise FunctionFailure(f"{name} returned {shown[:80]}; return a text, {{'role', 'content'}}, or None")
    return [{key: _encodable(message[key]) for key in ("role", "content")} for message in messages]


def _encodable(text: str) -> str:
    """Without halves of characters, which no tokenizer takes; a model may write one, and a tool repeat it."""
    return text.encode("utf-8", "replace").decode("utf-8")


@lru_cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """The one loop of this process, so that a function may keep its connections from call to call."""
    return asyncio.new_event_loop()


async def call_async(specification: str, *sample: Any) -> float:
    """Return what an async function says of one sample; arguments and errors are those of `call`."""
    function = load(specification)
    with _failures_told(specification):
        result = await function(**dict(zip(REWARD.parameters, sample, strict=True)))
    return _number(specification, result)


@contextlib.contextmanager
def _failures_told(specification: str, interface: Interface = REWARD) -> Iterator[None]:
    path, name = split_specification(specification, interface.default_name)
    try:
        yield
    # Code that a model wrote may call sys.exit(): that is its sample's.
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise FunctionFailure(
            f"{name} raised {describe(error, path)}; mend it, or have it {interface.instead}"
        ) from error


def _number(specification: str, result: Any) -> float:
    value = result.get("score") if isinstance(result, dict) else result
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        shown, name = repr(result), split_specification(specification)[1]
        raise FunctionFailure(
            f"{name} returned {shown[:80]} ({type(result).__name__}); return a finite number or {{'score': number}}"
        )
    return float(value)


def describe(error: BaseException, path: Path) -> str:
    """Return an error as one line: type, text, and the last line of the user's file that it passed through."""
    lines = str(error).strip().splitlines()
    own = path.resolve()
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).resolve() == own]
    where = f" ({path.name} line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {lines[0] if lines else ''}{where}"
