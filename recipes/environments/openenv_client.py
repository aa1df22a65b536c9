"""An OpenEnv environment behind its server on this host: the package's client, with a session for each trajectory.

Named by rollout.multi_turn.environment; OPENENV_URL says where the server is. Rows are those of ``tools/prepare_data.py
episodes``: reset gets the seed and the settings. recipes/tiny_openenv.yaml trains on it, with openenv_server.py.
"""

from __future__ import annotations

import json
import os
import urllib.request
from typing import Any

try:
    from openenv.core import GenericEnvClient
except ImportError as error:
    raise ImportError(f"{error}; OpenEnv needs its package: pip install openenv-core==0.3.0") from error

URL = os.environ.get("OPENENV_URL", "http://127.0.0.1:8000")


def action_field() -> str:
    """Return the one field of the environment's actions, which is the model's turn."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{URL}/schema", timeout=10) as answer:
            fields = json.load(answer)["action"]["required"]
    except OSError as error:
        raise OSError(f"no OpenEnv server answers at {URL} ({error}); start it, or set OPENENV_URL") from error
    if len(fields) != 1:
        raise ValueError(f"an action of the OpenEnv server at {URL} has the fields {fields} instead of one text")
    return str(fields[0])


FIELD = action_field()


class Environment:
    """One session."""

    def reset(self, row: dict[str, Any]) -> str | None:
        """Return the first observation of the row's episode."""
        episode = row["extra_info"]
        # Its thread answers the server's pings while the model generates; else the server ends the session in 40 s.
        self.client = GenericEnvClient(base_url=URL).sync()
        result = self.client.reset(seed=episode["seed"], **json.loads(episode["settings"]))
        return text_of(result.observation)

    def step(self, action: str) -> tuple[str | None, float, bool]:
        """Return the environment's answer to what follows thoughts."""
        result = self.client.step({FIELD: action.rpartition("</think>")[2].strip()})
        return text_of(result.observation), result.reward or 0.0, result.done

    def close(self) -> None:
        """End the session, of which servers have few."""
        self.client.close()


def text_of(observation: dict[str, Any]) -> str | None:
    """Return the text of an observation: the only one that it has, else all of it as JSON."""
    said = {name: value for name, value in observation.items() if value not in (None, "", [], {})}
    texts = list(said.values())
    return None if not texts else texts[0] if [*map(type, texts)] == [str] else json.dumps(said, ensure_ascii=False)
