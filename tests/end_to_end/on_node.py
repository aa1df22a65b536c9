"""Runs a Python command in a network namespace, for tests: python on_node.py NAMESPACE -m torch.distributed.run ...

Not ``ip netns exec``, since that would leave the process that has done the imports (see nursery). No test lives here.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from nursery import become

CLONE_NEWNET = 0x40000000

if __name__ == "__main__":
    _, namespace, *command = sys.argv
    with open(f"/run/netns/{namespace}", "rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")
    become([[sys.executable, *command], os.getcwd(), dict(os.environ), False])
