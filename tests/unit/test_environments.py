"""Environments with a state: what their class may do, in processes of their own, and what a failure costs."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from rlhf_megatron.errors import RolloutError
from rlhf_megatron.generation.partners import TurnEnvironment
from rlhf_megatron.recipe import MultiTurnSection
from rlhf_megatron.rewards import worker
from rlhf_megatron.rewards.answers import Outcome
from rlhf_megatron.rewards.user_environment import LENGTH, TURNS
from rlhf_megatron.rewards.worker_process import DIED

GAME = """
import asyncio, json, os, random, socket, sys, time

class Environment:
    def reset(self, row):
        self.row, self.actions = row, []
        if row["ground_truth"] == "silent":
            return None
        if row["ground_truth"] == "fails":
            raise KeyError("no such game")
        return f"{random.random()} {os.getpid()}"

    async def step(self, action):
        await asyncio.sleep(0)
        self.actions.append(action)
        if action == "raise":
            raise ValueError("a wrong move")
        if action == "sleep":
            time.sleep(600)
        while action == "stay":
            try:
                time.sleep(600)
            except BaseException:
                pass
        if action == "die":
            os._exit(3)
        if action == "grow":
            self.kept = [bytearray(os.urandom(2**20)) for _ in range(600)]
            time.sleep(600)
        if action == "pair":
            return "x", 1.0
        if action == "infinite":
            return "x", float("inf"), False
        if action == "connect":
            with socket.socket() as own, socket.socket() as other:
                own.bind(("127.0.0.1", 0))
                own.listen()
                other.connect(own.getsockname())  # a loopback of its own
            try:
                socket.create_connection(("127.0.0.1", int(self.row["extra_info"]["port"])), 5).close()
            except OSError as error:
                return str(error), None, False
            return "connected", None, False
        if action == "win":
            return None, 2, True
        return [{"role": "user", "content": " ".join(self.actions)}], 0.5, False

    def score(self, ending):
        return {"done": 10.0, "turns": 20.0, "length": 30.0}[ending]

    async def close(self):
        with open(self.row["extra_info"]["log"], "a") as log:
            log.write(json.dumps(self.actions) + "\\n")
"""


@pytest.fixture(scope="module")
def game(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("games") / "game.py"
    path.write_text(GAME)
    return path


@pytest.fixture(scope="module")
def environment(game: Path) -> Iterator[TurnEnvironment]:
    found = TurnEnvironment(MultiTurnSection(environment=str(game), timeout_seconds=1.0, max_answer_tokens=10))
    yield found
    found.close()


def row(folder: Path, truth: str = "", seed: int = 7) -> dict[str, Any]:
    info = {"log": str(folder / "closed.jsonl")}
    return {"prompt": [], "data_source": "", "ground_truth": truth, "extra_info": info, "seed": seed}


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def text_of(future: Future[Outcome]) -> str:
    (message,) = future.result(60).messages
    assert message["role"] == "user"
    return message["content"]


def wait_for(log: Path, lines: int) -> list[Any]:
    deadline = time.monotonic() + 60
    while (not log.exists() or log.read_text().count("\n") < lines) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_each_trajectory_has_a_state_of_its_own(environment: TurnEnvironment, tmp_path: Path) -> None:
    first, second = (environment.begin(row(tmp_path)) for _ in range(2))
    draws = [text_of(each.reset()).split() for each in (first, second)]
    assert draws[0][0] == draws[1][0], "the same seed"
    assert draws[0][1] != draws[1][1], "a process each"
    assert [text_of(each.reply(said(word), None)) for word in "ab" for each in (first, second)] == [
        "a",
        "a",
        "a b",
        "a b",
    ]
    outcome = first.reply(said("win"), None).result(60)
    assert outcome.ends and outcome.score == 12.0 and outcome.messages == ()
    outcome = second.reply(said("c"), TURNS).result(60)
    assert not outcome.ends and outcome.score == 20.5, "its last action is scored too"
    for each in (first, second):
        each.close()
    assert sorted(wait_for(tmp_path / "closed.jsonl", 2)) == [["a", "b", "c"], ["a", "b", "win"]]
    third = environment.begin(row(tmp_path))
    assert text_of(third.reset()).split()[0] == draws[0][0], "also in a process that has been used"
    third.close()


def test_a_response_that_is_cut_off_is_scored_and_no_action(environment: TurnEnvironment, tmp_path: Path) -> None:
    begun = environment.begin(row(tmp_path, "silent"))
    assert begun.reset().result(60).messages == ()
    outcome = begun.reply(said("half an act"), LENGTH).result(60)
    assert not outcome.ends and outcome.score == 30.0
    begun.close()
    assert wait_for(tmp_path / "closed.jsonl", 1) == [[]]


@pytest.mark.parametrize(
    ("action", "state", "why"),
    [
        ("raise", worker.FAILED, "Environment raised ValueError: a wrong move (game.py line"),
        ("pair", worker.FAILED, "step returned ('x', 1.0); return (observation, reward, done)"),
        ("infinite", worker.FAILED, "step returned ('x', inf, False); return (observation, reward, done)"),
        ("sleep", worker.TIMED_OUT, ""),
    ],
)
def test_close_runs_after_a_failure(
    action: str, state: str, why: str, environment: TurnEnvironment, tmp_path: Path
) -> None:
    begun = environment.begin(row(tmp_path))
    begun.reset()
    outcome = begun.reply(said(action), None).result(60)
    assert outcome.state == state and why in outcome.message
    assert environment.messages_of(outcome) is None
    begun.close()
    assert wait_for(tmp_path / "closed.jsonl", 1) == [[action]]


@pytest.mark.parametrize(("action", "state"), [("die", DIED), ("stay", worker.TIMED_OUT)])
def test_a_process_that_is_lost_costs_its_trajectory_alone(
    action: str, state: str, environment: TurnEnvironment, tmp_path: Path
) -> None:
    lost, other = (environment.begin(row(tmp_path)) for _ in range(2))
    text_of(lost.reset()), text_of(other.reset())
    assert lost.reply(said(action), None).result(60).state == state
    assert lost.reply(said("a"), None).result(60).state == state, "it is over"
    assert text_of(other.reply(said("a"), None)) == "a"
    for each in (lost, other):
        each.close()
    assert wait_for(tmp_path / "closed.jsonl", 1) == [["a"]]


def test_one_that_takes_more_memory_than_it_may_costs_its_trajectory_alone(game: Path, tmp_path: Path) -> None:
    environment = TurnEnvironment(MultiTurnSection(environment=str(game), timeout_seconds=60.0, memory_limit_gb=0.3))
    large, other = (environment.begin(row(tmp_path)) for _ in range(2))
    text_of(large.reset()), text_of(other.reset())
    outcome = large.reply(said("grow"), None).result(60)
    assert outcome.state == DIED and "used more memory than memory_limit_gb allows" in outcome.message
    assert text_of(other.reply(said("a"), None)) == "a"
    for each in (large, other):
        each.close()
    environment.close()
    assert wait_for(tmp_path / "closed.jsonl", 1) == [["a"]]


RANK = """
import os, signal, sys
from rlhf_megatron.generation.partners import TurnEnvironment
from rlhf_megatron.recipe import MultiTurnSection
game, log, how = sys.argv[1:]
environment = TurnEnvironment(MultiTurnSection(environment=game))
row = {"prompt": [], "data_source": "", "ground_truth": "", "extra_info": {"log": log}, "seed": 1, "attempt": 1}
begun = [environment.begin(row) for _ in range(2)]
for each in begun:
    each.reset().result()
    each.reply([{"role": "assistant", "content": how}], None).result()
