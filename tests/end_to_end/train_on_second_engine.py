"""launch/train.py with the engine of tests/transformers_engine.py in vLLM's place. Not a test itself."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from rlhf_megatron.rollout.vllm.process_environment import prepare_environment

TESTS = Path(__file__).resolve().parents[1]


def main() -> None:
    """Register the engine, and train."""
    prepare_environment(deterministic=True)  # before torch is imported
    sys.path.insert(0, str(TESTS))
    from rlhf_megatron.rollout.engine_registry import ENGINES
    from transformers_engine import TransformersEngine

    ENGINES["vllm"] = TransformersEngine
    runpy.run_path(str(TESTS.parent / "launch" / "train.py"), run_name="__main__")


if __name__ == "__main__":
    main()
