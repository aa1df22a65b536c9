"""More rules, several rewards added up, async functions, failures, and scoring ahead of time; real processes."""

from __future__ import annotations

import math
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rlhf_megatron.recipe import RecipeError, RewardSection
from rlhf_megatron.recipe.load import make_recipe
from rlhf_megatron.rewards import math as mathematics
from rlhf_megatron.rewards import multiple_choice
from rlhf_megatron.rewards.rules import answer_of, rule_of
from rlhf_megatron.rewards.score import RewardError, Score, ScoreItem, Scorer, reward_metrics, reward_totals

SIGNATURE = "compute_score(data_source, solution_str, ground_truth, extra_info)"


def item(solution: str, ground_truth: str = "", data_source: str = "some/data", tokens: int = 0) -> ScoreItem:
    return ScoreItem(data_source, solution, ground_truth, {}, 7, tokens)


def scorer(**section: Any) -> Scorer:
    return Scorer(RewardSection(**({"timeout_seconds": 20.0, "workers": 1} | section)))


def write_function(folder: Path, body: str, header: str = f"async def {SIGNATURE}:") -> str:
    path = folder / "reward.py"
    path.write_text(f"import asyncio, os, time\nrunning = most = 0\n{header}\n{textwrap.indent(body, '    ')}\n")
    return str(path)


@pytest.mark.parametrize(
    ("solution", "truth", "expected"),
    [
        ("So it is 34.\nAnswer: 34", "34", 1.0),
        ("Answer: 12\nNo.\nAnswer: 34", "34", 1.0),
        ("Answer: 34\nNo.\nAnswer: 12", "34", 0.0),
        ("**Answer:** $34$.", "34", 1.0),
        (r"Answer: \boxed{34}", "34", 1.0),
        ("Answer: 034", "34", 1.0),
        ("Answer: 1,234", "1234", 1.0),
        ("Answer: -0", "0", 1.0),
        ("Answer: 1,2", "12", 0.0),
        ("Answer: -34", "34", 0.0),
        ("Answer: 34 or 35", "34", 0.0),
        (r"\boxed{34}", "34", 0.0),
        ("Answer:", "34", 0.0),
        ("", "", 0.0),
        ("Answer: " + "9" * 100_000, "9", 0.0),
    ],
)
def test_dapo_takes_the_last_answer_line(solution: str, truth: str, expected: float) -> None:
    assert mathematics.dapo_score(solution, truth) == expected


@pytest.mark.parametrize(
    ("solution", "choice"),
    [
        ("The answer is (B).", "B"),
        ("**Answer:** B", "B"),
        ("Answer: A. But wait.\nAnswer: C", "C"),
        ("Answer: B. Paris", "B"),
        (r"\boxed{\text{(D)}}", "D"),
        (r"\boxed{C. Rome} and not Answer: A", "C"),
        ("(E)", "E"),
        ("Answer: c.\nThat is it.", "C"),
        (r"so \boxed{b}", "B"),
        ("Answer: A, B, C", None),
        ("Answer: (A) or (B)", None),
        (r"\boxed{A, B}", None),
        ("Answer: Apple", None),
        ("the answer is a matter of taste", None),
        ("I think B", None),
        ("", None),
    ],
)
def test_multiple_choice_reads_the_letter_that_is_settled_on(solution: str, choice: str | None) -> None:
    assert multiple_choice.extract_answer(solution) == choice
    assert multiple_choice.score(solution, "b" if choice is None else f"({choice.lower()})") == float(
        choice is not None
    )


def test_hostile_text_is_read_in_linear_time() -> None:
    started = time.monotonic()
    for text in (
        "answer:" + "*" * 200_000,
        "answer" + " " * 200_000,
        "answer is " * 50_000,
        "\\boxed{A" + ")" * 200_000,
    ):
        assert multiple_choice.extract_answer(text) is None
        assert mathematics.dapo_score(text, "4") == 0.0
    assert time.monotonic() - started < 5.0


