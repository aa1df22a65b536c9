"""Rollout on a GPU of its own (or on one that the ranks share), a step ahead; and what is said of the GPUs' use."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from end_to_end.commands import ROOT
from end_to_end.runs import LENGTH_REWARD, TRAIN, make_model, metrics_of, steps_of, write_digits
from gpu.devices import skip_without_gpus
from parallel.ranks import run_ranks
from rlhf_megatron.monitor.gpu import GpuMeter

STEPS = 4
RECIPE: dict[str, Any] = {
    "name": "ahead",
    "loop": "rl",
    "steps": STEPS,
    "model": {"path": "model", "dtype": "bfloat16"},
    "data": {"train_files": ["train.parquet"], "max_prompt_length": 64},
    "batch": {"prompts_per_step": 16, "responses_per_prompt": 4},
    "actor": {"tokens_per_gpu": 8192, "optimizer": {"learning_rate": 1e-3}, "ranks": 0},
    "rollout": {
        "ranks": 1,
        "steps_ahead": 1,
        "max_response_length": 64,
        "kv_cache_gb": 2.0,
        "gpu_memory_utilization": 0.3,
    },
    "algorithm": {"kl_coef": 0.0, "rollout_correction": {"type": "tis"}},
    "regather": {"verify": 1},
    "reward": {"function": "reward.py"},
    "evaluation": {"at_start": False, "at_end": False},
    "checkpoint": {"save_interval": 2},
    "monitor": {"plots": False},
}


def _prepare(folder: Path, recipe: dict[str, Any]) -> None:
    (folder / "reward.py").write_text(LENGTH_REWARD)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    make_model(folder, 4)
    write_digits(folder, (" ".join(str(number)) for number in range(1000, 1100)))


def test_code_that_one_gpu_has_compiled_is_not_run_on_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_gpus(2)
    actor = {key: value for key, value in RECIPE["actor"].items() if key != "ranks"}
    rollout = {"max_response_length": 64, "kv_cache_gb": 2.0}
    _prepare(tmp_path, RECIPE | {"steps": 1, "actor": actor, "rollout": rollout, "checkpoint": {}})
    monkeypatch.chdir(tmp_path)
    cache = {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    for ranks in (1, 2):
        run_ranks(ROOT / TRAIN, ranks, ["recipe.yaml", f"name={ranks}_ranks"], timeout=300.0, environment=cache)
    assert metrics_of(tmp_path / "runs" / "2_ranks")[1]["train/rollout_logprob_abs_diff"] < 1e-2


def test_one_rank_learns_while_another_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _prepare(tmp_path, RECIPE)
    monkeypatch.chdir(tmp_path)
    run_ranks(ROOT / TRAIN, 2, ["recipe.yaml"], timeout=500.0)
    found = metrics_of(tmp_path / "runs" / "ahead")
    assert [found[step]["rollout/staleness_mean"] for step in range(1, STEPS + 1)] == [0, 1, 1, 1]
    assert found[1]["train/rollout_logprob_abs_diff"] < 1e-2, "the weights that arrived are the actor's"
    assert found[STEPS]["train/mismatch_kl"] > found[1]["train/mismatch_kl"]
    of_machine = steps_of(tmp_path / "runs" / "ahead")[STEPS]
    assert 0.0 <= of_machine["perf/gpu_utilization_lowest"] <= of_machine["perf/gpu_utilization"] <= 1.0
    assert of_machine["perf/gpu_power_watts"] > 10 and 10 < of_machine["perf/gpu_temperature_highest"] < 110
    assert 0.0 < of_machine["train/gradient_sync_ms"] < of_machine["train/step_time_ms"]


def test_a_gpu_that_works_is_seen_at_work() -> None:
    device = torch.cuda.current_device()
    meter = GpuMeter(str(torch.cuda.get_device_properties(device).uuid), interval=0.2)
    try:
        time.sleep(3.0)
        idle = meter.take()
        matrix = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
        end = time.monotonic() + 4.0
        while time.monotonic() < end:
            matrix = (matrix @ matrix).clamp(-1, 1)
            torch.cuda.synchronize()
        busy = meter.take()
    finally:
        meter.close()
    assert idle.utilization is not None and busy.utilization is not None
    assert idle.watts is not None and busy.watts is not None
    assert busy.utilization > 0.6 > idle.utilization
    assert busy.watts > 1.5 * idle.watts
