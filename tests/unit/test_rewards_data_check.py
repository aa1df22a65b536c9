"""tools/prepare_data.py check: bad rows, long prompts, and rewards that cannot tell right from wrong."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import prepare_data
import pyarrow
import pyarrow.parquet
import pytest

from called import called
from rlhf_megatron.data.tokenizer_loading import load_tokenizer
from rlhf_megatron.recipe import RewardSection
from rlhf_megatron.rewards.data_check import Findings, check_files
from tiny_tokenizer import write_bpe_tokenizer

HEADER = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    "


def row(truth: Any, source: str = "gsm8k", question: Any = "How many?") -> dict[str, Any]:
    prompt = [{"role": "user", "content": question}]
    return {"data_source": source, "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": truth}}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def check(path: Path, function: str | None = None, **settings: Any) -> Findings:
    return check_files([path], RewardSection(function=function, workers=1), **settings)


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return called(prepare_data.main, "check", *arguments)


@pytest.mark.parametrize(
    ("source", "truths", "form"),
    [
        ("gsm8k", ["12", "1,200", "-3", "#### 7"], "#### {}"),
        ("math500", [r"\frac{1}{2}", "x^2+1", r"\boxed{3}", "(1, 2)"], r"\boxed{{{}}}"),
        ("math_dapo", ["34", "-5", "1000", "0"], "Answer: {}"),
        ("cais/mmlu", ["A", "(B)", "c", "D"], "Answer: {}"),
        ("reasoning_gym/chain_sum", ["12", "-3", "7", "0"], "<answer>{}</answer>"),
    ],
)
def test_each_rule_tells_its_own_answers_from_junk(tmp_path: Path, source: str, truths: list[str], form: str) -> None:
    if source.startswith("reasoning_gym"):
        pytest.importorskip("reasoning_gym")
    findings = check(write(tmp_path / "data.parquet", [row(truth, source) for truth in truths * 3]))
    found = findings.rewards[source]
    assert (found.form, found.rows, found.told_apart, found.problem) == (form, 12, 1.0, "")
    assert found.means == {"truth": 1.0, "empty": 0.0, "number": 0.0, "other": 0.0}
    assert findings.faults() == []


def test_functions_are_given_the_form_that_they_want(tmp_path: Path) -> None:
    path = write(tmp_path / "data.parquet", [row(str(number), "my/own") for number in range(30)])
    function = tmp_path / "reward.py"
    function.write_text(HEADER + "return 0.3 + 0.5 * (solution_str == f'<answer>{ground_truth}</answer>')\n")
    found = check(path, str(function)).rewards["my/own"]
    assert (found.form, found.told_apart) == ("<answer>{}</answer>", 1.0)
    assert found.means["truth"] == pytest.approx(0.8)
    assert found.means["other"] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("return 1.0", "my/own: the reward tells the right answer from junk in 0% of 8 rows only"),
        ("return float(solution_str[-1:].isdigit())", "in 0% of 8 rows only"),
        ("raise KeyError('unit')", "data.parquet, row 0: sample of row 0 (data_source my/own): reward.function"),
    ],
)
def test_a_reward_that_cannot_be_trusted_is_found_out(tmp_path: Path, body: str, fault: str) -> None:
    path = write(tmp_path / "data.parquet", [row(str(number), "my/own") for number in range(8)])
    function = tmp_path / "reward.py"
    function.write_text(HEADER + body + "\n")
    [told] = check(path, str(function)).faults()
    assert fault in told and "\n" not in told


def test_bad_rows_are_told_with_file_row_and_column(tmp_path: Path) -> None:
    rows = [row(str(number)) for number in range(20)]
    rows[3]["data_source"] = ""
    rows[5]["prompt"] = []
    rows[6]["reward_model"]["ground_truth"] = None
    rows[9]["prompt"] = [{"role": "user", "content": None}]
    path = write(tmp_path / "data.parquet", rows)
    findings = check(path)
    assert (findings.rows, findings.bad_rows) == ({"gsm8k": 16}, 4)
    for problem, (number, column) in zip(
        findings.problems, [(3, "data_source"), (5, "prompt"), (6, "reward_model"), (9, "prompt")], strict=True
    ):
        assert problem.startswith(f"{path}, row {number}, column {column}: ")
    assert findings.faults() == ["4 rows cannot be read"]


def test_truths_that_their_rule_cannot_read_and_sources_without_a_rule_are_faults(tmp_path: Path) -> None:
    many = write(tmp_path / "many.parquet", [row("12"), row("many"), row("7", "my/own"), row(" ", "math")])
    faults = check(many).faults()
    assert len(faults) == 3
    assert (
        f"gsm8k: {many}, row 1: sample of row 1 (data_source gsm8k): ground_truth 'many' is not a number" in faults[0]
    )
    assert faults[1].startswith("my/own: no reward is known for data_source 'my/own'")
    assert faults[2] == "math: no row has a ground truth to try"


def test_lengths_are_measured_with_the_chat_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_bpe_tokenizer(tmp_path / "bpe"))
    path = write(tmp_path / "data.parquet", [row("1", question="ab" * number) for number in range(1, 102)])
    lengths = sorted(
        len(tokenizer.encode_chat([{"role": "user", "content": "ab" * number}])) for number in range(1, 102)
    )
    findings = check(path, tokenizer=tokenizer, max_prompt_length=lengths[80], sample=3)
    assert findings.lengths == {"min": lengths[0], "median": lengths[50], "p95": lengths[95], "max": lengths[100]}
    assert findings.too_long == sum(length > lengths[80] for length in lengths) > 0
    assert findings.rewards["gsm8k"].rows == 3
    assert "every prompt is too long" in check(path, tokenizer=tokenizer, max_prompt_length=1, sample=3).faults()
    prompted = check(path, tokenizer=tokenizer, system_prompt="Be short.", sample=3).lengths
    talk = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "ab"}]
    assert prompted["min"] == len(tokenizer.encode_chat(talk))


def test_the_command_prints_a_report_and_a_verdict(tmp_path: Path) -> None:
    good = write(tmp_path / "good.parquet", [row(str(number)) for number in range(12)])
    tokenizer = write_bpe_tokenizer(tmp_path / "bpe")
    shown = run(good, "--tokenizer", tokenizer, "--max-prompt-length", "64", "--sample", "5")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "gsm8k" in shown.stdout and "prompt tokens" in shown.stdout and shown.stdout.endswith("fit for training\n")
    bad = write(tmp_path / "bad.parquet", [row("1"), row("many")])
    shown = run(good, bad, "--json")
    assert shown.returncode == 1
    report = json.loads(shown.stdout)
    assert shown.stdout.count("\n") == 1
    assert not report["fit"] and len(report["faults"]) == 1 and report["rows"] == {"gsm8k": 14}
    shown = run(bad)
    assert shown.returncode == 1 and "not fit: gsm8k: " in shown.stdout
    for arguments, problem in (
        ([tmp_path / "gone.parquet"], "gone.parquet: there is no such file"),
        ([good, "--max-prompt-length", "5"], "--max-prompt-length: needs --tokenizer to count tokens"),
        ([good, "--reward-function", "gone.py"], "reward.function: there is no file gone.py"),
    ):
        shown = run(*arguments)
        assert shown.returncode == 2
        assert shown.stderr.startswith("error: ") and shown.stderr.count("\n") == 1 and problem in shown.stderr