def test_sources_and_answers_of_the_new_rules() -> None:
    assert rule_of("math_dapo") == rule_of("BytedTsinghua-SIA/DAPO-Math-17k") == "dapo_math"
    assert rule_of("cais/mmlu") == rule_of("TIGER-Lab/MMLU-Pro") == rule_of("gpqa_diamond") == "multiple_choice"
    own = RewardSection()
    assert answer_of(own, "gsm8k", "#### 1,200.0") == answer_of(own, "gsm8k", "#### 1200") == "1200"
    assert (
        answer_of(own, "math", r"\boxed{ \dfrac{1}{2} }")
        == answer_of(own, "math", r"Answer: \frac{1}{2}")
        == r"\frac{1}{2}"
    )
    assert answer_of(own, "math_dapo", "Answer: 042") == "42"
    assert answer_of(own, "reasoning_gym/chain_sum", "<think>4</think><answer>5</answer>") == "5"
    assert (
        answer_of(own, "my/own", "nothing")
        is answer_of(own, "gsm8k", "7")
        is answer_of(own, "reasoning_gym/x", " ")
        is None
    )
    with (
        scorer(rule="multiple_choice") as scoring,
        pytest.raises(
            RewardError, match=r"sample of row 7 .*: ground_truth 'Paris' is not one letter; correct the row"
        ),
    ):
        scoring.score([item("Answer: B", "Paris")])
    # As the rule that judges reads it, whatever the data are called.
    assert answer_of(RewardSection(rule="gsm8k"), "my/own", "#### 42") == "42"
    assert answer_of(RewardSection(rule="math"), "gsm8k", r"\boxed{42}") == "42"
    assert answer_of(RewardSection(rule="length", length_high=9), "gsm8k", "#### 42") == "42"


def test_parts_are_weighted_and_added(tmp_path: Path) -> None:
    function = write_function(tmp_path, "return {'score': len(solution_str)}", f"def {SIGNATURE}:")
    parts = [
        {"name": "right", "rule": "dapo_math"},
        {"name": "form", "rule": "format", "pattern": r"<think>.*</think>.*", "weight": 0.25},
        {"name": "long", "rule": "length", "length_low": 10, "length_high": 30, "weight": -0.5},
        {"name": "own", "function": function, "weight": 0.01},
    ]
    items = [
        item("<think>1\n2</think>Answer: 3", "3", tokens=10),
        item(" <think></think>\nAnswer: 4 ", "3", tokens=15),
        item("Answer: 3", "3", tokens=99),
    ]
    with scorer(parts=parts) as scoring:
        scores = scoring.submit(items).result()
        assert [score.parts for score in scores] == [(1, 1, 0, 27), (0, 1, 0.25, 27), (1, 0, 1, 9)]
        assert [score.value for score in scores] == pytest.approx([1.52, 0.395, 0.59])
        assert scoring.score(items[:1]) == pytest.approx([1.52])
    metrics = reward_metrics(reward_totals(scores, RewardSection(parts=parts).part_names))
    assert metrics == {
        "reward/timeouts": 0, "reward/failures": 0, "reward/masked": 0,
        "reward/right": pytest.approx(2 / 3), "reward/form": pytest.approx(2 / 3),
        "reward/long": pytest.approx(1.25 / 3), "reward/own": 21,
    }  # fmt: skip


def test_totals_leave_out_masked_samples_and_add_up_over_ranks() -> None:
    first = [Score(1.0, (1.0, 0.5)), Score(math.nan, (1.0, math.nan), timed_out=True)]
    second = [Score(0.0, (0.0, 0.0), failed=True)]
    totals = [reward_totals(scores, ["a", "b"]) for scores in (first, second, [])]
    assert [list(total) for total in totals] == [["samples", "timeouts", "failures", "masked", "a", "b"]] * 3
    summed = {key: sum(total[key] for total in totals) for key in totals[0]}
    assert reward_metrics(summed) == {
        "reward/timeouts": 1, "reward/failures": 1, "reward/masked": 1, "reward/a": 0.5, "reward/b": 0.25
    }  # fmt: skip
    assert reward_metrics(totals[2])["reward/a"] == 0.0


