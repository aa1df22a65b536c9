"""The judge of cases with environments or an agent: by kept rollouts and ledger, each trajectory was trained exactly
once."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import yaml

from rlhf_megatron.monitor.metrics import read_steps

GAMES = yaml.safe_load((Path(__file__).resolve().parent / "games.yaml").read_text(encoding="utf-8"))
_LIFE = re.compile(r"game ([0-9a-f]{8})")
_ENDS = ("<|im_end|>", "<|endoftext|>")  # of a turn of the tiny model's; one that is cut off is no action

Line = dict[str, Any]


class Trained(NamedTuple):
    """A row that a step was trained on: the game's life, and the turns that the game has seen of it. The life of an
    agent's is what it has heard."""

    step: int
    life: str
    turns: int


def trained_rows(run: Path) -> list[Trained]:
    """Return the kept rollouts of a run, the last of each step."""
    rows = []
    for step in range(1, GAMES["steps"] + 1):
        path = run / "rollouts" / f"step-{step}.parquet"
        for row in pq.read_table(path).to_pylist() if path.exists() else ():
            turns = sum(turn["sampled"] and turn["text"].endswith(_ENDS) for turn in row["turns"])
            (life,) = _LIFE.findall(row["prompt"])
            rows.append(Trained(step, life, turns))
    return rows


def heard_rows(run: Path) -> list[Trained]:
    """Return the kept rollouts of a run with an agent, the last of each step."""
    rows = []
    for step in range(1, GAMES["steps"] + 1):
        path = run / "rollouts" / f"step-{step}.parquet"
        for row in pq.read_table(path).to_pylist() if path.exists() else ():
            sampled = [token for token, own in zip(row["tokens"], row["sampled"], strict=True) if own]
            rows.append(Trained(step, life_of(sampled), sum(turn["sampled"] for turn in row["turns"])))
    return rows


def life_of(tokens: Iterable[int]) -> str:
    """Return the name of an agent's life, by all that it has heard."""
    return hashlib.blake2b(" ".join(map(str, tokens)).encode(), digest_size=4).hexdigest()


def begun_before(run: Path) -> Counter[str]:
    """Return the number of trajectories that were replayed, resumed and restarted, in the last pass of each step."""
    counts: Counter[str] = Counter()
    for metrics in read_steps(run / "metrics.jsonl").values():
        for what in ("replayed", "resumed", "restarted"):
            counts[what] += int(metrics[f"rollout/trajectories_{what}"] or 0)
    return counts


def accounts(trained: list[Trained], ledger: list[Line], counts: Counter[str]) -> list[str]:
    """Return problems of a run's trajectories: each prompt that was begun is trained on with all its responses, each
    life at most once, no action is lost or comes twice, and metrics say which lives went on and which began again."""
    lives = defaultdict[str, list[Line]](list)
    for line in ledger:
        lives[line["life"]].append(line)
    seed_of = {life: lines[0]["seed"] for life, lines in lives.items()}
    problems = _rows_problems(trained, seed_of)
    kept = {row.life: row.turns for row in trained}
    for life, lines in lives.items():
        problems += [f"game {life}: {problem}" for problem in _life_problems(lines, kept.get(life))]
    calls = Counter((line["what"], line["attempt"] > 1) for line in ledger)
    if (calls["reset", True], calls["load", True]) != (counts["restarted"], counts["resumed"]):
        problems.append(
            f"{calls['reset', True]} games began again and {calls['load', True]} went on, and metrics say "
            f"{counts['restarted']} and {counts['resumed']}"
        )
    if calls["reset", False] + calls["reset", True] > len(trained) + counts["restarted"]:
        problems.append(f"{calls['reset', False]} games began, of which {len(trained)} were trained")
    return problems


def _rows_problems(trained: list[Trained], seed_of: dict[str, int]) -> list[str]:
    """Return steps without all of their rows, and prompts that are not trained with each of their responses in one
    step."""
    batch = GAMES["batch"]
    rows = batch["prompts_per_step"] * batch["responses_per_prompt"]
    of_step = Counter(row.step for row in trained)
    problems = [
        f"step {step}: {of_step[step]} rows instead of {rows}"
        for step in range(1, GAMES["steps"] + 1)
        if of_step[step] != rows
    ]
    twice = [life for life, times in Counter(row.life for row in trained).items() if times > 1]
    problems += [f"game {life} was trained more than once" for life in twice]
    unknown = [row.life for row in trained if row.life not in seed_of]
    problems += [f"game {life} was trained and never played" for life in unknown]
    steps = defaultdict[int, list[int]](list)
    for row in trained:
        steps[seed_of.get(row.life, -1)].append(row.step)
    for seed in set(seed_of.values()):
        if len(steps[seed]) != batch["responses_per_prompt"] or len(set(steps[seed])) != 1:
            problems.append(f"the prompt of seed {seed} was begun and trained in steps {steps[seed]}")
    return problems


