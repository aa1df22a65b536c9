"""Environments and an agent that count what is done to them, in a ledger outside of the run, and kill their rank where
that is due.

campaign.py puts a copy of this file into games/NAME/ for each run. Beside it are ledger.jsonl, with a line for each
call that begins, and for a run that is to be killed a file ``kill``. Each life of an environment has a name of its own,
which it says in its first observation: kept rollouts show which life was trained. An agent names itself to nobody, for
one that begins again is to ask the same: its answers show what was trained. trajectories.py compares both.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RUN = HERE.parents[1] / "runs" / HERE.name
SECONDS_OF_SAMPLING = 0.03  # by then the engine samples the turn that follows
MOST_TURNS = 4


def note(what: str, life: str, row: dict[str, Any], **more: Any) -> None:
    """Add a line to the ledger."""
    line = {"what": what, "life": life, "process": os.getpid(), "seed": row["seed"], "attempt": row["attempt"]}
    line |= {"split": row["extra_info"]["split"], **more}
    with (HERE / "ledger.jsonl").open("a") as ledger:
        ledger.write(json.dumps(line) + "\n")


def kill_if_due(what: str) -> None:
    """Kill the rank once for all games, in the call that the file says: now, or a moment later, when the model goes on
    behind a "turn". There has to be a checkpoint."""
    if not (RUN / "checkpoints" / "latest").exists():
        return
    with contextlib.suppress(FileNotFoundError):  # another was first, or none is to do it
        if (HERE / "kill").read_text() != what:
            return
        (HERE / "kill").unlink()
        rank = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
        if what == "turn":
            threading.Timer(SECONDS_OF_SAMPLING, os.kill, (rank, signal.SIGKILL)).start()
        else:
            os.kill(rank, signal.SIGKILL)
            signal.pause()


class Forgetful:
    """A game that cannot be saved: a killed run begins it again, as another life."""

    def reset(self, row: dict[str, Any]) -> str:
        """Return a new life."""
        self.row, self.name, self.turn = row, secrets.token_hex(4), 0
        self.note("reset")
        return f"game {self.name}"

    def step(self, action: str) -> tuple[str, float, bool]:
        """Return some reward that differs between random answers; one in eight ends the game."""
        self.turn += 1
        self.note("step")
        if self.turn == 2:
            kill_if_due("turn")
        return f"{self.turn}", len(action) % 5 / 4, len(action) % 8 == 1

    def close(self) -> None:
        """Note the end, or that of the rank."""
        self.note("close")

    def note(self, what: str) -> None:
        """Add a line to the ledger."""
        note(what, self.name, self.row, turn=self.turn)
        if what != "step" or self.turn == 2:
            kill_if_due(what)


class Saved(Forgetful):
    """A game that can: the same life goes on."""

    def state(self) -> bytes | None:
        """Return its name, and how far it is."""
        return json.dumps([self.name, self.turn]).encode()

    def load(self, row: dict[str, Any], state: bytes) -> None:
        """Go on, in place of ``reset``."""
        self.row, (self.name, self.turn) = row, json.loads(state)
        self.note("load")


class Mixed(Saved):
    """A game of which one life in two can."""

    def state(self) -> bytes | None:
        """Return None for the others."""
        return super().state() if int(self.name, 16) % 2 else None


def run(base_url: str, api_key: str, row: dict[str, Any]) -> float:
    """Play as an agent whose questions follow from the row and the answers alone; one answer in eight is the last."""
    life, messages, length = secrets.token_hex(4), list(row["prompt"]), 0
    note("begin", life, row)
    for turn in range(1, MOST_TURNS + 1):
        answer = asked(base_url, api_key, messages)
        if answer is None:
            break
        text = answer["message"]["content"] or ""
        length += len(text)
        note("hear", life, row, tokens=answer["token_ids"])
        if turn == 2:
            kill_if_due("turn")
        if len(text) % 8 == 1:
            break
        messages += [{"role": "assistant", "content": text.strip()}, {"role": "user", "content": f"{turn}"}]
    note("end", life, row)
    kill_if_due("end")
    return length % 5 / 4


def asked(base_url: str, api_key: str, messages: list[dict[str, str]]) -> dict[str, Any] | None:
    """Return the answer to a conversation; None where no more of it fits. By no client of others, whose import takes
    longer than the game."""
    body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 20}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as response:
            choice: dict[str, Any] = json.load(response)["choices"][0]
    except urllib.error.HTTPError as error:
        if error.code != 400:
            raise
        return None
    return choice
