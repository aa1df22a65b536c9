"""The benchmark of GSM8K: intervals and tests beside published values, and its report of a folder of stages."""

from __future__ import annotations

import json
from pathlib import Path

import gsm8k
import pyarrow
import pyarrow.parquet
import pytest


def write_answers(path: Path, right: list[bool]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({"question": list(range(len(right))), "correct": right}), path)


def write_run(folder: Path, before: list[bool], after: list[bool]) -> None:
    write_answers(folder / "samples" / "step-0.parquet", before)
    write_answers(folder / "samples" / "step-20.parquet", after)
    (folder / "export" / "step-20").mkdir(parents=True)
    (folder / "export" / "step-20" / "config.json").write_text("{}")
    (folder / "metrics.jsonl").write_text(
        json.dumps({"step": 0, gsm8k.ACCURACY: sum(before) / len(before)}) + "\n"
        + json.dumps({"step": 20, gsm8k.ACCURACY: sum(after) / len(after), "train/step_time_ms": 2500.0}) + "\n"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("right", "questions", "low", "high"),
    # Newcombe 1998, table I, method 3
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilsons_interval(right: int, questions: int, low: float, high: float) -> None:
    assert gsm8k.wilson(right, questions) == pytest.approx((low, high), abs=5e-5)


def test_mcnemars_exact_p() -> None:
    assert gsm8k.sign_test(0, 0) == 1.0
    assert gsm8k.sign_test(5, 5) == 1.0
    assert gsm8k.sign_test(9, 1) == gsm8k.sign_test(1, 9) == pytest.approx(2 * 11 / 1024)


def test_seeds_are_compared_question_by_question(tmp_path: Path) -> None:
    before = [True] * 10 + [False] * 90
    write_answers(tmp_path / "runs" / "base" / "evaluation.parquet", [False] * 100)
    write_run(tmp_path / "runs" / "grpo_1", before, [True] * 30 + [False] * 70)
    write_run(tmp_path / "runs" / "grpo_2", before, [False] + [True] * 19 + [False] * 80)
    assert gsm8k.report(tmp_path, [1, 2, 3]) == []
    result = json.loads((tmp_path / "gsm8k.json").read_text())
    assert result["questions"] == 100
    greedy = result["greedy"]
    assert (greedy["base"]["accuracy"], greedy["sft"]["accuracy"]) == (0.0, 0.1)
    assert {seed: (each["right"], each["gained"], each["lost"]) for seed, each in greedy["grpo"].items()} == {
        "1": (30, 20, 0),
        "2": (19, 10, 1),
    }
    assert greedy["grpo_over_sft"]["rise"] == pytest.approx(0.145)
    assert 0.05 < greedy["grpo_over_sft"]["low"] < 0.145 < greedy["grpo_over_sft"]["high"] < 0.22
    assert result["curves"]["1"]["accuracy"] == {"0": 0.1, "20": 0.3}
    assert result["seconds"]["grpo_1"] == {"steps": 1, "step": {"median": 2.5, "min": 2.5, "max": 2.5}}
    assert (tmp_path / "gsm8k.png").read_bytes().startswith(b"\x89PNG")


def test_a_rise_within_its_interval_is_missed(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "grpo_1", [True, False] * 20, [False, True] * 20)
    [missed] = gsm8k.report(tmp_path, [1])
    assert missed.startswith("greedy: GRPO is not above SFT: ")
    assert json.loads((tmp_path / "gsm8k.json").read_text())["greedy"]["grpo"]["1"]["p"] == 1.0


def test_stages_that_are_there_are_not_made_again(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "sft", [True], [True])
    assert gsm8k.make("sft", tmp_path, ["no.such=key"], [])
    assert not gsm8k.make("sampled_grpo_1", tmp_path, [], [])  # there is no model to ask
    assert gsm8k.report(tmp_path, [1]) == []  # of SFT alone there is no answer yet
    assert json.loads((tmp_path / "gsm8k.json").read_text())["greedy"] == {"grpo": {}}


def test_a_run_that_went_on_leaves_its_last_model(tmp_path: Path) -> None:
    write_run(tmp_path, [False], [True])
    (tmp_path / "export" / "step-3").mkdir()
    (tmp_path / "export" / "step-3" / "config.json").write_text("{}")
    assert gsm8k.result_of(tmp_path) == tmp_path / "export" / "step-20"