os.kill(os.getpid(), signal.Signals[how])
"""


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_a_rank_that_is_killed_leaves_no_environment_open(how: str, game: Path, tmp_path: Path) -> None:
    log = tmp_path / "closed.jsonl"
    subprocess.run([sys.executable, "-P", "-c", RANK, str(game), str(log), how], timeout=120)
    assert wait_for(log, 2) == [[how], [how]]


def test_a_beginning_that_fails_says_why(environment: TurnEnvironment, tmp_path: Path) -> None:
    begun = environment.begin(row(tmp_path, "fails"))
    outcome = begun.reset().result(60)
    assert outcome.state == worker.FAILED and "raised KeyError: 'no such game'" in outcome.message
    begun.close()


def test_without_a_network_only_a_loopback_of_its_own_is_left(game: Path, tmp_path: Path) -> None:
    section = MultiTurnSection(environment=str(game), timeout_seconds=20.0, network=False)
    try:
        environment = TurnEnvironment(section)
    except RolloutError as error:
        assert "this machine allows no network namespaces" in str(error)
        pytest.skip(str(error))
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        asked = row(tmp_path)
        asked["extra_info"]["port"] = server.getsockname()[1]
        begun = environment.begin(asked)
        text_of(begun.reset())
        assert "refused" in text_of(begun.reply(said("connect"), None))
        begun.close()
        assert wait_for(tmp_path / "closed.jsonl", 1), "files are as they were"
    environment.close()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("class Game: pass", "has no class Environment; it defines Game"),
        ("size = 1", "has no class Environment; it defines none"),
        ("class Environment:\n    def reset(self, row): ...", "has no method step; an environment has reset and step"),
        ("class Environment:\n    def __init__(self, size): ...", "missing a required argument: 'size'"),
    ],
)
def test_what_is_no_environment(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "game.py"
    path.write_text(text)
    with pytest.raises(RolloutError, match=f"rollout.multi_turn.environment: .*{expected}"):
        TurnEnvironment(MultiTurnSection(environment=str(path)))


def test_the_game_of_the_recipes() -> None:
    path = Path(__file__).resolve().parents[2] / "recipes" / "environments" / "guess.py"
    spec = importlib.util.spec_from_file_location("guess", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    game = module.Environment()
    game.reset({"ground_truth": "-3"})
    assert game.step("what?") == ("a number", -0.1, False)
    assert game.step("5 or 1") == ("more than -inf, less than 1", -0.1, False)
    assert game.step("-9") == ("more than -9, less than 1", -0.1, False)
    saved, game = game.state(), module.Environment()
    game.load({"ground_truth": "-3"}, saved)
    assert game.step("4") == ("more than -9, less than 1", -0.1, False)
    assert game.step("-3") == (None, 1.0, True)
