"""The benchmark of whole steps at toy size: the training loop's own figures beside the raw engines', and a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import step as bench
import yaml

from end_to_end.commands import ROOT, torchrun
from end_to_end.runs import make_model, records_of
from rlhf_megatron.rollout.vllm.process_environment import has_gpu

BENCH = ROOT / "tools" / "bench"
LENGTHS = {"mean": 8.0, "sigma": 0.5}
GPU_GB = 140.0  # of 2^30 bytes, of the GPUs that the shapes are for


@pytest.mark.skipif(has_gpu(), reason="the engine of this machine needs a GPU, which is hidden here")
def test_steps_are_measured_beside_the_raw_engines(tmp_path: Path) -> None:
    make_model(tmp_path, layers=1)
    toy = {
        "model": {"dtype": "float32"},
        "data": {"max_prompt_length": 20},
        "batch": {"prompts_per_step": 4, "responses_per_prompt": 2},
        "actor": {"layout": {"tensor": 2}, "sequence_parallel": True, "tokens_per_gpu": 256},
        "rollout": {"layout": {"tensor": 2}, "max_response_length": 16, "drawn_lengths": LENGTHS, "kv_cache_gb": None},
        "reward": {"length_high": 16},
    }
    shape = bench.speculating({"model": "toy", "gpus": 2, "recipe": toy}, 2.0, 4)
    assert shape["label"] == "toy, 2 tokens a step up to 4 running"
    recipe = bench.prepare(shape, tmp_path, steps=2)
    with torchrun(2, "tools/bench/step_measure.py", "recipe.yaml", "1", "raw.json", folder=tmp_path) as command:
        command.finish().check()
    run = tmp_path / "runs" / recipe.name
    metrics = records_of(run)
    raw = json.loads((tmp_path / "raw.json").read_text())
    assert {part: len(seconds) for part, seconds in raw.items()} == dict.fromkeys(
        ["generate", "forward", "forward and backward"], 1
    )
    row = {"model": "toy", "gpus": 2, **bench.summary(metrics, raw, forward=False)}
    expected = [min(recipe.rollout.drawn_lengths.of_row(row), 16) for row in range(8)]
    assert len(set(expected)) > 2
    for of_step in metrics:
        assert of_step["rollout/response_length_mean"] == sum(expected) / 8, "stop tokens do not count"
        assert of_step[bench.ACCEPTANCE] == pytest.approx(2.0)
        tokens = of_step["perf/tokens_per_gpu_per_sec"] * 2 * of_step["train/step_time_ms"] / 1000
        assert tokens == pytest.approx(8 * 20 + sum(expected)), "every prompt has the longest length"
    assert 0 < row["overhead"] < 1 and row["efficiency"] > 0
    assert 0 < row["start_own_seconds"] < row["start_seconds"]["total"]
    assert sorted(path.name for path in (run / "timeline").iterdir()) == ["step-0.json", "step-2.json"]
    output = tmp_path / "results" / "step.json"
    for of_shape in (row, row | {"gpus": 1}, row):  # a shape that is measured again takes its own place
        bench.write(output, of_shape)
    record = json.loads(output.read_text())
    assert [of_shape["gpus"] for of_shape in record["rows"]] == [1, 2]
    bench.draw(record, tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.grid
@pytest.mark.skipif(has_gpu(), reason="the engine of this machine needs a GPU, which is hidden here")
def test_who_generates_apart_is_measured_there(tmp_path: Path) -> None:
    shapes = yaml.safe_load((BENCH / "step_shapes.yaml").read_text(encoding="utf-8"))
    [shape] = [shape for shape in shapes if shape["model"] == "toy-apart"]
    row = bench.measured(shape, tmp_path, steps=3, repeats=1)
    assert row["raw_seconds"].keys() == {"generate", "forward", "forward and backward"}
    assert all(seconds["min"] > 0 for seconds in row["raw_seconds"].values())
    assert row["staleness_mean"]["median"] == 1, "the step before was generated ahead"


def test_a_row_says_what_the_records_say() -> None:
    phases = {"generate": 4.0, "score": 0.5, "logprobs": 1.0, "update": 3.0, "regather": 1.0}
    record: dict[str, Any] = {f"time/{phase}": seconds for phase, seconds in phases.items()}
    record |= {f"memory/{phase}_gb": 7.0 for phase in phases}
    record |= {"perf/tokens_per_gpu_per_sec": 100.0, "rollout/throughput_tokens_per_sec": 50.0, "train/imbalance": 1.0}
    record |= {"train/step_time_ms": 10_000.0, "perf/mfu_training": 0.4}
    start = {"start/total": 60.0, "start/launch": 20.0, "start/engine": 35.0}
    slow = record | start | {"train/step_time_ms": 99_000.0}  # the first step, which does not count
    raw = {"generate": [3.5, 3.4, 9.0], "forward": [0.9], "forward and backward": [2.6]}
    row = bench.summary([slow, record, record | {"memory/update_gb": 8.0}], raw, forward=True)
    assert row["step_seconds"] == {"median": 10.0, "min": 10.0, "max": 10.0}
    assert row["efficiency"] == pytest.approx(0.7)
    assert row["overhead"] == pytest.approx(0.1)
    assert bench.summary([slow, record], raw, forward=False)["efficiency"] == pytest.approx(0.61)
    slower = raw | {"forward and backward": [3.9]}
    assert bench.summary([slow, record], slower, forward=False)["efficiency"] == pytest.approx(0.65), "ours counts"
    without = bench.summary([slow, record], {}, forward=False)
    assert "efficiency" not in without and without["overhead"] == row["overhead"], "the raw engines did not run"
    assert row["start_own_seconds"] == pytest.approx(5.0)
    assert (row["peak_memory_gb"]["update"], row["mfu_training"]["median"]) == (8.0, 0.4)
    row |= {"model": "7B", "gpus": 1}
    assert bench.misses([row], [row]) == [
        "7B on 1: 70% of the raw engines' speed, below 85%",
        "7B on 1: 10.0% of the step is neither engine nor model, above 5%",
        "7B on 1: 40% MFU of the update, below 45%",
        "7B on 1: 100 tokens/s, below 4,500",
    ]
    del row["mfu_training"]  # of hardware whose peak is not known
    assert len(bench.misses([row], [row])) == 3
    assert bench.misses([row | {"model": "toy"}], []) == []
    assert bench.misses([{"model": "toy", "gpus": 1, "failed": "not done"}], []) == ["toy on 1: not done"]
    good = row | {"model": "14B", "gpus": 2, "efficiency": 0.9, "overhead": 0.01, "mfu_training": {"median": 0.5}}
    assert bench.misses([good], [row, good]) == [], "there is no figure of one GPU"
    alone = good | {"gpus": 1, "tokens_per_gpu_per_second": {"median": 110.0}}
    assert bench.misses([good], [alone, good]) == ["14B on 2: 91% of the speed of one GPU for each, below 92%"]
    last = {name: value for name, value in record.items() if "generate" not in name}  # nothing is left to generate
    apart = bench.summary([slow, record, record, last], raw, forward=False, apart=True)
    assert apart["efficiency"] == pytest.approx(3.5 / 10), "generation beside the update: the longer one"
    assert apart["overhead"] == pytest.approx(1 - 5 / 10)


def test_every_shape_is_a_recipe_that_fits_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
    from step import model_config

    from rlhf_megatron.models.architecture import parse_architecture
    from rlhf_megatron.planning.feasibility import check_architectures
    from rlhf_megatron.planning.memory import estimate
    from rlhf_megatron.planning.model_folders import role_architectures
    from rlhf_megatron.recipe import check_world, load_recipe

    for shape in yaml.safe_load((BENCH / "step_shapes.yaml").read_text()):
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({"defaults": [str(BENCH / "step_recipe.yaml")], **shape["recipe"]}))
        recipe = load_recipe(path)
        check_world(recipe, shape["gpus"])
        assert recipe.reward.length_high == recipe.rollout.max_response_length
        if "config" in shape:
            architectures = role_architectures(recipe, parse_architecture(model_config(shape), shape["config"]))
            check_architectures(recipe, architectures)
            needed = estimate(recipe, architectures, shape["gpus"])
            assert max(needed.phases.values()) < 0.95 * GPU_GB, shape
            assert needed.rollout.full_length_sequences > 0


def test_generation_with_drafts_is_held_against_that_of_its_shape_without() -> None:
    def row(model: str, seconds: float, **more: Any) -> dict[str, Any]:
        return {"model": model, "gpus": 1, "phase_seconds": {"generate": {"median": seconds}}, **more}

    plain = row("7B", 20.0)
    for length, wanted in ((1.0, 20.4), (2.0, 15.0), (3.0, None)):
        drafted = row(f"7B, {length:g} tokens a step", 16.0, speculative=length)
        assert bench.wanted_generation(drafted, [row("0.5B", 1.0), plain, drafted]) == wanted
        assert bench.wanted_generation(drafted, [drafted]) is None
    assert bench.wanted_generation(plain, [plain]) is None
