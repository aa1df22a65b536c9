"""A user's own functions in a file: a reward ``compute_score(data_source, solution_str, ground_truth, extra_info)``, as
in verl, or what answers a turn, ``respond(messages, ground_truth, extra_info)``. Either may be async.

Loading and calling happen in a worker process (worker.py); failures come back as text and become ``RewardError`` in
score.py.
"""

from __future__ import annotations

import asyncio
import inspect
import numbers
import os
import stat
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlhf_megatron.untrusted import shown
from rlhf_megatron.user_files import run_file

# Rewards become float32, where a larger one is infinite.
LARGEST_SCORE = (2 - 2**-23) * 2.0**127
# What a function may say in one turn.
MOST_MESSAGES = 100
MOST_ROLE_CHARACTERS = 100

# Of one line about an error.
_MOST_CHARACTERS = 600

Result = float | dict[str, Any]
RewardFunction = Callable[[str, str, str, dict[str, Any]], Result | Awaitable[Result]]


@dataclass(frozen=True)
class Interface:
    """The keyword arguments of a function (None: its own), its default name, and the recipe key that names it."""

    key: str
    default_name: str
    parameters: tuple[str, ...] | None
    instead: str  # of raising an error
    noun: str = "function"


REWARD_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
TURN_PARAMETERS = ("messages", "ground_truth", "extra_info")
REWARD = Interface("reward.function", "compute_score", REWARD_PARAMETERS, "return a number for such a sample")
TURN = Interface("rollout.multi_turn.function", "respond", TURN_PARAMETERS, "return None, which ends the response")
CONTEXT = Interface("rollout.multi_turn.context", "context", TURN_PARAMETERS, "return None, which keeps all")


class FunctionUnusable(Exception):
    """A user's function that cannot be loaded; the text is for the user."""


class FunctionFailure(Exception):
    """A user's function that failed on a sample; the text is for the user."""


def split_specification(specification: str, default_name: str = REWARD.default_name) -> tuple[Path, str]:
    """Return file and function name of "path.py:function" or "path.py"."""
    path, separator, name = specification.rpartition(":")
    if separator and name.isidentifier():
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
    _check_file(path, interface)
    try:
        module = run_file(path, "reward")
    except BaseException as error:
        raise FunctionUnusable(f"{path} cannot be imported: {describe(error, path)}") from error
    if module is None:
        raise FunctionUnusable(f"{path} is not a Python file; set {interface.key} to path/to/file.py:{interface.noun}")
    try:
        function = getattr(module, name, None)
        is_callable = callable(function)
        wanted = inspect.isclass if interface.noun == "class" else inspect.isfunction
        defined = [key for key, value in vars(module).items() if wanted(value)]
    except BaseException as error:  # of a __getattr__ of the module's own
        raise FunctionUnusable(f"{path}: looking for {name} raised {describe(error, path)}") from error
    if function is None or not is_callable:
        raise FunctionUnusable(f"{path} has no {interface.noun} {name}; it defines {', '.join(defined) or 'none'}")
    if interface.parameters is None:
        return function  # type: ignore[no-any-return]
    try:
        inspect.signature(function).bind(**dict.fromkeys(interface.parameters))
    except BaseException as error:
        names = ", ".join(interface.parameters)
        raise FunctionUnusable(f"{name} in {path} must take ({names}) by name: {text_of(error)}") from error
    return function  # type: ignore[no-any-return]  # getattr of a module has no type


def _check_file(path: Path, interface: Interface) -> None:
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        raise FunctionUnusable(
            f"there is no file {path}; set {interface.key} to path/to/file.py:{interface.noun}"
        ) from error
    if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device might never end
        raise FunctionUnusable(
            f"{path} is a folder, a pipe or a device; set {interface.key} to path/to/file.py:{interface.noun}"
        )


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
    try:
        result = function(**dict(zip(REWARD_PARAMETERS, sample, strict=True)))
    except BaseException as error:
        raise failure(error, specification, REWARD) from error
    return _number(specification, result)


async def call_async(specification: str, *sample: Any) -> float:
    """Return what an async function says of one sample; arguments and errors are those of ``call``.

    Raises CancelledError where the call was cancelled, be it by the function itself.
    """
    function = load(specification)
    try:
        result = await function(**dict(zip(REWARD_PARAMETERS, sample, strict=True)))
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # a SystemExit would end the event loop, and with it all other calls
        raise failure(error, specification, REWARD) from error
    return _number(specification, result)


