"""Programs: the last code block of a response, run in a sandbox on the test cases of its row.

Rows are those that verl's prime_code scores (codecontests, apps, codeforces, taco): the ground truth is a JSON object
of ``inputs`` and ``outputs``, texts for stdin and stdout, or with ``fn_name`` arguments and result of a function.
Outputs are compared as prime_code does, but whole numbers exactly. Not here: the sandbox (sandbox/), which no expected
output enters.
"""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import dataclass
from typing import Any

from rlhf_megatron.errors import UserError
from rlhf_megatron.recipe.reward import RewardCodeSection
from rlhf_megatron.rewards.sandbox.probe import required_steps
from rlhf_megatron.rewards.sandbox.process import Limits, run
from rlhf_megatron.untrusted import parse_json

_BLOCK = re.compile(r"```([^\n`]*)\n(.*?)(?:```|\Z)", re.DOTALL)
_PYTHON = ("python", "python3", "py")
# numpy.allclose, which prime_code calls.
_RELATIVE, _ABSOLUTE = 1e-5, 1e-8

# A program that looks up the answers, for checks of rows; a JSON value with these three names is a Python expression.
RECALL = (
    """```python
import sys, json
true, false, null = True, False, None
cases = {}

def plain(value, is_input):
    if "fn_name" not in cases or cases["fn_name"] is None:
        return value if isinstance(value, str) else "\\n".join(value)
    if not isinstance(value, str):
        return value
    return [json.loads(line) for line in value.split("\\n")] if is_input else json.loads(value)

def recall(given):
    return next(plain(right, False) for asked, right in zip(cases["inputs"], cases["outputs"])
                if plain(asked, True) == given)

if cases.get("fn_name"):
    globals()[cases["fn_name"]] = lambda *arguments: recall(list(arguments))
else:
    print(recall(sys.stdin.read()))
```""".replace("{", "{{")
    .replace("}", "}}")
    .replace("{{}}", "{}")
)


class EntryError(UserError):
    """A row without test cases that can be used; the text is for the user."""


@dataclass(frozen=True)
class TestCase:
    """One test: what a program is given, as text for stdin, and what it must print or, of a function, return."""

    given: str
    expected: Any


def extract_program(solution: str) -> str | None:
    """Return the last block marked as Python, else the last block, else the whole response; None if that is empty.

    Thoughts up to </think> do not count. A block that was cut off does.
    """
    text = solution.rpartition("</think>")[2]
    blocks = [(kind.strip().lower(), body) for kind, body in _BLOCK.findall(text)]
    chosen = [body for kind, body in blocks if kind in _PYTHON] or [body for _, body in blocks] or [text]
    return chosen[-1].strip("\n") if chosen[-1].strip() else None


def parse_cases(ground_truth: str) -> tuple[list[TestCase], str | None]:
    """Return the test cases of a row and the function's name, None where a program reads stdin.

    Raises:
        EntryError: it is not the JSON that prime_code's rows have.
    """
    what = "the ground truth of rule code"
    truth = parse_json(ground_truth, what, EntryError, finite=False)
    inputs, outputs = (truth.get(name) if isinstance(truth, dict) else None for name in ("inputs", "outputs"))
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise EntryError(f"{what} must be JSON with lists `inputs` and `outputs` of the same length, at least 1")
    function = truth.get("fn_name")
    if function is not None and not (isinstance(function, str) and function.isidentifier()):
        raise EntryError(f"{what}: fn_name is no name of a Python function")
    read = _read_lines if function is None else _read_call
    return [read(given, expected) for given, expected in zip(inputs, outputs, strict=True)], function


def _read_lines(given: Any, expected: Any) -> TestCase:
    texts = ["\n".join(map(str, value)) if isinstance(value, list) else value for value in (given, expected)]
    if not all(isinstance(text, str) for text in texts):
        raise EntryError("the ground truth of rule code: an input or output is neither text nor a list of lines")
    return TestCase(*texts)


def _read_call(given: Any, expected: Any) -> TestCase:
    """Return arguments and result, as JSON values or as texts of JSON, one argument a line."""
    what = "the ground truth of rule code, an argument or result"
    if isinstance(given, str):
        given = [parse_json(line, what, EntryError, finite=False) for line in given.split("\n")]
    if isinstance(expected, str):
        expected = parse_json(expected, what, EntryError, finite=False)
    if not isinstance(given, list):
        raise EntryError(f"{what}: inputs must be lists of arguments, or texts with one a line")
    return TestCase(json.dumps(given), expected)


def load(settings: dict[str, Any]) -> None:
    """Find out what the sandbox holds here; of settings as ``RewardCodeSection``'s fields.

    Raises:
        SandboxError: less than reward.code.isolation asks for.
    """
    required_steps(RewardCodeSection(**settings).isolation)


def score(solution: str, ground_truth: str, settings: dict[str, Any], seconds: float) -> float:
    """Return the fraction of test cases that a response's program passes, or 1.0 for all and else 0.0.

    Args:
        solution: the response.
        ground_truth: see ``parse_cases``.
        settings: fields of ``RewardCodeSection``.
        seconds: of all tests; those that have not ended by then are not passed.

    Raises:
        EntryError: the row's test cases cannot be used.
        SandboxError: the sandbox does not hold what it must.
    """
    section, deadline = RewardCodeSection(**settings), time.monotonic() + seconds
    required = required_steps(section.isolation)
    cases, function = parse_cases(ground_truth)
    program = extract_program(solution)
    passed = 0
    for number, case in enumerate(cases):
        left = min(section.timeout_seconds, deadline - time.monotonic())
        if program is None or left <= 0.0 or (section.score == "all" and passed < number):
            break
        limits = Limits(left, int(section.memory_limit_gb * 2**30), required)
        passed += _passes(run(program, case.given, limits, function), case.expected, function is not None)
    return passed / len(cases) if section.score == "fraction" else float(passed == len(cases))


def _passes(output: bytes | None, expected: Any, is_result: bool) -> bool:
    if output is None:
        return False
    text = output.decode("utf-8", "replace")
    if not is_result:
        return same_output(text, expected)
    try:
        result = json.loads(text)
    except (ValueError, RecursionError):
        return False
    # APPS has some results in a list of one.
    return bool(result == expected or (isinstance(expected, list) and expected and result == expected[0]))


def same_output(printed: str, expected: str) -> bool:
    """Return whether two outputs agree line by line: as text without white space around it, or as decimal numbers.

    Empty lines do not count. Numbers agree within 1e-8 plus 1e-5 of what is expected, whole ones exactly; a line of
    several numbers is text.
    """
    lines, right = ([line.strip() for line in text.splitlines() if line.strip()] for text in (printed, expected))
    if len(lines) != len(right):
        return False
    if lines == right:
        return True
    return all(map(_same_number, lines, right))


def _same_number(line: str, expected: str) -> bool:
    if _is_whole(line) and _is_whole(expected):
        return int(line) == int(expected) if max(len(line), len(expected)) < 4300 else line == expected
    try:
        value, target = float(line), float(expected)
    except ValueError:
        return False
    return value == target or (math.isfinite(target) and abs(value - target) <= _ABSOLUTE + _RELATIVE * abs(target))


def _is_whole(text: str) -> bool:
    return text.removeprefix("-").removeprefix("+").isdecimal()
