"""Results of checks, the merging of those of many ranks, and the time limit under which a check runs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf_megatron.errors import UserError
from rlhf_megatron.runtime.ranks import named_ranks

Result = Literal["ok", "skipped", "warn", "fail"]
SEVERITY: dict[str, int] = {"ok": 0, "skipped": 1, "warn": 2, "fail": 3}
_STYLES = {"ok": "green", "skipped": "dim", "warn": "yellow", "fail": "bold red"}
_PLAIN_WIDTH = 140
_TEXTS_SHOWN = 4


class Check(NamedTuple):
    """The outcome of one check. ``advice`` says what to do about a warning or a failure; a skipped one says why."""

    name: str
    result: Result
    seen: str
    advice: str = ""


class NoAnswer(Exception):
    """Something did not end within its time."""


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """Return or raise what ``work`` does; raises NoAnswer after ``seconds``, while its thread stays behind.

    A thread and not a signal: what hangs is native code (a file system, a collective) that no Python handler reaches.
    """
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as error:  # handed on below
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise NoAnswer(f"no end within {seconds:g} s")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def run_check(name: str, seconds: float, work: Callable[[], Check | list[Check]]) -> list[Check]:
    """Return the check or checks of ``work``; an error in it is a failure with its text, and so is not ending in
    time."""
    if seconds <= 0:
        return [Check(name, "skipped", "the checks before it took all the time")]
    try:
        result = within(seconds, work)
    except NoAnswer as error:
        return [Check(name, "fail", f"{name}: {error}", "look whether a file system or a service hangs")]
    except UserError as error:
        what, _, to_do = str(error).rpartition("; ")  # as such errors are written: what is wrong; what to do
        return [Check(name, "fail", what or to_do, to_do if what else "")]
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        return [Check(name, "fail", f"{name}: {type(error).__name__}: {line}")]
    return result if isinstance(result, list) else [result]


def over_ranks(checks: Mapping[int, Sequence[Check]], hosts: Mapping[int, str]) -> list[Check]:
    """Return one check for each name, with the worst result of all ranks; what is wrong is named with the ranks it is
    at."""
    names = dict.fromkeys(check.name for rank in sorted(checks) for check in checks[rank])
    return [
        _merged([(rank, check) for rank in sorted(checks) for check in checks[rank] if check.name == name], hosts)
        for name in names
    ]


def _merged(checks: Sequence[tuple[int, Check]], hosts: Mapping[int, str]) -> Check:
    first = max((check for _, check in checks), key=lambda check: SEVERITY[check.result])
    if SEVERITY[first.result] <= SEVERITY["skipped"]:
        return first
    where: dict[str, list[int]] = {}
    for rank, check in checks:
        if check.result == first.result:
            where.setdefault(check.seen, []).append(rank)
    texts = [f"{named_ranks(ranks, hosts)}: {seen}" for seen, ranks in where.items()]
    more = [f"and {len(texts) - _TEXTS_SHOWN} more"] if len(texts) > _TEXTS_SHOWN else []
    return first._replace(seen="; ".join(texts[:_TEXTS_SHOWN] + more))


def passed(checks: Iterable[Check]) -> bool:
    """Return whether no check failed."""
    return all(check.result != "fail" for check in checks)


def print_table(checks: Sequence[Check], title: str, stream: TextIO) -> None:
    """Show all checks as one table, 140 columns wide where ``stream`` is no terminal."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for column in ("check", "result", "seen", "what to do"):
        table.add_column(column, no_wrap=column in ("check", "result"), overflow="fold")
    for check in checks:
        result = Text(check.result, style=_STYLES[check.result])
        table.add_row(Text(check.name), result, Text(check.seen), Text(check.advice))
    Console(file=stream, width=None if stream.isatty() else _PLAIN_WIDTH).print(table)


def as_json(checks: Sequence[Check], about: Mapping[str, Any]) -> str:
    """Return the same as JSON: ``about``, whether all passed, and a list of checks."""
    report = {**about, "passed": passed(checks), "checks": [check._asdict() for check in checks]}
    return json.dumps(report, indent=2, ensure_ascii=False) + "\n"


def mistakes_of(checks: Sequence[Check]) -> list[str]:
    """Return the failures, once each, in the form of an error: what is wrong; what to do."""
    failed = (check for check in checks if check.result == "fail")
    return list(dict.fromkeys("; ".join(filter(None, [check.seen, check.advice])) for check in failed))


def check_lines(checks: Sequence[Check]) -> list[str]:
    """Return lines of a plan: what each check saw."""
    lines = []
    for check in checks:
        result = "" if check.result == "ok" else f"{check.result}: "
        lines.append("; ".join(filter(None, [f"{check.name}: {result}{check.seen}", check.advice])))
    return lines
