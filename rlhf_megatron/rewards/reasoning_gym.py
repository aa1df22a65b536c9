"""reasoning-gym: each task's own scorer, asked for full marks only.

Why not the scorer's own value: most tasks give partial credit to any text that *contains* the answer, and 0.01 or 0.05
to any text at all. A policy is then paid for listing numbers, and groups without one right answer still get an
advantage. So the answer is extracted first, and the reward is 1.0 where the scorer gives full marks and 0.0 elsewhere.
A function of one's own (reward.function) can use ``scorer_value`` for the scorer's value.

Scorers run in a worker process (worker.py): some of them compute for ever on hostile text.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
import warnings
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from types import ModuleType
from typing import Any

PREFIX = "reasoning_gym/"

# These scorers hand the answer to SymPy's parser, which evaluates it as Python. Arithmetic needs none of this.
SYMPY_TASKS = frozenset(
    {"simple_integration", "intermediate_integration", "polynomial_multiplication", "puzzle24", "countdown"}
)
# These, and one that calls eval, evaluate what the row's entry holds as well.
ENTRY_TASKS = SYMPY_TASKS | {"bitwise_arithmetic"}
# These hand it (or the entry) to eval, although only literals are right; literal_eval in their modules runs nothing.
LITERAL_TASKS = frozenset({"string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "number_sorting"})
_UNSAFE = re.compile(r"__|[\"'`;\[\]{}\\@]|[^\W\d]\s*\.|\)\s*\.|\b(?:lambda|import|eval|exec|open|getattr|globals)\b")


class EntryError(Exception):
    """A row that lacks what its task's scorer needs; the text is for the user."""


def task_of(data_source: str) -> str:
    """Return the task's name from a data source "reasoning_gym/TASK"."""
    return data_source.removeprefix(PREFIX)


def extract_answer(solution: str) -> str:
    """Return the text between the last <answer> and </answer>, else the whole response; thoughts up to </think> go."""
    text = solution.rpartition("</think>")[2]
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return (text[start + len("<answer>") : end] if start >= 0 else text).strip()