def test_a_pattern_that_takes_for_ever_costs_its_own_sample() -> None:
    with scorer(rule="format", pattern="(a+)+b", timeout_seconds=0.5) as scoring:
        assert scoring.score([item("aab"), item("a" * 64), item("aab")]) == [1.0, 0.0, 1.0]
        assert (scoring.timeouts, scoring.failures) == (1, 0)


def test_async_functions_are_awaited_many_at_a_time(tmp_path: Path) -> None:
    body = """
global running, most
running += 1
most = max(most, running)
await asyncio.sleep(60 if solution_str == "slow" else 0.2)
running -= 1
return {"score": most}
"""
    items = [item(str(number)) for number in range(40)]
    with scorer(function=write_function(tmp_path, body), timeout_seconds=3.0, concurrency=16) as scoring:
        scores = scoring.score([*items, item("slow")])
        assert max(scores) == 16.0
        assert scores[-1] == 0.0
        assert (scoring.timeouts, scoring.failures) == (1, 0)
        assert min(scoring.score(items)) >= 1.0, "the process and its event loop live on"


def test_a_blocking_async_function_costs_its_own_sample_only(tmp_path: Path) -> None:
    body = "if solution_str == 'blocks': time.sleep(60)\nif solution_str == 'dies': os._exit(4)\nreturn 1.0"
    function = write_function(tmp_path, body)
    items = [item("fine"), item("blocks"), item("fine"), item("dies"), item("fine")]
    with scorer(function=function, timeout_seconds=0.3, on_failure="zero") as scoring:
        assert scoring.score(items) == [1.0, 0.0, 1.0, 0.0, 1.0]
        assert (scoring.timeouts, scoring.failures) == (1, 1)


def test_functions_that_are_not_async_may_run_a_loop_of_their_own(tmp_path: Path) -> None:
    function = write_function(tmp_path, "return asyncio.run(asyncio.sleep(0, 0.5))", f"def {SIGNATURE}:")
    with scorer(function=function) as scoring:
        assert scoring.score([item("x")]) == [0.5]


@pytest.mark.parametrize("body", ["raise KeyError('unit')", "return None", "os._exit(3)"])
def test_what_a_failure_costs_is_the_recipes_choice(tmp_path: Path, body: str) -> None:
    path = write_function(tmp_path, f"if solution_str == 'bad': {body}\nreturn 0.5", f"def {SIGNATURE}:")
    parts = [{"name": "own", "function": path, "weight": 2.0}, {"name": "form", "rule": "format", "pattern": ".*"}]
    items = [item("good"), item("bad"), item("good")]
    with scorer(parts=parts, on_failure="zero") as scoring:
        assert scoring.score(items) == [2.0, 1.0, 2.0]
        assert scoring.failures == 1
    with scorer(parts=parts, on_failure="mask") as scoring:
        scores = scoring.submit(items).result()
        assert [score.value for score in scores] == [2.0, pytest.approx(math.nan, nan_ok=True), 2.0]
        assert scores[1].failed and not scores[1].timed_out
        assert reward_metrics(reward_totals(scores, ["own", "form"]))["reward/masked"] == 1.0
    with scorer(parts=parts) as scoring, pytest.raises(RewardError, match=r"sample of row 7 .*reward\.function"):
        scoring.score(items)


def test_late_samples_are_masked_too_and_a_function_that_never_works_stops_any_run(tmp_path: Path) -> None:
    path = write_function(tmp_path, "time.sleep(60 if solution_str == 'slow' else 0)\nreturn 1.0", f"def {SIGNATURE}:")
    with scorer(function=path, on_failure="mask", timeout_seconds=0.3) as scoring:
        late, fine = scoring.score([item("slow"), item("x")])
        assert math.isnan(late) and fine == 1.0
        assert (scoring.timeouts, scoring.failures) == (1, 0)
    broken = write_function(tmp_path, "raise ValueError('no')", f"def {SIGNATURE}:")
    for choice in ("zero", "mask"):
        with scorer(function=broken, on_failure=choice) as scoring:
            assert len(scoring.score([item("x")] * 7)) == 7
            with pytest.raises(RewardError, match=r"compute_score raised ValueError: no \(reward\.py line 4\)"):
                scoring.score([item("x")])


