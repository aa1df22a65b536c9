"""A user's own reward: `compute_score(data_source, solution_str, ground_truth, extra_info)` in a file, as in verl.

Loading and calling happen in a worker process (worker.py); failures come back as text and become `RewardError` in
score.py.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import numbers
import traceback
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

RewardFunction = Callable[[str, str, str, dict[str, Any]], float | dict[str, Any]]

DEFAULT_NAME = "compute_score"
PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")


class FunctionFailure(Exception):
    """A user's function that cannot be loaded, or that failed on a sample; the text is for the user."""


def split_specification(specification: str) -> tuple[Path, str]:
    """Return file and function name of "path.py:function" or "path.py" (function: compute_score)."""
    path, found, name = specification.rpartition(":")
    if found and name.isidentifier():
        return Path(path), name
    return Path(specification), DEFAULT_NAME


@lru_cache(maxsize=4)
def load(specification: str) -> Callable[..., Any]:
    """Run the file as a module of its own and return the function.

    Raises:
        FunctionFailure: the file or the name is missing, the file fails when it is run, or the function does not take
            the four arguments by name.
    """
    path, name = split_specification(specification)
    if not path.is_file():
        raise FunctionFailure(f"there is no file {path}; set reward.function to path/to/file.py:function")
    spec = importlib.util.spec_from_file_location("rlhf_megatron_user_reward", path)
    if spec is None or spec.loader is None:
        raise FunctionFailure(f"{path} is not a Python file; set reward.function to path/to/file.py:function")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise FunctionFailure(f"{path} cannot be imported: {describe(error, path)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        defined = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise FunctionFailure(f"{path} has no function {name}; it defines {', '.join(defined) or 'none'}")
    try:
        inspect.signature(function).bind(**dict.fromkeys(PARAMETERS))
    except TypeError as error:
        raise FunctionFailure(f"{name} in {path} must take ({', '.join(PARAMETERS)}) by name: {error}") from error
    return function  # type: ignore[no-any-return]  # getattr of a module has no type


def call(specification: str, data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Return the function's score of one sample.

    Raises:
        FunctionFailure: it raised, or returned neither a finite number nor a dictionary with such a "score".
    """
    function = load(specification)
    path, name = split_specification(specification)
    try:
        result = function(
            data_source=data_source, solution_str=solution, ground_truth=ground_truth, extra_info=extra_info
        )
    except Exception as error:
        raise FunctionFailure(
            f"{name} raised {describe(error, path)}; mend it, or have it return a number for such a sample"
        ) from error
    value = result.get("score") if isinstance(result, dict) else result
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        shown = repr(result)
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
