"""Environments of others as recipes/environments has them, in worker processes, with the packages themselves."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rlhf_megatron.agents.program import AgentProgram
from rlhf_megatron.errors import RolloutError
from rlhf_megatron.generation.partners import Trajectory, TurnEnvironment
from rlhf_megatron.recipe import AgentSection, MultiTurnSection
from rlhf_megatron.rewards import worker
from rlhf_megatron.rewards.answers import Outcome

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
ENVIRONMENTS, AGENTS = RECIPES / "environments", RECIPES / "agents"


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed; see the file of recipes/environments")


@contextmanager
def partner(name: str) -> Iterator[TurnEnvironment]:
    found = TurnEnvironment(MultiTurnSection(environment=str(ENVIRONMENTS / name)), saves=True)
    yield found
    found.close()


def row(values: dict[str, Any]) -> dict[str, Any]:
    """Return a row of a data set as an environment gets it."""
    truth = values["reward_model"]["ground_truth"]
    return {name: values[name] for name in ("prompt", "data_source", "extra_info")} | {"ground_truth": truth, "seed": 7}


def said_by(outcome: Outcome) -> str:
    assert outcome.state == worker.DONE, outcome.message
    return "\n".join(message["content"] for message in outcome.messages)


def step(trajectory: Trajectory, action: str) -> Outcome:
    return trajectory.reply([{"role": "assistant", "content": action}], None).result(60)


@needs("reasoning_gym")
def test_a_task_of_reasoning_gym_has_a_second_try() -> None:
    values = {"prompt": [{"role": "user", "content": "3 + 4 ="}], "data_source": "reasoning_gym/chain_sum"}
    values |= {"reward_model": {"ground_truth": "7"}, "extra_info": {}}
    with partner("reasoning_gym_task.py") as environment:
        first, second = environment.begin(row(values)), environment.begin(row(values))
        assert said_by(first.reset().result(60)) == ""
        wrong = step(first, "70")
        assert (wrong.score, wrong.ends) == (0.0, False) and said_by(wrong) == "No. Try again."
        second.load(base64.b64decode(wrong.saved or ""))
        for trajectory in (first, second):
            right = step(trajectory, "7")
            assert (right.score, right.ends) == (0.5, True)
        first.reset().result(60)
        assert step(first, "7").score == 1.0
        for trajectory in (first, second):
            trajectory.close()


@needs("textarena")
def test_a_game_of_textarena_is_played_to_its_end_and_goes_on_where_it_was() -> None:
    settings = json.dumps({"min_number": 1, "max_number": 3, "max_turns": 3})
    values = {"prompt": [{"role": "system", "content": "Play."}], "data_source": "textarena/GuessTheNumber-v0"}
    values |= {"reward_model": {"ground_truth": ""}, "extra_info": {"seed": 1, "settings": settings}}
    with partner("textarena_game.py") as environment:
        first, second = environment.begin(row(values)), environment.begin(row(values))
        assert "guess the number between 1 and 3 within 3 turns" in said_by(first.reset().result(60))
        wrong = step(first, "3")  # its number of this seed is 1
        assert (wrong.score, wrong.ends) == (0.0, False) and said_by(wrong) == "The target number is lower."
        second.load(base64.b64decode(wrong.saved or ""))
        assert "already guessed" in said_by(step(second, "[3]"))
        for trajectory in (first, second):
            right = step(trajectory, "[1]")
            assert (right.score, right.ends) == (1.0, True)
            trajectory.close()


@needs("textarena")
def test_an_invalid_move_that_ends_a_game_of_textarena_pays_nothing() -> None:
    values = {"prompt": [{"role": "system", "content": "Play."}], "data_source": "textarena/ThreeCardMonte-v0"}
    values |= {"reward_model": {"ground_truth": ""}, "extra_info": {"seed": 1, "settings": json.dumps({"steps": 1})}}
    with partner("textarena_game.py") as environment:
        game = environment.begin(row(values))
        assert "Shuffle 1/1: swapped cups" in said_by(game.reset().result(60))
        assert not step(game, "3").ends
        over = step(game, "3")
        assert (over.score, over.ends) == (0.0, True)
        game.close()


OPENENV = """
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Said(Action):
    text: str

class Heard(Observation):
    text: str = ""

