"""verl's side of ``peer.py``: its GRPO trainer by a file of settings, with a clock at the end of each of its steps.

    python tools/bench/peer_verl.py SETTINGS.json OUTPUT.json [--print]

The settings: the name of verl's own ``config``, hydra's ``overrides``, the ``prompts`` (a parquet file), and
``lengths``, the tokens of each response to each prompt of a step. The output: the seconds of each step, from the end of
the one before to its own (the first one's have the start in them), its tokens as verl counts them, verl's own seconds
of the phases, and when the first step had ended. ``--print`` shows the whole configuration and ends.

verl runs in processes of Ray; this one starts it and reads its log of metrics, one line a step.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

HERE = Path(__file__).resolve().parent
PACKAGES = ("verl", "ray", "torch", "vllm", "transformers")


def configuration(settings: Mapping[str, Any]) -> Any:
    """Return verl's whole configuration for the settings, from its own defaults."""
    from hydra import compose, initialize_config_module  # type: ignore[import-not-found,unused-ignore]  # as verl

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(settings["config"], overrides=settings["overrides"])


def write_inputs(settings: Mapping[str, Any], folder: Path) -> None:
    """Write the prompts in verl's form, with the lengths of their responses, and the agent loop that keeps to them."""
    prompts = pyarrow.parquet.read_table(settings["prompts"]).to_pylist()
    rows = [
        {
            "data_source": "peer",
            "prompt": row["prompt"],
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": number},
            "agent_name": "lengths_of_data",
            "response_lengths": ",".join(map(str, of_prompt)),
        }
        for number, (row, of_prompt) in enumerate(zip(prompts, itertools.cycle(settings["lengths"]), strict=False))
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "verl.parquet")
    (folder / "agent_loop.yaml").write_text(
        "- name: lengths_of_data\n  _target_: peer_verl_loop.LengthsOfData\n", encoding="utf-8"
    )


class MetricsLog(threading.Thread):
    """Reader of verl's log as it grows, and the clock with each line: a step has ended then, its metrics included."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self.path = path
        self.opened = time.time()
        self.ends: list[float] = []
        self.steps: list[dict[str, Any]] = []
        self._over = threading.Event()

    def run(self) -> None:
        """Read until ``close``, and what there is then."""
        while not self._over.wait(0.005):
            self._read()
        self._read()

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self.join()

    def _read(self) -> None:
        whole = self.path.read_bytes().split(b"\n")[:-1] if self.path.exists() else []
        for line in whole[len(self.steps) :]:
            self.ends.append(time.time())
            self.steps.append(json.loads(line)["data"])


def result(log: MetricsLog) -> dict[str, Any]:
    """Return figures of each step in the log; the seconds of the first are those since the log was opened."""
    names = sorted({name for step in log.steps for name in step if name.startswith("timing_s/")})
    return {
        "seconds": [after - before for before, after in itertools.pairwise([log.opened, *log.ends])],
        "tokens": [step["perf/total_num_tokens"] for step in log.steps],
        "first_step_ended": log.ends[0],
        "phases": {name.removeprefix("timing_s/"): [step.get(name) for step in log.steps] for name in names},
        "memory_gb": [step.get("perf/max_memory_allocated_gb") for step in log.steps],
        "versions": {
            name: importlib.metadata.version(name) for name in ("verl", "ray", "torch", "vllm", "transformers")
        },
        "mfu": [step.get("perf/mfu/actor") for step in log.steps],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Write verl's inputs, let it train, leave the result in a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("settings", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--print", action="store_true", help="the configuration, and no more")
    options = parser.parse_args(arguments)
    settings = json.loads(options.settings.read_text(encoding="utf-8"))
    path = options.output.resolve().with_suffix(".steps.jsonl")
    path.unlink(missing_ok=True)
    write_inputs(settings, options.settings.resolve().parent)
    # Before Ray starts: its processes inherit them. PYTHONPATH is for the agent loop beside this file.
    os.environ["VERL_FILE_LOGGER_PATH"] = str(path)
    os.environ["PYTHONPATH"] = f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray ends processes where 95% of the host's memory is in use; offloaded weights and moments may take as much.
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    config = configuration(settings)
    if options.print:
        from omegaconf import OmegaConf  # type: ignore[import-not-found,unused-ignore]

        print(OmegaConf.to_yaml(config, resolve=True))
        return
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo  # type: ignore[import-not-found,unused-ignore]
    from verl.trainer.ppo.utils import (  # type: ignore[import-not-found,unused-ignore]
        need_critic,
        need_reference_policy,
    )
    from verl.utils.config import validate_config  # type: ignore[import-not-found,unused-ignore]

    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    log = MetricsLog(path)
    log.start()
    run_ppo(config, task_runner_class=TaskRunnerV1)
    log.close()
    options.output.write_text(json.dumps(result(log)), encoding="utf-8")


if __name__ == "__main__":
    main()
