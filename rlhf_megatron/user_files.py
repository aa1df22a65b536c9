"""Python files of users: rewards, environments, tools, agents and data sets, each run as a module of its own."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def run_file(path: Path, kind: str) -> ModuleType | None:
    """Run a file and return the module that it makes; None where its name is not that of a Python file.

    ``kind``: a word of the module's name; the same file is another module for each.

    Raises:
        BaseException: what the file raises, of any kind; no module is left of it then.
    """
    unique = hashlib.md5(str(path.resolve()).encode(), usedforsecurity=False).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(f"rlhf_megatron_user_{kind}_{unique}", path)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look there for what the file defines
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(spec.name, None)
        raise
    return module
