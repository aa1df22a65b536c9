"""An environment of verifiers plays each trajectory: its tasks and rewards as they are, the policy as its model.

Named by rollout.agent.function; rows are those of ``tools/prepare_data.py episodes --environment verifiers/TASKSET``,
whose seeds are numbers of tasks. recipes/tiny_verifiers.yaml trains on it. verifiers needs an older openai than vLLM,
so verifiers_player.py plays in a Python of its own, in one process beside each worker:

    python -m venv runs/verifiers && runs/verifiers/bin/pip install verifiers==0.4.0
    export VERIFIERS_PYTHON=runs/verifiers/bin/python
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


class Player:
    """The process with verifiers; it ends with this one, whose end of the pipe it reads."""

    def __init__(self, python: str) -> None:
        """Start it. Raises RuntimeError where it says anything else than that it is ready."""
        command = [python, str(Path(__file__).with_name("verifiers_player.py"))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def play(self, episode: dict[str, Any]) -> float:
        """Return the reward of an episode; raises RuntimeError where verifiers failed."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(episode) + "\n")
        self.process.stdin.flush()
        return float(self._answer()["reward"])

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "verifiers_player.py has ended"}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer


PLAYER = Player(os.environ.get("VERIFIERS_PYTHON", sys.executable))


def run(base_url: str, api_key: str, row: dict[str, Any]) -> float:
    """Return all rewards of one episode, the row's task."""
    episode = row["extra_info"]
    taskset = {"id": row["data_source"].removeprefix("verifiers/"), **json.loads(episode["settings"])}
    return PLAYER.play({"base_url": base_url, "api_key": api_key, "taskset": taskset, "task": episode["seed"]})