def test_samples_are_scored_while_others_are_made(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    body = f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)\nreturn float(solution_str)"
    with scorer(function=write_function(tmp_path, body, f"def {SIGNATURE}:"), workers=2) as scoring:
        first = scoring.submit([item(str(number)) for number in range(3)])
        second = scoring.submit([item("9")])
        assert not first.done() and not second.done()
        gate.touch()
        assert second.result() == [Score(9.0, (9.0,))]
        assert [score.value for score in first.result()] == [0.0, 1.0, 2.0]
        assert first.done()
        assert scoring.submit([]).result() == []


def test_an_error_gives_the_other_samples_up_and_closing_leaves_no_thread(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    body = (
        f"open({str(trace)!r}, 'a').write('x')\nif solution_str == 'bad': raise ValueError\ntime.sleep(0.05)\nreturn 1"
    )
    with scorer(function=write_function(tmp_path, body, f"def {SIGNATURE}:")) as scoring:
        with pytest.raises(RewardError):
            scoring.score([item("bad")] + [item("x")] * 200)
        assert scoring.score([item("x")]) == [1.0]
        assert len(trace.read_text()) < 100
        waiting = scoring.submit([item("x")] * 50)
    with pytest.raises(RewardError, match="the scorer was closed"):
        waiting.result()
    deadline = time.monotonic() + 5.0
    while any(thread.name == "reward worker" for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(thread.name == "reward worker" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"rule": "format"}, "reward: rule: format and pattern go together"),
        ({"rule": "format", "pattern": "("}, "reward: pattern is not a regular expression: missing )"),
        ({"rule": "length"}, "rule: length and length_high go together"),
        ({"rule": "length", "length_low": 5, "length_high": 5}, "length_low=5 must be below length_high=5"),
        ({"rule": "math", "function": "x.py"}, "give one of rule, function and service"),
        ({"rule": "math", "parts": [{"name": "a"}]}, "reward.parts stands instead of rule, function and service"),
        ({"parts": [{"name": "a"}, {"name": "a"}]}, "reward.parts: the name 'a' is taken"),
        ({"parts": [{"name": "mean"}]}, "reward.parts: the name 'mean' is taken"),
        ({"parts": [{"name": "a", "wait": 2}]}, "unknown key reward.parts.wait; did you mean reward.parts.weight?"),
        ({"parts": [{"name": "a b"}]}, "reward.parts.0.name: String should match"),
        ({"service": {"url": "host/score"}}, "url must begin with http:// or https:// and a host"),
        ({"service": {"url": "http://h:99999"}}, "reward.service: Port out of range 0-65535"),
        ({"service": {"url": "http://me:secret@host/"}}, "url must hold no user or password"),
        ({"service": {"url": "http://host/?api_key=secret"}}, "url must hold no credentials"),
        ({"service": {"url": "http://h/", "header": "X: y"}}, "header='X: y' is not the name of an HTTP header"),
    ],
)
def test_a_reward_section_that_makes_no_sense_is_told(section: dict[str, Any], problem: str) -> None:
    values = {
        "name": "x", "loop": "rl", "steps": 1, "model": {"path": "m", "dtype": "float32"},
        "data": {"train_files": ["t"], "max_prompt_length": 9},
        "batch": {"prompts_per_step": 1, "responses_per_prompt": 2}, "rollout": {"max_response_length": 9},
        "actor": {"tokens_per_gpu": 9, "optimizer": {"learning_rate": 1.0}}, "reward": section,
    }  # fmt: skip
    with pytest.raises(RecipeError) as told:
        make_recipe(values, "recipe.yaml")
    assert problem in str(told.value)
    assert "secret" not in str(told.value)
    assert "\n" not in str(told.value)
