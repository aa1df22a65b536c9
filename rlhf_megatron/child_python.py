"""Processes of this Python beside the one that starts them, such as reward workers."""

from __future__ import annotations

import json
import sys

_SAME_PATH = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "


def child_command(code: str, *arguments: str) -> list[str]:
    """Return the command that runs ``code`` in a child, with ``arguments`` from ``sys.argv[2]`` on.

    The child looks for modules where this process does, whatever the folder that it starts in.
    """
    return [sys.executable, "-P", "-c", _SAME_PATH + code, json.dumps(sys.path), *arguments]
