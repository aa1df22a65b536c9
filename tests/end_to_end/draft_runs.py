"""Runs for whose policy a model drafts that learns: their recipe and its metrics. No test lives here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from end_to_end.commands import torchrun
from end_to_end.runs import LENGTH_REWARD, TRAIN, steps_of


def write_recipe(folder: Path, name: str, steps: int, **speculative: Any) -> None:
    """Write NAME.yaml, whose ``speculative`` section drafts two tokens and learns, and its reward."""
    drafting = speculative | {"num_speculative_tokens": 2, "optimizer": {"learning_rate": 1e-3}}
    recipe: dict[str, Any] = {
        "name": name,
        "loop": "rl",
        "steps": steps,
        "model": {"path": "model", "dtype": "float32"},
        "data": {"train_files": ["train.parquet"], "max_prompt_length": 64},
        "batch": {"prompts_per_step": 4, "responses_per_prompt": 4, "minibatch_prompts": 2},
        "actor": {"tokens_per_gpu": 256, "layout": {"tensor": 2}, "optimizer": {"learning_rate": 1e-4}},
        "rollout": {"max_response_length": 12, "scheduling": "static", "speculative": drafting},
        "regather": {"verify": 2},
        "evaluation": {"at_start": False, "at_end": False},
        "reward": {"function": "reward.py"},
        "checkpoint": {"save_interval": 2},
        "monitor": {"plots": False},
    }
    (folder / "reward.py").write_text(LENGTH_REWARD)
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe))


def train(folder: Path, recipe: str, *keys: str) -> dict[int, dict[str, float]]:
    """Run NAME.yaml to the end on two ranks, with further keys; return the metrics of the steps."""
    with torchrun(2, TRAIN, f"{recipe}.yaml", *keys, folder=folder) as command:
        command.finish().check()
    name = next((key.partition("=")[2] for key in keys if key.startswith("name=")), recipe)
    return steps_of(folder / "runs" / name)
