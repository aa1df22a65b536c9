"""Environments that count what is done to them, in a ledger outside of the run, and kill their rank where that is due.

campaign.py puts a copy of this file into games/NAME/ for each run. Beside it are ledger.jsonl, with a line for each
call that begins, and for a run that is to be killed a file ``kill``. Each life has a name of its own, which it says in
its first observation: kept rollouts show which life was trained. trajectories.py compares both.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import threading
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RUN = HERE.parents[1] / "runs" / HERE.name
SECONDS_OF_SAMPLING = 0.03  # by then the engine samples the turn that follows


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
        if self.turn == 2 and (RUN / "checkpoints" / "latest").exists():
            self.kill_if_due()
        return f"{self.turn}", len(action) % 5 / 4, len(action) % 8 == 1

    def close(self) -> None:
        """Note the end, or that of the rank."""
        self.note("close")

    def note(self, what: str) -> None:
        """Add a line to the ledger."""
        line = {"what": what, "life": self.name, "turn": self.turn, "process": os.getpid()}
        line |= {"seed": self.row["seed"], "attempt": self.row["attempt"]}
        with (HERE / "ledger.jsonl").open("a") as ledger:
            ledger.write(json.dumps(line) + "\n")

    def kill_if_due(self) -> None:
        """Kill the rank once for all games: now, or a moment later, when the model goes on."""
        try:
            when = (HERE / "kill").read_text()
            (HERE / "kill").unlink()
        except FileNotFoundError:  # another was first, or none is to do it
            return
        rank = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
        if when == "turn":
            threading.Timer(SECONDS_OF_SAMPLING, os.kill, (rank, signal.SIGKILL)).start()
        else:
            os.kill(rank, signal.SIGKILL)
            signal.pause()


class Saved(Forgetful):
    """A game that can: the same life goes on."""

    def state(self) -> bytes:
        """Return its name, and how far it is."""
        return json.dumps([self.name, self.turn]).encode()

    def load(self, row: dict[str, Any], state: bytes) -> None:
        """Go on, in place of ``reset``."""
        self.row, (self.name, self.turn) = row, json.loads(state)
        self.note("load")