def score(data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Return 1.0 if the task's scorer gives the extracted answer full marks, else 0.0.

    Args:
        data_source: "reasoning_gym/TASK".
        solution: the response.
        ground_truth: the oracle's answer; used where extra_info has no "entry".
        extra_info: ``entry`` and ``config`` as tools/prepare_data.py writes them (see ``encode``).

    Raises:
        EntryError: the task is unknown, or the row lacks what its scorer reads.
    """
    task = task_of(data_source)
    answer = extract_answer(solution)
    if task in _OWN_RULES:
        return 1.0 if _OWN_RULES[task](answer, ground_truth) else 0.0
    if scorer_value(data_source, solution, ground_truth, extra_info) < 1.0:
        return 0.0
    return 0.0 if task == "puzzle24" and not _solves_puzzle24(answer, _entry(ground_truth, extra_info)) else 1.0


def scorer_value(data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Return what the task's own scorer gives the extracted answer, partial credit included; see ``score``."""
    task = task_of(data_source)
    answer = extract_answer(solution)
    if not answer or (task in SYMPY_TASKS and _UNSAFE.search(answer)):
        return 0.0
    scorer = _scorer(task, extra_info.get("config") or "{}")
    entry = _entry(ground_truth, extra_info)
    if task in ENTRY_TASKS and any(map(_UNSAFE.search, _texts([entry["answer"], entry["metadata"]]))):
        raise EntryError(f"extra_info.entry of a row of {task} holds more than a formula, which its scorer would run")
    try:
        return float(scorer.score_answer(answer, entry))
    except Exception as error:
        # Some scorers raise on answers they cannot read. If the right answer raises as well, the row is at fault.
        if "entry" in extra_info:
            return 0.0
        try:
            scorer.score_answer(ground_truth, _entry(ground_truth, extra_info))
        except Exception:
            raise EntryError(
                f"the scorer of {task} cannot read this row ({type(error).__name__}: {error}); make the file with "
                "tools/prepare_data.py reasoning-gym, which keeps what the scorer needs in extra_info"
            ) from error
        return 0.0


def load() -> None:
    """Import reasoning-gym, so that the time limit of the first sample is not spent on it.

    Raises:
        EntryError: it is not installed.
    """
    try:
        import_package()
    except ImportError as error:
        raise EntryError(f"data_source {PREFIX}... needs the package reasoning-gym ({error}); install it") from error


def import_package() -> ModuleType:
    """Return reasoning-gym, without the warnings that compiling its dependencies prints; raises ImportError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        return importlib.import_module("reasoning_gym")


def encode(value: Any) -> str:
    """Return JSON text that ``decode`` turns back into the same value, tuples, sets and keys that are not text
    included.

    Scorers compare tuples with tuples and look numbers up as keys, so plain JSON would change their verdicts.

    Raises:
        TypeError: the value holds something that JSON has no form for.
    """

    def tagged(item: Any) -> Any:
        if isinstance(item, tuple):
            return {"__tuple__": [tagged(part) for part in item]}
        if isinstance(item, (set, frozenset)):
            return {"__set__": [tagged(part) for part in sorted(item, key=repr)]}
        if isinstance(item, list):
            return [tagged(part) for part in item]
        if isinstance(item, dict):
            if all(isinstance(key, str) for key in item):
                return {key: tagged(part) for key, part in item.items()}
            return {"__items__": [[tagged(key), tagged(part)] for key, part in item.items()]}
        return item

    return json.dumps(tagged(value), ensure_ascii=False)


def decode(text: str) -> Any:
    """Return the value that ``encode`` wrote."""

    def untagged(item: dict[str, Any]) -> Any:
        if len(item) == 1:
            [(tag, content)] = item.items()
            if tag == "__tuple__":
                return tuple(content)
            if tag == "__set__":
                return set(content)
            if tag == "__items__":
                return {key: part for key, part in content}
        return item

    return json.loads(text, object_hook=untagged)


@lru_cache(maxsize=64)
def _scorer(task: str, config: str) -> Any:
    """Return the dataset object whose score_answer judges this task, made with the configuration of the rows."""
    import_package()
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise EntryError(f"reasoning-gym has no task {task}; data_source must be {PREFIX}TASK")
    dataset_class, config_class = DATASETS[task]
    if task in LITERAL_TASKS:
        vars(sys.modules[dataset_class.__module__])["eval"] = ast.literal_eval
    try:
        return dataset_class(config=config_class(**decode(config)))
    except (TypeError, AssertionError) as error:
        raise EntryError(f"extra_info.config does not fit the task {task}: {error}") from error


def _entry(ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    """Return the entry as reasoning-gym made it: fresh every time, because some scorers change it."""
    stored = extra_info.get("entry")
    if isinstance(stored, str):
        entry: dict[str, Any] = decode(stored)
        return entry
    metadata = extra_info.get("metadata") or {}
    return {"answer": ground_truth, "metadata": decode(metadata) if isinstance(metadata, str) else metadata}


def _texts(value: Any) -> Iterator[str]:
    """Yield all text within a value, but for the keys of mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts(list(value.values()))
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _texts(item)


def _same_truth_value(answer: str, truth: str) -> bool:
    return answer.lower() == truth.lower()


def _same_probability(answer: str, truth: str) -> bool:
    """Compare within the 1e-4 that the task's own scorer tolerates."""
    try:
        return abs(Fraction(answer.replace(",", "")) - Fraction(truth)) <= Fraction(1, 10_000)
    except (ValueError, ZeroDivisionError):
        return False


def _solves_puzzle24(answer: str, entry: dict[str, Any]) -> bool:
    """Return whether the row's own numbers make exactly 24; the task's scorer takes any four numbers, and 24.5."""
    from sympy.parsing.sympy_parser import parse_expr  # type: ignore[import-untyped]

    used = sorted(int(number) for number in re.findall(r"\d+", answer))
    return used == sorted(entry["metadata"].get("numbers", used)) and bool(parse_expr(answer) == 24)


# Scorers of reasoning-gym 0.1.25 that give full marks to wrong answers: the first compares bool(text) with bool(text),
# the second scores by the share of the *answer* that is a prefix of the right decimal, so "0" is right everywhere.
_OWN_RULES = {"game_of_life_halting": _same_truth_value, "coin_flip": _same_probability}