def call_turn(specification: str, *conversation: Any, interface: Interface = TURN) -> list[dict[str, str]]:
    """Return the messages that come next in a conversation: messages, ground_truth, extra_info; none where it ends.

    By CONTEXT: those that take its place, none where it stays. A text alone is a tool's message. Raises
    FunctionUnusable and FunctionFailure like ``call``.
    """
    function = load(specification, interface)
    try:
        result = function(**dict(zip(TURN_PARAMETERS, conversation, strict=True)))
        if inspect.isawaitable(result):
            result = event_loop().run_until_complete(result)
    except BaseException as error:
        raise failure(error, specification, interface) from error
    try:
        return messages_of(result, "tool")
    except BaseException as error:
        name = split_specification(specification, interface.default_name)[1]
        raise FunctionFailure(
            f"{name} returned {shown_value(result)}; return a text, {{'role', 'content'}}, or None"
        ) from error


def messages_of(result: Any, role: str) -> list[dict[str, str]]:
    """Return a function's result as messages of plain text, a text alone as one of ``role``.

    Raises ValueError where it is something else.
    """
    listed = result if isinstance(result, list) else [] if result is None else [result]
    if len(listed) > MOST_MESSAGES:
        raise ValueError
    messages = [{"role": role, "content": each} if isinstance(each, str) else each for each in listed]
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError
    plain = [{key: _encodable(message[key]) for key in ("role", "content")} for message in messages]
    if any(len(message["role"]) > MOST_ROLE_CHARACTERS for message in plain):
        raise ValueError
    return plain


def _encodable(text: str) -> str:
    """Return text without halves of characters, which no tokenizer takes; a model may write one, and a tool repeat
    it."""
    return str.encode(text, "utf-8", "replace").decode("utf-8")


@lru_cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return the one loop of this process, so that a function may keep its connections from call to call."""
    return asyncio.new_event_loop()


def failure(error: BaseException, specification: str, interface: Interface) -> FunctionFailure:
    """Return the failure of a call that raised; code that a model wrote may call sys.exit(), which is one as well."""
    path, name = split_specification(specification, interface.default_name)
    return FunctionFailure(f"{name} raised {describe(error, path)}; fix it, or have it {interface.instead}")


def _number(specification: str, result: Any) -> float:
    """Return the score that a function returned, which may be an object that lies about itself."""
    try:
        value = result.get("score") if isinstance(result, dict) else result
        number = float(value) if isinstance(value, numbers.Real) else None
        if number is not None and abs(number) <= LARGEST_SCORE:
            return number
        if inspect.iscoroutine(result):
            result.close()  # without the warning that nobody has awaited it
    except BaseException:
        number = None
    name = split_specification(specification)[1]
    raise FunctionFailure(
        f"{name} returned {shown_value(result)} ({_type_name(result)}); return a finite number or "
        "{'score': number}" + ("" if number is None or number != number else f", up to {LARGEST_SCORE:.3g}")
    )


def describe(error: BaseException, path: Path | None = None) -> str:
    """Return an error as one line: type, text, and the last line of the user's file, or of any, that it passed."""
    return f"{_type_name(error)}: {text_of(error)}{_line_in(error, path)}"


def text_of(error: BaseException) -> str:
    """Return the first line of an error's text in bounded length, whatever its class makes of it."""
    lines = _bounded(str, error, 20_000).strip().splitlines()
    return shown(lines[0], _MOST_CHARACTERS) if lines else ""


def _line_in(error: BaseException, path: Path | None) -> str:
    try:
        frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        own = {file for file in dict(frames) if path is None or Path(file).resolve() == path.resolve()}
    except (OSError, RuntimeError):  # the folder in which this process is may be gone
        return ""
    passed = [(file, line) for file, line in frames if file in own]
    return f" ({Path(passed[-1][0]).name} line {passed[-1][1]})" if passed else ""


def shown_value(value: Any) -> str:
    """Return a value in bounded length, whatever its class makes of it."""
    return shown(_bounded(repr, value, 80))


def _type_name(value: Any) -> str:
    return shown(_bounded(lambda of: type.__dict__["__name__"].__get__(type(of)), value, 80))


def _bounded(text_of_value: Callable[[Any], str], value: Any, most: int) -> str:
    """Return the beginning of a text that an object's own code makes: plain, and a few words where that code fails."""
    try:
        return str.__getitem__(text_of_value(value), slice(most))
    except BaseException:
        return "what cannot be shown"
