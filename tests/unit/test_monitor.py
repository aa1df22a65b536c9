"""The monitor room: run folder, metrics and trackers, console lines, plots, environment report."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import pty
import resource
import runpy
import select
import signal
import struct
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from hugging_face import make_model
from rlhf_megatron.errors import MonitorError
from rlhf_megatron.monitor import environment_report as environment
from rlhf_megatron.monitor import metrics, trackers
from rlhf_megatron.monitor.columns import COLUMNS, RL_COLUMNS, seconds, short, small
from rlhf_megatron.monitor.console import VISIBLE_ROWS, Console, clock, fitting_columns, sparkline
from rlhf_megatron.monitor.metrics import MetricsLogger, read_metrics, steps_before
from rlhf_megatron.monitor.plots import _figure_of_run, _figure_of_runs, plot_run, smooth
from rlhf_megatron.monitor.recipe_versions import version_at, versions_of, write_recipe
from rlhf_megatron.monitor.run_folder import RunFolder
from rlhf_megatron.monitor.run_report import Report
from rlhf_megatron.recipe import load_recipe
from tiny_tokenizer import write_bpe_tokenizer

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Settings:
    trackers: tuple[str, ...] = ("jsonl",)


def prepared(tmp_path: Path, name: str = "run") -> RunFolder:
    folder = RunFolder(tmp_path, name)
    folder.prepare()
    return folder


def rl_metrics(step: int) -> dict[str, float]:
    return {
        "reward/mean": step / 10,
        "rollout/response_length_mean": 40.0 - step,
        "rollout/throughput_tokens_per_sec": 12_345.0,
        "train/entropy": 1.5,
        "train/kl": 1e-3 * step,
        "train/mismatch_kl": 2e-7,
        "train/step_time_ms": 4000.0,
        "time/generate": 2.0,
        "time/update": 1.0,
    }


# Run folder


def test_run_folder_has_the_agreed_layout(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "gsm8k-1")
    path = tmp_path / "gsm8k-1"
    assert folder.path == path
    assert (folder.recipe, folder.environment) == (path / "recipe.yaml", path / "environment.json")
    assert folder.metrics == path / "metrics.jsonl"
    assert folder.sample_file(3) == path / "samples" / "step-3.parquet"
    assert folder.plot_file("overview") == path / "plots" / "overview.png"
    assert folder.checkpoint(20) == path / "checkpoints" / "step-20"
    assert folder.export(20) == path / "export" / "step-20"
    assert not path.exists()


def test_a_second_run_moves_the_metrics_of_the_first_aside(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "run")
    assert folder.prepare() == []
    for attempt in (1, 2):
        folder.metrics.write_text(f"{attempt}", encoding="utf-8")
        (moved,) = folder.prepare()
        assert moved == folder.path / f"metrics.previous-{attempt}.jsonl"
        assert moved.read_text(encoding="utf-8") == f"{attempt}"
        assert not folder.metrics.exists()


def test_a_resumed_run_keeps_its_metrics(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    folder.metrics.write_text('{"step": 1}\n', encoding="utf-8")
    assert folder.prepare(resume=True) == []
    assert folder.metrics.exists()


def recipe_texts(folder: RunFolder) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in folder.path.glob("recipe*")}


def test_the_recipe_of_the_steps_before_a_change_is_kept(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    first, second, third = (f"name: run\nactor:\n  rate: {rate}\nrollout: null\n" for rate in (1, 2, 3))
    assert write_recipe(folder, first, 0, folder.path) == ([], None, [])
    assert write_recipe(folder, first, 20, folder.path) == ([], None, []), "nothing has changed"
    kept = folder.path / "recipe.until-step-40.yaml"
    assert write_recipe(folder, second, 40, folder.path) == ([("actor.rate", [1, 2])], kept, [])
    assert recipe_texts(folder) == {kept.name: first, "recipe.yaml": second}
    assert write_recipe(folder, second, 60, folder.path).changes == []
    assert [version_at(folder.path, step) for step in (1, 40, 41)] == [kept.name, kept.name, "recipe.yaml"]

    moved = folder.path / "recipe.previous-1.yaml"
    written = write_recipe(folder, third, 30, folder.path)
    assert written == ([("actor.rate", [1, 3])], folder.path / "recipe.until-step-30.yaml", [moved]), "step 30 had 1"
    assert recipe_texts(folder) == {"recipe.until-step-30.yaml": first, "recipe.yaml": third, moved.name: second}
    assert write_recipe(folder, first, 10, folder.path).changes == [], "as it was"
    assert recipe_texts(folder)["recipe.yaml"] == first and "recipe.until-step-30.yaml" not in recipe_texts(folder)

    assert folder.path / "recipe.previous-3.yaml" in folder.prepare(), "a new run begins with no earlier recipe"
    assert all(".previous-" in name for name in recipe_texts(folder)) and versions_of(folder.path) == []


def test_a_run_from_the_checkpoint_of_another_keeps_that_ones_recipe(tmp_path: Path) -> None:
    other, folder = prepared(tmp_path, "other"), prepared(tmp_path, "run")
    write_recipe(other, "name: other\nseed: 1\n", 0, other.path)
    written = write_recipe(folder, "name: run\nseed: 2\n", 40, other.path)
    assert written.changes == [("seed", [1, 2])] and written.earlier == folder.path / "recipe.until-step-40.yaml"
    assert recipe_texts(folder)["recipe.until-step-40.yaml"] == "name: other\nseed: 1\n"
    assert write_recipe(folder, "name: run\nseed: 2\n", 40, other.path) == written, "again, after a crash"


def test_a_model_of_the_hub_is_the_same_in_any_cache(tmp_path: Path) -> None:
    folder, commits = prepared(tmp_path), ("a" * 40, "b" * 40)
    first, moved, newer = (
        f"seed: 1\nmodel:\n  path: {home}/hub/models--Qwen--Qwen2.5-7B/snapshots/{commit}\n"
        for home, commit in (("/home/a/hf", commits[0]), ("/scratch", commits[0]), ("/scratch", commits[1]))
    )
    write_recipe(folder, first, 0, folder.path)
    assert write_recipe(folder, moved, 20, folder.path).changes == []
    written = write_recipe(folder, newer, 40, folder.path)
    assert written.changes == [("model.path", [f"Qwen/Qwen2.5-7B@{commit}" for commit in commits])]


def test_a_damaged_recipe_is_moved_aside_and_nothing_is_said_of_it(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    folder.recipe.write_bytes(b"{\xff: [")
    moved = folder.path / "recipe.previous-1.yaml"
    assert write_recipe(folder, "seed: 1\n", 40, folder.path) == ([], None, [moved])
    assert moved.read_bytes() == b"{\xff: [" and folder.recipe.read_text(encoding="utf-8") == "seed: 1\n"


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "two words"])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(MonitorError, match="name: "):
        RunFolder(tmp_path, name)


def test_a_run_root_that_cannot_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(MonitorError, match="run_root: cannot write") as caught:
        RunFolder(tmp_path / "file", "run").prepare()
    assert "\n" not in str(caught.value)


# Metrics and trackers


def test_metrics_are_read_back_as_series(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    with MetricsLogger(folder, Settings()) as logger:
        logger.log(0, {"eval/gsm8k/accuracy": 0.25})
        logger.log(1, {"train/loss": 2.0, "train/kl": math.nan})
        logger.log(2, {"train/loss": np.float32(0.5), "train/kl": math.inf})
        logger.log(2, {"eval/gsm8k/accuracy": 0.5})
    lines = [json.loads(line) for line in folder.metrics.read_text(encoding="utf-8").splitlines()]
    assert lines[1] == {"step": 1, "train/loss": 2.0, "train/kl": None}
    series = read_metrics(folder.metrics)
    assert series["train/loss"] == ([1, 2], [2.0, 0.5])
    assert series["eval/gsm8k/accuracy"] == ([0, 2], [0.25, 0.5])
    assert all(math.isnan(value) for value in series["train/kl"][1])


def test_a_tensor_is_refused_by_name(tmp_path: Path) -> None:
    with MetricsLogger(prepared(tmp_path), Settings()) as logger, pytest.raises(TypeError, match="'train/loss'"):
        logger.log(1, {"train/loss": torch.tensor(1.0)})  # type: ignore[dict-item]


def test_a_torn_last_line_is_skipped_and_then_replaced(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    folder.metrics.write_text('{"step": 1, "train/loss": 2.0}\n{"step": 2, "train/lo', encoding="utf-8")
    assert read_metrics(folder.metrics) == {"train/loss": ([1], [2.0])}
    with MetricsLogger(folder, Settings()) as logger:
        logger.log(2, {"train/loss": 1.0})
    assert read_metrics(folder.metrics) == {"train/loss": ([1, 2], [2.0, 1.0])}


def test_a_broken_line_in_the_middle_is_told_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n', encoding="utf-8")
    with pytest.raises(MonitorError, match=r"metrics\.jsonl:2"):
        read_metrics(path)


def test_csv_widens_for_a_new_metric_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    with MetricsLogger(folder, Settings(("csv",))) as logger:
        logger.log(1, {"a": 1.0})
        logger.log(2, {"a": 2.0, "b": 0.5})
    with MetricsLogger(folder, Settings(("csv",))) as logger:
        logger.log(3, {"b": 0.25})
    with folder.metrics.with_suffix(".csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert rows == [["step", "a", "b"], ["1", "1.0", ""], ["2", "2.0", "0.5"], ["3", "", "0.25"]]
    assert read_metrics(folder.metrics)["b"] == ([2, 3], [0.5, 0.25])


def test_an_unknown_tracker_is_refused_with_the_choices(tmp_path: Path) -> None:
    with pytest.raises(
        MonitorError, match="'wandbb' is unknown; choose from jsonl, csv, tensorboard, wandb, mlflow, prometheus"
    ):
        MetricsLogger(prepared(tmp_path), Settings(("wandbb",)))


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MonitorError, match=f"pip install {name} or take {name} out") as caught:
        MetricsLogger(prepared(tmp_path), Settings((name,)))
    assert "\n" not in str(caught.value)


def test_missing_packages_are_found_before_any_tracker_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mlflow", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    folder = prepared(tmp_path)
    with pytest.raises(MonitorError, match="monitor.trackers: mlflow, tensorboard not installed; pip install"):
        MetricsLogger(folder, Settings(("csv", "prometheus", "mlflow", "tensorboard")))
    assert not folder.metrics.exists() and not folder.metrics.with_suffix(".csv").exists()


ROLLOUTS = pa.table({"prompt": ["1 + 1", "2 + 2"], "reward": [1.0, 0.5], "tokens": [[1, 2], [3]]})
SHOWN = {"columns": ["prompt", "reward"], "data": [["1 + 1", 1.0], ["2 + 2", 0.5]]}


class AwayTracker:
    """A tracker whose server is away."""

    is_local = False

    def __init__(self, *ignored: Any) -> None:
        self.calls = 0

    def log(self, step: int, values: Any) -> None:
        self.calls += 1
        raise ConnectionError("server is away")

    def log_rollouts(self, step: int, columns: Any) -> None:
        raise ConnectionError("server is away")

    def close(self) -> None:
        pass


def test_a_failing_server_warns_and_never_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    away = AwayTracker()
    monkeypatch.setitem(trackers.TRACKERS, "far", lambda *ignored: away)
    folder = prepared(tmp_path)
    with MetricsLogger(folder, Settings(("far",))) as logger:
        logger.log_rollouts(1, ROLLOUTS)
        for step in range(1, 6):
            logger.log(step, {"train/loss": 1.0})
    assert away.calls == metrics.FAILURES_BEFORE_A_TRACKER_IS_DROPPED
    warnings = capsys.readouterr().err.splitlines()
    assert warnings.pop(0) == "warning: tracker far got no rollouts of step 1: server is away"
    assert warnings[0] == "warning: tracker far failed at step 1: server is away"
    assert warnings[-1].endswith("it is dropped for the rest of the run")
    assert read_metrics(folder.metrics)["train/loss"][0] == [1, 2, 3, 4, 5]


def test_what_a_full_disk_has_no_room_for_is_written_when_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = prepared(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with MetricsLogger(folder, Settings(("csv",))) as logger:
            logger.log(1, {"train/loss": 1.0})
            resource.setrlimit(resource.RLIMIT_FSIZE, (folder.metrics.stat().st_size + 9, hard))
            logger.log(2, {"train/loss": 2.0})
            logger.log(3, {"train/loss": 3.0, "train/kl": 0.5})
            on_disk = folder.metrics.read_text()
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert on_disk == '{"step": 1, "train/loss": 1.0}\n', "no line is torn"
            logger.log(4, {"train/loss": 4.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert read_metrics(folder.metrics)["train/loss"] == ([1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0])
    rows = list(csv.DictReader((folder.path / "metrics.csv").open(newline="")))
    assert [(row["step"], row["train/kl"]) for row in rows] == [("1", ""), ("2", ""), ("3", "0.5"), ("4", "")]
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(" cannot")[0] for line in told] == ["warning: metrics.jsonl", "warning: metrics.csv"]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_third_party_tracker_takes_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed (extra: trackers)")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = prepared(tmp_path)
    settings = {"seed": 1, "reward": {"api_key": "not-to-be-seen"}}
    with MetricsLogger(folder, Settings((name,)), settings) as logger:
        logger.log(1, {"train/loss": 2.0, "eval/openai/gsm8k/accuracy": 0.5})
    written = [path for path in folder.path.rglob("*") if path.is_file() and path != folder.metrics]
    assert written
    assert not any(b"not-to-be-seen" in path.read_bytes() for path in written)


def log_attempts(folder: RunFolder, name: str) -> None:
    """Log steps 1 to 4 and an end without a word, steps 3 to 5 as of a resume, then a new run of the same name."""
    for first, last in ((1, 4), (3, 5), (1, 1)):
        folder.prepare(resume=first > 1)
        with MetricsLogger(folder, Settings((name,)), {"seed": first}, first) as logger:
            for step in range(first, last + 1):
                logger.log(step, {"train/loss": 10.0 * first + step})


def test_a_resumed_run_replaces_its_steps_in_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (extra: trackers)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = RunFolder(tmp_path, "run")
    log_attempts(folder, "tensorboard")

    def series(events: Path) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in EventAccumulator(str(events)).Reload().Scalars("train/loss")]

    assert series(folder.path / "tensorboard.previous-1") == [(1, 11), (2, 12), (3, 33), (4, 34), (5, 35)]
    assert series(folder.tensorboard) == [(1, 11)]


def wandb_rows(file: Path) -> list[dict[str, float]]:
    """Return the history in a .wandb file: LevelDB's log format, blocks of 32 KiB, behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, offset, parts, rows = file.read_bytes(), 7, b"", []
    while offset + 7 <= len(content):
        left_in_block = 2**15 - offset % 2**15
        if left_in_block < 7:
            offset += left_in_block
            continue
        _, length, kind = struct.unpack_from("<IHB", content, offset)
        if offset + 7 + length > len(content):
            break  # still being written
        parts += content[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record.FromString(parts)
            parts = b""
            if record.WhichOneof("record_type") == "history":
                items = {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                rows.append({name: value for name, value in items.items() if not name.startswith("_")})
    return rows


def test_a_resumed_run_is_one_run_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed (extra: trackers)")
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = RunFolder(tmp_path, "run")
    log_attempts(folder, "wandb")
    files = sorted(folder.path.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns)
    first, resumed, other = (file.stem.removeprefix("run-") for file in files)
    assert first == resumed != other
    assert json.loads(folder.trackers.read_text()) == {"wandb": other}
    for file, first_step, last_step, seed in zip(files, (1, 3, 1), (4, 5, 1), (1, 3, 1), strict=True):
        expected = [{"step": step, "train/loss": 10.0 * seed + step} for step in range(first_step, last_step + 1)]
        deadline = time.monotonic() + 20  # wandb's service may still be writing
        while wandb_rows(file) != expected and time.monotonic() < deadline:
            time.sleep(0.1)
        assert wandb_rows(file) == expected


def test_a_resumed_run_is_one_run_of_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed (extra: trackers)")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = RunFolder(tmp_path, "run")
    log_attempts(folder, "mlflow")
    runs = mlflow.search_runs(experiment_names=["rlhf_megatron"], output_format="list", order_by=["start_time"])
    client = mlflow.MlflowClient()
    steps = [[point.step for point in client.get_metric_history(run.info.run_id, "train/loss")] for run in runs]
    assert [sorted(of_run) for of_run in steps] == [[1, 2, 3, 3, 4, 4, 5], [1]]
    assert [run.info.status for run in runs] == ["FINISHED", "FINISHED"]


def test_rows_are_a_table_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed (extra: trackers)")
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = prepared(tmp_path)
    with MetricsLogger(folder, Settings(("wandb",))) as logger:
        logger.log_rollouts(3, ROLLOUTS)
    [table] = folder.path.glob("wandb/offline-run-*/files/media/table/*.json")
    found = json.loads(table.read_text())
    assert {name: found[name] for name in SHOWN} == SHOWN


def test_rows_are_a_table_of_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed (extra: trackers)")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # where mlflow by itself keeps what is no number
    folder = prepared(tmp_path)
    with MetricsLogger(folder, Settings(("mlflow",))) as logger:
        logger.log_rollouts(3, ROLLOUTS)
    assert not any((tmp_path / "elsewhere").iterdir()) and any((folder.path / "mlflow").iterdir())
    [run] = mlflow.search_runs(experiment_names=["rlhf_megatron"], output_format="list")
    path = mlflow.artifacts.download_artifacts(run_id=run.info.run_id, artifact_path="rollouts/step-3.json")
    assert json.loads(Path(path).read_text()) == SHOWN


def test_an_export_is_a_model_of_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed (extra: trackers)")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    exported = write_bpe_tokenizer(make_model(tmp_path / "exported", vocabulary=400))
    with MetricsLogger(prepared(tmp_path), Settings(("jsonl", "mlflow"))) as logger:
        logger.log_model(3, exported)
    [run] = mlflow.search_runs(experiment_names=["rlhf_megatron"], output_format="list")
    [output] = run.outputs.model_outputs
    loaded = mlflow.transformers.load_model(f"models:/{output.model_id}", return_type="components")["model"]
    for name, weight in load_file(exported / "model.safetensors").items():
        torch.testing.assert_close(loaded.state_dict()[name].to(weight.dtype), weight, atol=0, rtol=0)


def test_prometheus_reads_the_newest_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    settings = {"monitor": {"prometheus": {"address": "127.0.0.1", "port": 0}}}
    with MetricsLogger(prepared(tmp_path, "run-1"), Settings(("prometheus",)), settings) as logger:
        url = capsys.readouterr().out.split()[-1]
        logger.log(1, {"train/loss": 2.0, "eval/openai/gsm8k/pass@8": 0.5})
        logger.log(2, {"train/loss": math.nan})
        with urllib.request.urlopen(url, timeout=10) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        samples = {sample.name: (sample.labels, sample.value) for family in families for sample in family.samples}
        assert samples["rlhf_megatron_step"] == ({"run": "run-1"}, 2.0)
        assert samples["rlhf_megatron_eval_openai_gsm8k_pass_8"] == ({"run": "run-1"}, 0.5)
        assert math.isnan(samples["rlhf_megatron_train_loss"][1])
        taken = int(url.rpartition(":")[2].partition("/")[0])
        settings["monitor"]["prometheus"]["port"] = taken
        with pytest.raises(MonitorError, match=rf"monitor.prometheus: cannot listen on 127.0.0.1:{taken} "):
            MetricsLogger(prepared(tmp_path, "run-2"), Settings(("prometheus",)), settings)
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=10)


def test_prometheus_asks_for_the_token_where_there_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_MEGATRON_METRICS_TOKEN", "a-token-of-the-test")
    settings = {"monitor": {"prometheus": {"address": "127.0.0.1", "port": 0}}}
    with MetricsLogger(prepared(tmp_path, "run-1"), Settings(("prometheus",)), settings) as logger:
        url = capsys.readouterr().out.split()[-1]
        logger.log(1, {"train/loss": 2.0})
        for header in ({}, {"Authorization": "Bearer a-token"}, {"Authorization": "Basic a-token-of-the-test"}):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(urllib.request.Request(url, headers=header), timeout=10)
        asked = urllib.request.Request(url, headers={"Authorization": "Bearer a-token-of-the-test"})
        with urllib.request.urlopen(asked, timeout=10) as answer:
            assert "rlhf_megatron_train_loss" in answer.read().decode()


# Console


def test_plain_lines_are_aligned_and_the_header_returns() -> None:
    stream = io.StringIO()
    with Console("rl", stream=stream) as console:
        for step in range(1, 26):
            console.row(step, rl_metrics(step))
    lines = stream.getvalue().splitlines()
    headers = [index for index, line in enumerate(lines) if "reward" in line]
    assert headers == [0, 21]
    assert len({len(line) for line in lines}) == 1
    first = dict(zip(lines[0].replace("step s", "step_s").split(), lines[1].split(), strict=True))
    assert (first["step"], first["reward"], first["eval"], first["tokens/s"]) == ("1", "0.100", "-", "12.3k")
    assert (first["mismatch"], first["step_s"], first["generate"], first["score"]) == ("2.0e-07", "4.00", "2.00", "-")


def test_evaluation_is_the_mean_over_sources_and_nan_is_written_out() -> None:
    stream = io.StringIO()
    Console("rl", stream=stream).row(
        7, {"reward/mean": math.nan, "eval/a/accuracy": 0.5, "eval/openai/gsm8k/accuracy": 1.0}
    )
    assert stream.getvalue().splitlines()[1].split()[:4] == ["7", "nan", "75.0%", "-"]


def test_an_evaluation_after_its_step_adds_a_short_line() -> None:
    stream = io.StringIO()
    with Console("rl", stream=stream) as console:
        console.row(7, rl_metrics(7))
        console.row(7, {"eval/a/accuracy": 0.5})
        console.row(8, rl_metrics(8))
    lines = stream.getvalue().splitlines()
    assert lines[2] == "    7  eval 50.0%"
    assert [line.split()[0] for line in lines] == ["step", "7", "7", "8"]


def test_earlier_rows_come_back_where_a_run_resumes(tmp_path: Path) -> None:
    path = write_metrics(tmp_path / "metrics.jsonl", [rl_metrics(step) | {"step": step} for step in range(1, 31)])
    stream = io.StringIO()
    with Console("rl", stream=stream) as console:
        console.earlier(steps_before(path, 21))
        console.row(21, rl_metrics(21))
    rows = [line.split()[0] for line in stream.getvalue().splitlines()]
    assert rows == ["step", *(str(step) for step in range(21 - VISIBLE_ROWS, 22))], "those to the checkpoint, and on"
    assert steps_before(tmp_path / "none.jsonl", 21) == {}


def test_a_short_phase_writes_nothing_to_a_log_file() -> None:
    stream = io.StringIO()
    with Console("rl", stream=stream) as console:
        for done in range(100):
            console.phase("generate", done, 100)
    assert stream.getvalue() == ""


def test_a_terminal_gets_a_live_table_and_is_given_back() -> None:
    controller, terminal = pty.openpty()
    with os.fdopen(terminal, "w", encoding="utf-8") as stream:
        with Console("rl", total_steps=5, title="a run", stream=stream) as console:
            console.earlier({1: rl_metrics(1) | {"reward/mean": 0.1}})
            for step in range(2, 4):
                console.phase("generate", 1, 2)
                console.row(step, rl_metrics(step))
            console.row(4, rl_metrics(4) | {"reward/mean": math.inf})
            console.message("saved a checkpoint")
        # A terminal keeps at most 4 KiB for a reader at a time.
        shown = ""
        while select.select([controller], [], [], 0.2)[0]:
            shown += os.read(controller, 1 << 16).decode(errors="replace")
    os.close(controller)
    for text in ("a run", "reward", "step 4/5", "saved a checkpoint", "0.100", "0.300"):
        assert text in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1


def test_a_narrow_terminal_drops_the_phases_first_and_keeps_the_rest_readable() -> None:
    def headings(width: int) -> list[str]:
        return [column.heading for column in fitting_columns(RL_COLUMNS, width)]

    assert headings(200) == [column.heading for column in RL_COLUMNS]
    assert headings(76) == [column.heading for column in RL_COLUMNS if column.essential]
    assert headings(40) == ["reward", "eval", "length", "entropy"]
    assert headings(3) == ["reward"]


@pytest.mark.parametrize("loop", sorted(COLUMNS))
def test_no_number_is_wider_than_its_column(loop: str) -> None:
    for column in COLUMNS[loop]:
        assert len(column.heading) <= column.width
    for value in (0.0, 1e-9, 0.5, 99.95, 9999.9, 1e5, 999_999.0, 5e8):
        assert len(short(value)) <= 6
        assert len(small(value)) <= 7
    assert (short(12_345), small(0.01234), seconds(61.28)) == ("12.3k", "0.0123", "61.3")


def test_clock_and_sparkline() -> None:
    assert (clock(42), clock(725), clock(11_525)) == ("0:42", "12:05", "3:12:05")
    assert sparkline([0.0, 0.5, 1.0], 10) == "▁▅█" or sparkline([0.0, 0.5, 1.0], 10) == "▁▄█"
    assert sparkline([1.0, 1.0], 10) == "▁▁"
    assert len(sparkline([float(index) for index in range(1000)], 48)) == 48


# Plots


def write_metrics(path: Path, rows: list[dict[str, float | None]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("steps", [1, 30, 70])
def test_a_run_is_drawn(tmp_path: Path, steps: int) -> None:
    rows: list[dict[str, float | None]] = [{"step": 0, "eval/$5_to_$/accuracy": 0.1, "eval/b/accuracy": 0.2}]
    rows += [{"step": step, **rl_metrics(step)} for step in range(1, steps + 1)]
    out = tmp_path / "plots" / "run.png"
    plot_run(write_metrics(tmp_path / "metrics.jsonl", rows), out)
    with Image.open(out) as image:
        assert image.width == 2016
        # Two rows of three panels and one of the phases; white paper with something on it.
        assert image.height == pytest.approx(144 * 9.9, abs=1)
        assert np.asarray(image.convert("L")).std() > 5


def test_panels_without_a_number_are_left_out(tmp_path: Path) -> None:
    rows: list[dict[str, float | None]] = [{"step": 1, "train/loss": 2.0, "train/grad_norm": None}]
    out = tmp_path / "run.png"
    plot_run(write_metrics(tmp_path / "metrics.jsonl", rows), out)
    with Image.open(out) as image:
        assert image.height == pytest.approx(144 * 3.9, abs=1)


@pytest.mark.parametrize("steps", [4, 100])
def test_phases_of_ranks_that_generate_ahead_go_down(tmp_path: Path, steps: int) -> None:
    """So that neither half of a bar is longer than the step was: 3 s of generating beside 3 s of learning."""
    seconds = {"generate": 2.0, "score": 0.5, "wait_for_update": 0.5, "update": 2.75, "regather": 0.25}
    rows = [{"step": step} | {f"time/{name}": value for name, value in seconds.items()} for step in range(1, steps + 1)]
    [axes] = _figure_of_run(write_metrics(tmp_path / "metrics.jsonl", rows), "ahead").axes
    lowest, highest = axes.dataLim.y0, axes.dataLim.y1
    assert (lowest, highest) == pytest.approx((-3.0, 3.0))
    together = [{name: value for name, value in row.items() if name != "time/wait_for_update"} for row in rows]
    [axes] = _figure_of_run(write_metrics(tmp_path / "metrics.jsonl", together), "together").axes
    assert (axes.dataLim.y0, axes.dataLim.y1) == pytest.approx((0.0, 5.5))


def test_a_run_has_one_colour_in_all_panels(tmp_path: Path) -> None:
    """Also in the panel of a metric that an earlier one lacks."""
    both = ["reward/mean", "train/entropy"]
    metrics = {"one": both, "other": both[:1], "third": both}
    runs = {
        run: write_metrics(tmp_path / f"{run}.jsonl", [{"step": step} | dict.fromkeys(names, 0.5) for step in (1, 2)])
        for run, names in metrics.items()
    }
    panels = _figure_of_runs(runs, "").axes
    colours = {(line.get_label(), line.get_color()) for axes in panels for line in axes.lines}
    assert [len(axes.lines) for axes in panels] == [3, 2] and len(colours) == 3


def test_nothing_to_draw_is_told(tmp_path: Path) -> None:
    with pytest.raises(MonitorError, match="no such file"):
        plot_run(tmp_path / "metrics.jsonl", tmp_path / "run.png")
    with pytest.raises(MonitorError, match="no metric that can be drawn"):
        plot_run(write_metrics(tmp_path / "metrics.jsonl", [{"step": 1}]), tmp_path / "run.png")


def test_a_run_whose_picture_cannot_be_drawn_ends_as_it_should(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = load_recipe(ROOT / "recipes" / "tiny_sft.yaml", [f"run_root={tmp_path}", "monitor.console=false"])
    report = Report(RunFolder(tmp_path, recipe.name), recipe)
    report.step(1, {"train/loss": math.nan})
    report.close()
    assert "warning: no picture was drawn (MonitorError: " in capsys.readouterr().out


def test_runs_are_compared_by_the_names_of_their_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "report.py"))
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/qwen2.5-7b", "lr=1e-6", "other/lr=1e-6"):
        Path(folder).mkdir(parents=True)
        write_metrics(Path(folder) / "metrics.jsonl", [{"step": 1, "train/loss": 1.0}])
    curve = tmp_path / "first.jsonl"
    curve.write_bytes((tmp_path / "lr=1e-6" / "metrics.jsonl").read_bytes())
    arguments = ["runs/qwen2.5-7b", "lr=1e-6/metrics.jsonl", "a=b=other/lr=1e-6", "first.jsonl"]
    assert list(tool["runs_by_label"](arguments)) == ["qwen2.5-7b", "lr=1e-6", "a=b", "first"]
    assert tool["main"]([*arguments, "--output", "all.png"]) == 0
    assert Image.open("all.png").width > 1000
    assert tool["main"](["lr=1e-6", "other/lr=1e-6", "--output", "two.png"]) == 2
    assert "both labelled lr=1e-6; give NAME=PATH" in capsys.readouterr().err


def test_smoothing_keeps_a_constant_and_a_line() -> None:
    assert smooth([2.0] * 40) == pytest.approx([2.0] * 40)
    assert smooth([float(value) for value in range(60)])[5:-5] == pytest.approx(range(5, 55))


# Environment


def test_report_is_json_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "not-to-be-seen")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = ["train.py", "--api-key", "not-to-be-seen", "reward.url=http://u:not-to-be-seen@h/"]
    monkeypatch.setattr(sys, "argv", command)
    report = environment.environment_report()
    text = json.dumps(report)
    assert "not-to-be-seen" not in text
    assert report["argv"] == ["train.py", "--api-key", "***", "reward.url=http://***@h/"]
    assert report["packages"]["torch"] == torch.__version__
    assert report["variables"]["OMP_NUM_THREADS"] == "1"
    assert report["hardware"]["cores"] >= 1


def test_names_that_merely_resemble_a_secret_are_kept() -> None:
    settings = {
        "tokens_per_gpu": "4096", "stop_tokens": "</s>", "keep_last_k": "2", "hub": {"hf_token": "x"}, "key": "y",
    }  # fmt: skip
    assert environment.redact(settings) == {
        "tokens_per_gpu": "4096", "stop_tokens": "</s>", "keep_last_k": "2", "hub": {"hf_token": "***"}, "key": "***",
    }  # fmt: skip


def test_git_state_is_that_of_the_folder_or_none(tmp_path: Path) -> None:
    assert environment.git_state(tmp_path) is None
    (tmp_path / "__init__.py").write_text("", encoding="utf-8")
    run = "git -c user.name=t -c user.email=t@example.org -C {} {} >/dev/null 2>&1".format
    assert os.system(run(tmp_path, "init")) == 0
    assert environment.git_state(tmp_path) is None
    assert os.system(run(tmp_path, "add __init__.py")) == 0
    assert os.system(run(tmp_path, "commit -m first")) == 0
    state = environment.git_state(tmp_path)
    assert state is not None
    assert len(state["commit"]) == 40
    assert state["dirty"] is False
    (tmp_path / "__init__.py").write_text("changed", encoding="utf-8")
    changed = environment.git_state(tmp_path)
    assert changed is not None and changed["dirty"] is True