class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, last=3):
        self.last, self.turns = last, 0
        return Heard(text=f"episode {seed}, {last} turns")

    def step(self, action):
        self.turns += 1
        return Heard(text=f"{self.turns}: {action.text}", reward=0.5, done=self.turns == self.last)

    @property
    def state(self):
        return State()

app = create_fastapi_app(Echo, Said, Heard, max_concurrent_envs=1)
"""


@pytest.fixture
def openenv_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run OpenEnv's own server of one session, which ends one that answers no ping for two seconds."""
    (tmp_path / "echo_app.py").write_text(OPENENV)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        flags = ("--ws-ping-interval", "0.5", "--ws-ping-timeout", "2", "--log-level", "error")
        command = [sys.executable, "-m", "uvicorn", "echo_app:app", "--fd", str(listener.fileno()), *flags]
        server = subprocess.Popen(command, cwd=tmp_path, pass_fds=[listener.fileno()])
        monkeypatch.setenv("OPENENV_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
        yield
        server.terminate()
        server.wait()


@needs("openenv")
@pytest.mark.usefixtures("openenv_server")
def test_a_session_of_openenv_lasts_while_the_model_is_slow_and_ends_with_its_trajectory() -> None:
    values = {"prompt": [{"role": "system", "content": "Play."}], "data_source": "openenv/echo"}
    values |= {"reward_model": {"ground_truth": ""}, "extra_info": {"seed": 5, "settings": json.dumps({"last": 2})}}
    with partner("openenv_client.py") as environment:
        for _ in range(2):  # the second has the one session only if the first has ended its own
            trajectory = environment.begin(row(values))
            assert said_by(trajectory.reset().result(60)) == "episode 5, 2 turns"
            time.sleep(4)  # beyond the patience of the server, whose pings are answered
            first = step(trajectory, "<think>?</think> one")
            assert (first.score, first.ends) == (0.5, False) and said_by(first) == "1: one"
            second = step(trajectory, "two")
            assert (second.score, second.ends) == (0.5, True)
            trajectory.close()


@needs("openenv")
def test_without_a_server_of_openenv_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_URL", "http://127.0.0.1:9")
    said = r"no OpenEnv server answers at http://127\.0\.0\.1:9 .*start it"
    with pytest.raises(RolloutError, match=said), partner("openenv_client.py"):
        pass


class Policy(BaseHTTPRequestHandler):
    """Policy that answers sums: at first with what is no answer, then rightly where the conversation is even, and
    counts turns."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (self.path, self.headers["Authorization"]) == ("/v1/chat/completions", "Bearer key")
        question = asked["messages"][0]["content"].partition("problem: ")[2].rstrip("= ").replace(" ", "")
        total = sum(map(int, re.findall(r"-?\d+", question)))
        message = {"role": "assistant", "content": f"{total}" if len(asked["messages"]) > 1 else "100"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "policy", "usage": usage}
        text = json.dumps(answer | {"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.skipif(
    "VERIFIERS_PYTHON" not in os.environ and importlib.util.find_spec("verifiers") is None,
    reason="verifiers needs an older openai than vLLM: name a Python that has it by VERIFIERS_PYTHON",
)
def test_an_environment_of_verifiers_plays_tasks_and_says_what_is_missing() -> None:
    spec = importlib.util.spec_from_file_location("verifiers_environment", AGENTS / "verifiers_environment.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with ThreadingHTTPServer(("127.0.0.1", 0), Policy) as policy:
        threading.Thread(target=policy.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{policy.server_port}/v1"
        values = {"data_source": "verifiers/verifiers-sums", "extra_info": {"seed": 3, "settings": "{}"}}
        assert module.run(url, "key", values) == 0.5  # right in the second try
        with pytest.raises(RuntimeError, match="taskset 'none' not found"):
            module.run(url, "key", values | {"data_source": "verifiers/none"})
        policy.shutdown()
    module.PLAYER.process.communicate()  # it ends with the pipe
    assert module.PLAYER.process.returncode == 0


def test_a_python_without_verifiers_gets_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    monkeypatch.setenv("VERIFIERS_PYTHON", str(tmp_path / "bare" / "bin" / "python"))
    said = "No module named '.*'; VERIFIERS_PYTHON must name a Python with the package: pip install verifiers==0.4.0"
    with pytest.raises(RolloutError, match=said):
        AgentProgram(AgentSection(function=str(AGENTS / "verifiers_environment.py")), needs_reward=True)