def _life_problems(lines: Iterable[Line], trained_turns: int | None) -> list[str]:
    """Return problems of what was done to one game, trained with so many turns, or not at all where it was begun
    again."""
    problems, turn, closes = [], 0, Counter[int]()
    for index, line in enumerate(lines):
        what, at = line["what"], line["turn"]
        closes[line["process"]] += what == "close"
        if (what == "reset") != (index == 0):
            problems.append(f"call {index + 1} is {what}")
        if what == "load" and turn - at not in (0, 1):  # the answer to the last turn may not have been recorded
            problems.append(f"went on at turn {at} behind turn {turn}")
        if what == "step" and at != turn + 1:
            problems.append(f"turn {at} follows turn {turn}")
        turn = at
    if any(times > 1 for times in closes.values()):
        problems.append("was closed more than once")
    if trained_turns is not None and turn != trained_turns:
        problems.append(f"has seen {turn} turns and was trained with {trained_turns}")
    if trained_turns is not None and not closes.total():
        problems.append("was trained and never closed")
    return problems


def lost_after_a_turn(trained: list[Trained], ledger: list[Line]) -> int:
    """Return the number of games that had seen a turn and were not trained; of a reset that is under way, or has not
    been called yet, nothing can be saved."""
    stepped = {line["life"] for line in ledger if line["what"] == "step"}
    return len(stepped - {row.life for row in trained})


class Program(NamedTuple):
    """A process of an agent's: what it has heard, and whether it came to its end."""

    seed: int
    attempt: int
    heard: list[int]
    ended: bool


def programs_of(ledger: list[Line]) -> list[Program]:
    """Return the programs of a ledger."""
    lines_of = defaultdict[str, list[Line]](list)
    for line in ledger:
        lines_of[line["life"]].append(line)
    return [
        Program(
            lines[0]["seed"],
            lines[0]["attempt"],
            [token for line in lines if line["what"] == "hear" for token in line["tokens"]],
            lines[-1]["what"] == "end",
        )
        for lines in lines_of.values()
    ]


def agent_accounts(trained: list[Trained], programs: list[Program], counts: Counter[str]) -> list[str]:
    """Return problems of a run's trajectories that programs have played: each prompt that was begun is trained on with
    all its responses, each program that has ended once, one that was killed is answered as before, and metrics say
    so."""
    ended = [program for program in programs if program.ended]
    seed_of = {life_of(program.heard): program.seed for program in ended}
    problems = _rows_problems(trained, seed_of)
    lives = {row.life for row in trained}
    problems += [f"game {life} was played to its end and not trained" for life in seed_of.keys() - lives]
    for program in programs:
        goes_on = any(each.seed == program.seed and each.heard[: len(program.heard)] == program.heard for each in ended)
        if not goes_on:
            problems.append(f"a program of seed {program.seed} was killed, and none was answered as it was")
    again = sum(program.attempt > 1 for program in programs)
    if again != counts["resumed"] + counts["restarted"]:
        problems.append(f"{again} programs began again, and metrics say {counts['resumed']} and {counts['restarted']}")
    if len(programs) > len(trained) + again:
        problems.append(f"{len(programs) - again} programs began, of which {len(trained)} were trained")
    return problems


def judged(run: Path, game: Path, is_agent: bool) -> tuple[list[str], Counter[str], int]:
    """Return the problems of a run whose environments or programs noted in ``game``, how its trajectories were begun,
    and how many of these were lost after their first turn. What evaluations play counts for nothing here."""
    lines = [json.loads(line) for line in (game / "ledger.jsonl").read_text(encoding="utf-8").splitlines()]
    ledger, counts = [line for line in lines if line["split"] == "train"], begun_before(run)
    if is_agent:  # of what programs have heard nothing is lost, or that is a problem
        return agent_accounts(heard_rows(run), programs_of(ledger), counts), counts, 0
    trained = trained_rows(run)
    return accounts(trained, ledger, counts), counts, lost_after_a_turn(trained, ledger)
