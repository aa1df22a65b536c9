"""TRL's side of ``peer.py``: GRPOTrainer by a file of settings, with a clock around each of its steps.

    python tools/bench/peer_trl.py SETTINGS.json OUTPUT.json

The settings: ``arguments`` for GRPOConfig, the ``model`` folder, the ``prompts`` (a parquet file), the ``reward`` (a
file with ``compute_score``), and ``engine``, which are arguments for vLLM that GRPOConfig has no name for; where given,
the ``prompt_length`` in tokens that all prompts must have, and ``export``, a folder for the model in the end. The
output: of each step the seconds, also those of the CPU, the tokens that TRL counted and, where it logs, the reward.

On GPUs TRL runs as it comes. Without one, ``adapt_to_cpus`` patches vLLM as the project patches its own engine, and
``pass_to_engine`` tells it the model's type, the size of its cache and to compile nothing: ours runs with the same.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet

from rlhf_megatron.rollout.vllm.process_environment import has_gpu, prepare_environment
from rlhf_megatron.user_files import run_file


def train(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Train for the steps that the settings ask for; return seconds, CPU seconds and tokens of each, when the first
    ended."""
    import torch
    from datasets import Dataset  # type: ignore[import-not-found,unused-ignore]  # as TRL no requirement of the project
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found,unused-ignore]

    class Clock(TrainerCallback):  # type: ignore[misc]  # mypy does not look into transformers
        """Reader of the time when a step has ended: from one end to the next is a step with all that belongs to it."""

        def __init__(self) -> None:
            self.ends: list[float] = []
            self.cpu: list[float] = []
            self.tokens: list[float] = []
            self.first_step_ended = 0.0
            self.rewards: list[float] = []

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self._read(0)

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            self._read(state.num_input_tokens_seen)
            self.first_step_ended = self.first_step_ended or time.time()

        def on_log(self, *_: Any, logs: Mapping[str, float], **__: Any) -> None:
            if "reward" in logs:
                self.rewards.append(logs["reward"])

        def _read(self, tokens: float) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.ends.append(time.perf_counter())
            self.cpu.append(time.process_time())
            self.tokens.append(tokens)

    rows = pyarrow.parquet.read_table(settings["prompts"]).to_pylist()
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    if "prompt_length" in settings:
        check_lengths(tokenizer, rows, settings["prompt_length"])
    clock = Clock()
    trainer = GRPOTrainer(
        model=settings["model"],
        args=GRPOConfig(**settings["arguments"]),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"], "row": row} for row in rows]),
        processing_class=tokenizer,
        reward_funcs=reward_of(Path(settings["reward"])),
        callbacks=[clock],
    )
    trainer.train()
    if "export" in settings:
        trainer.save_model(settings["export"])
    readings: dict[str, list[float]] = {"seconds": clock.ends, "cpu_seconds": clock.cpu, "tokens": clock.tokens}
    return {
        name: [after - before for before, after in itertools.pairwise(values)] for name, values in readings.items()
    } | {
        "threads": torch.get_num_threads(),
        "first_step_ended": clock.first_step_ended,
        "rewards": clock.rewards,
    }


def check_lengths(tokenizer: Any, rows: Sequence[Mapping[str, Any]], length: int) -> None:
    """Raise ValueError where TRL's template gives a prompt another number of tokens than ours."""
    for row in rows:
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"]
        if len(ids) != length:
            raise ValueError(f"a prompt has {len(ids)} tokens and not {length}")


def reward_of(file: Path) -> Callable[..., list[float]]:
    """Return a file's ``compute_score``, which ours calls as it is, in the form that TRL calls."""
    module = run_file(file, "reward")
    assert module is not None, file

    def reward(
        completions: Sequence[Sequence[Mapping[str, str]]], row: Sequence[dict[str, Any]], **_: Any
    ) -> list[float]:
        return [
            module.compute_score(each["data_source"], messages[-1]["content"], each["reward_model"]["ground_truth"], {})
            for messages, each in zip(completions, row, strict=True)
        ]

    return reward


def adapt_to_cpus() -> None:
    """Set up vLLM without a GPU, on both sides alike: the environment, and weights that can be written in place."""
    prepare_environment()
    from rlhf_megatron.compat.vllm import cpu, model_inspection

    cpu.install()
    model_inspection.inspect_models_in_this_process()


def pass_to_engine(arguments: Mapping[str, Any]) -> None:
    """Add arguments to those that TRL makes its vLLM engine with."""
    from trl.generation import vllm_generation  # type: ignore[import-not-found,unused-ignore]

    vllm_generation.LLM = functools.partial(vllm_generation.LLM, **arguments)


def main() -> None:
    """Read the settings, train, leave the result in a file."""
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if not has_gpu():
        adapt_to_cpus()
    if settings["engine"]:
        pass_to_engine(settings["engine"])
    Path(sys.argv[2]).write_text(json.dumps(train(settings)), encoding="utf-8")


if __name__ == "__main__":
    main()
