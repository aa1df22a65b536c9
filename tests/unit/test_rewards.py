"""rlhf_megatron.rewards: rules, hostile text, killed workers and users' functions; real processes throughout."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_megatron.recipe import RewardSection
from rlhf_megatron.rewards import gsm8k, math, reasoning_gym
from rlhf_megatron.rewards.score import RewardError, ScoreItem, Scorer, rule_of
from rlhf_megatron.rewards.worker import USER_FUNCTION, pack_jobs

ORDER = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"


def make_scorer(function: str | Path | None = None, timeout_seconds: float = 20.0, workers: int = 1) -> Scorer:
    return Scorer(
        RewardSection(
            function=None if function is None else str(function), timeout_seconds=timeout_seconds, workers=workers
        )
    )


def item(data_source: str, solution: str, ground_truth: str, extra_info: Any = None, row_id: int = 7) -> ScoreItem:
    return ScoreItem(data_source, solution, ground_truth, extra_info or {}, row_id)


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    with make_scorer() as made:
        yield made


def write_function(folder: Path, body: str, header: str = ORDER) -> Path:
    path = folder / "reward.py"
    path.write_text("import os, time\n" + header + textwrap.indent(textwrap.dedent(body), "    "))
    return path


def is_running(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("solution", "truth", "expected"),
    [
        ("So 9 * 2 = 18.\n#### 18", "18", 1.0),
        ("#### 1,234", "1234", 1.0),
        ("#### $18.00", "18", 1.0),
        ("#### $ 18.", "18", 1.0),
        ("####-3", "-3", 1.0),
        ("#### -$3", "-3", 1.0),
        ("#### 18 dollars", "18", 1.0),
        ("#### 18", "#### 18", 1.0),
        ("#### 18", "2,000", 0.0),
        ("#### 17\n#### 18", "18", 1.0),
        ("#### 18\n#### 17", "18", 0.0),
        ("#### 18\n#### I do not know", "18", 0.0),
        ("The answer is 18", "18", 0.0),
        ("#### eighteen", "18", 0.0),
        ("#### --18", "-18", 0.0),
        ("#### ", "18", 0.0),
        ("", "18", 0.0),
        ("#### " + "9" * 100_000, "18", 0.0),
        ("####" + " " * 200_000 + "x", "18", 0.0),
    ],
)
def test_gsm8k_reads_the_number_behind_the_last_marker(solution: str, truth: str, expected: float) -> None:
    assert gsm8k.score(solution, truth) == expected


def test_gsm8k_data_scores_its_own_answers(shared_gsm8k: Path) -> None:
    import json

    records = [json.loads(line) for line in (shared_gsm8k / "test.jsonl").read_text().splitlines()]
    truths = [str(gsm8k.extract_answer(record["answer"])) for record in records]
    assert len(records) == 1319
    assert all(gsm8k.score(record["answer"], truth) == 1.0 for record, truth in zip(records, truths, strict=True))
    swapped = [gsm8k.score(record["answer"], truth) for record, truth in zip(records, truths[1:], strict=False)]
    assert sum(swapped) < 0.05 * len(swapped)


@pytest.fixture
def shared_gsm8k() -> Path:
    folder = Path(__file__).resolve().parents[3] / "shared" / "data" / "gsm8k"
    if not folder.is_dir():
        pytest.skip(f"GSM8K is not at {folder}")
    return folder


def test_last_boxed_is_balanced_and_linear() -> None:
    assert math.last_boxed(r"\boxed{1} then \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert math.last_boxed(r"\boxed{3} and then \boxed{4") == "3"
    assert math.last_boxed("none") is None
    assert math.extract_answer("Answer: 5\nWait.\n**Answer: 6**") == "6"
    started = time.monotonic()
    assert math.quick_score("\\boxed{" * 20_000, "4") == 0.0
    assert math.quick_score("answer" + " " * 200_000, "4") == 0.0
    assert math.quick_score("\\boxed{" + "1+" * 50_000 + "}", "4") == 0.0
    assert time.monotonic() - started < 2.0


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        (r"\boxed{\frac{2}{4}}", "1/2", 1.0),
        (r"\boxed{0.5}", r"\frac12", 1.0),
        (r"\boxed{2\sqrt{2}}", r"\boxed{\sqrt{8}}", 1.0),
        (r"\boxed{x=5}", "5", 1.0),
        (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}", 1.0),
        ("thought\nAnswer: 204", "204", 1.0),
        ("Answer: $204$.", "204", 1.0),
        (r"\boxed{1, 2, 3}", "2", 0.0),
        (r"\boxed{x}", "4", 0.0),
        ("the result is 4", "4", 0.0),
        (r"\boxed{\text{no idea}}", "4", 0.0),
        (r"\boxed{)(}", "4", 0.0),
        # A space between digits is not nothing, unless it parts thousands.
        (r"\boxed{11/2}", "1 1/2", 0.0),
        (r"\boxed{34}", "3 4", 0.0),
        (r"\boxed{123}", r"1\ 2\ 3", 0.0),
        (r"\boxed{$3$ $4$}", "34", 0.0),
        (r"\boxed{1\,000}", "1000", 1.0),
        (r"\boxed{1 234 567}", "1234567", 1.0),
        (r"\boxed{( 3 , 4 )}", "(3,4)", 1.0),
    ],
)
def test_mathematics_is_compared_by_value(scorer: Scorer, answer: str, truth: str, expected: float) -> None:
    assert scorer.score([item("math", answer, truth)]) == [expected]


def test_hostile_mathematics_costs_its_own_sample_only() -> None:
    with make_scorer(timeout_seconds=2.0, workers=2) as scorer:
        started = time.monotonic()
        scores = scorer.score(
            [
                item("math", r"\boxed{0.5}", "1/2"),
                item("math", r"\boxed{9^{9^{9^{9}}}}", "4"),
                item("math", r"\boxed{999999999!}", "4"),
                item("math", r"\boxed{0.25}", "1/4"),
                item("gsm8k", "#### 3", "3"),
            ]
        )
        assert scores == [1.0, 0.0, 0.0, 1.0, 1.0]
        assert scorer.timeouts + scorer.failures == 0  # refused before they are parsed
        assert time.monotonic() - started < 30.0
        assert scorer.score([item("math", r"\boxed{0.5}", "1/2")]) == [1.0]


def test_scores_keep_the_order_of_their_items() -> None:
    with make_scorer(workers=2) as scorer:
        items = [item("math", rf"\boxed{{\frac{{{number}}}{{4}}}}", "0.5") for number in range(40)]
        assert scorer.score(items) == [1.0 if number == 2 else 0.0 for number in range(40)]
        assert scorer.score([]) == []


def test_sources_choose_their_rules(scorer: Scorer) -> None:
    assert rule_of("openai/gsm8k") == rule_of("gsm8k") == "gsm8k"
    for source in ("math", "DigitalLearningGmbH/MATH-lighteval", "aime2024", "HuggingFaceH4/aime_2024"):
        assert rule_of(source) == "math"
    assert rule_of("reasoning_gym/chain_sum") == "reasoning_gym"
    assert rule_of("reasoning_gym/") is None
    scorer.check_sources(["gsm8k", "math"])
    with pytest.raises(
        RewardError, match="no reward is known for data_source 'my/set'; known: openai/gsm8k, gsm8k"
    ) as told:
        scorer.score([item("gsm8k", "", "1"), item("my/set", "", "1")])
    assert "set reward.function: path/to/file.py:compute_score" in str(told.value)
    assert "\n" not in str(told.value)


def test_unreadable_ground_truth_names_the_sample(scorer: Scorer) -> None:
    with pytest.raises(
        RewardError, match=r"sample of row 7 \(data_source gsm8k\): ground_truth 'many' is not a number"
    ):
        scorer.score([item("gsm8k", "#### 1", "many")])


def reasoning_item(task: str, solution: str | None = None, seed: int = 3, **settings: Any) -> ScoreItem:
    """Return an item as a prepared row makes it; without a solution, the oracle's answer is given."""
    package = pytest.importorskip("reasoning_gym")
    entry = package.create_dataset(task, size=3, seed=seed, **settings)[0]
    info = {"config": reasoning_gym.encode(settings), "entry": reasoning_gym.encode(entry)}
    answer = f"<think>x</think>So <answer>{entry['answer']}</answer>" if solution is None else solution
    return ScoreItem(f"reasoning_gym/{task}", answer, entry["answer"], info, 7)


@pytest.mark.parametrize(
    "task", ["chain_sum", "gcd", "arc_agi", "rearc", "countdown", "n_queens", "word_ladder", "coin_flip", "sudoku"]
)
def test_reasoning_gym_gives_the_oracle_full_marks_and_noise_nothing(scorer: Scorer, task: str) -> None:
    assert scorer.score([reasoning_item(task), reasoning_item(task, "zebra"), reasoning_item(task, "")]) == [1, 0, 0]


def test_reasoning_gym_pays_nothing_for_text_that_contains_the_answer(scorer: Scorer) -> None:
    right = reasoning_item("chain_sum")
    many = " ".join(str(number) for number in range(200)) + " " + right.ground_truth
    tricks = [many, f"<answer>{many}</answer>", f"<answer>{right.ground_truth}</answer> no: <answer>x</answer>"]
    assert scorer.score([reasoning_item("chain_sum", trick) for trick in tricks]) == [0.0, 0.0, 0.0]
    assert scorer.score([reasoning_item("chain_sum", f" {right.ground_truth}\n")]) == [1.0]
    wrong = "False" if reasoning_item("game_of_life_halting").ground_truth == "True" else "True"
    assert scorer.score([reasoning_item("game_of_life_halting"), reasoning_item("game_of_life_halting", wrong)]) == [
        1,
        0,
    ]
    assert scorer.score([reasoning_item("coin_flip", "0")]) == [0.0]
    assert scorer.score([reasoning_item("puzzle24"), reasoning_item("puzzle24", "4*6+1-1")]) == [1.0, 0.0]


@pytest.mark.parametrize("task", ["n_queens", "countdown", "binary_matrix", "polynomial_multiplication"])
def test_reasoning_gym_runs_no_code_from_an_answer(scorer: Scorer, tmp_path: Path, task: str) -> None:
    trace = tmp_path / "trace"
    code = f"__import__('pathlib').Path({str(trace)!r}).write_text('x')"
    assert scorer.score([reasoning_item(task, f"<answer>{code}</answer>")]) == [0.0]
    assert not trace.exists()


@pytest.mark.parametrize(
    "task", ["number_sorting", "bitwise_arithmetic", "polynomial_multiplication", "simple_integration"]
)
def test_reasoning_gym_runs_no_code_from_a_row(scorer: Scorer, tmp_path: Path, task: str) -> None:
    trace = tmp_path / "trace"
    code = f"__import__('pathlib').Path({str(trace)!r}).write_text('x')"
    right = reasoning_item(task)
    entry = reasoning_gym.decode(right.extra_info["entry"]) | {"answer": code}
    entry["metadata"] |= {"problem": code, "integrand": code}
    hostile = dataclasses.replace(right, extra_info=right.extra_info | {"entry": reasoning_gym.encode(entry)})
    with contextlib.suppress(RewardError):
        assert scorer.score([hostile]) == [0.0]
    assert not trace.exists()


def test_reasoning_gym_rows_without_entry_work_where_the_scorer_needs_none(scorer: Scorer) -> None:
    pytest.importorskip("reasoning_gym")
    assert scorer.score([item("reasoning_gym/chain_sum", "<answer>042</answer>", "42")]) == [1.0]
    with pytest.raises(RewardError, match="the scorer of survo cannot read this row"):
        scorer.score([item("reasoning_gym/survo", "1 2", "1 2")])
    with pytest.raises(RewardError, match="reasoning-gym has no task nothing"):
        scorer.score([item("reasoning_gym/nothing", "1", "1")])


def test_entries_survive_their_encoding() -> None:
    value = {"a": (1, (2, 3)), "b": {1: "x", (2, 3): [None, True]}, "c": [{"d": {4, 5}}], "e": "text"}
    assert reasoning_gym.decode(reasoning_gym.encode(value)) == value
    with pytest.raises(TypeError):
        reasoning_gym.encode({"a": object()})


def test_user_function_gets_verls_arguments_and_returns_a_number_or_a_dict(tmp_path: Path) -> None:
    path = write_function(
        tmp_path,
        """
        print("this must not break anything")
        if extra_info["as_dict"]:
            return {"score": len(solution_str), "acc": 1}
        return float(ground_truth) if data_source == "any/source" else None
        """,
    )
    with make_scorer(path) as scorer:
        items = [item("any/source", "abc", "0.25", {"as_dict": flag, "when": (1, 2)}) for flag in (True, False)]
        assert scorer.score(items) == [3.0, 0.25]
        scorer.check_sources(["any/source"])
    named = tmp_path / "named.py"
    named.write_text("def mine(data_source, solution_str, ground_truth, extra_info=None):\n    return True\n")
    with make_scorer(f"{named}:mine") as scorer:
        assert scorer.score([item("x", "", "")]) == [1.0]


def test_user_function_may_define_classes_and_limits_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text(
        textwrap.dedent(
            """
            from __future__ import annotations
            import dataclasses, pickle, signal, typing

            @dataclasses.dataclass
            class Verdict:
                score: float
                note: typing.ClassVar[str] = "in a file"

            def too_slow(number, frame):
                raise TimeoutError

            signal.signal(signal.SIGALRM, too_slow)

            def compute_score(data_source, solution_str, ground_truth, extra_info):
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                try:
                    while solution_str == "endless":
                        pass
                except TimeoutError:
                    return -1.0
                signal.setitimer(signal.ITIMER_REAL, 0.0)
                return pickle.loads(pickle.dumps(Verdict(0.5))).score
            """
        )
    )
    with make_scorer(path) as scorer:
        assert scorer.score([item("x", text, "") for text in ("good", "endless", "good")]) == [0.5, -1.0, 0.5]
        assert scorer.timeouts == 0


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("raise KeyError('unit')", r"compute_score raised KeyError: 'unit' \(reward\.py line 3\)"),
        ("return 'good'", r"compute_score returned 'good' \(str\); return a finite number"),
        ("return {'acc': 1.0}", r"compute_score returned \{'acc': 1\.0\} \(dict\)"),
        ("return float('nan')", "compute_score returned nan"),
        ("exit(2)", r"compute_score raised SystemExit: 2 \(reward\.py line 3\)"),
        ("os._exit(3)", "killed its worker: the worker process ended with status 3"),
    ],
)
def test_user_function_that_fails_names_the_sample(tmp_path: Path, body: str, problem: str) -> None:
    path = write_function(tmp_path, body)
    where = r"sample of row 7 \(data_source some/data\): reward\.function .*reward\.py: "
    with make_scorer(path) as scorer, pytest.raises(RewardError, match=where + problem) as told:
        scorer.score([item("some/data", "x", "y")])
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("specification", "text", "problem"),
    [
        ("nowhere.py", None, r"reward\.function: there is no file .*nowhere\.py"),
        ("reward.py:other", ORDER + "    return 1.0\n", r"has no function other; it defines compute_score"),
        ("reward.py", "import not_a_module_at_all\n", "cannot be imported: ModuleNotFoundError"),
        ("reward.py", "def compute_score(solution_str):\n    return 1.0\n", r"must take \(data_source, solution_str"),
        ("reward.py", "def compute_score(:\n", "cannot be imported: SyntaxError"),
        ("reward.py", "import sys\nsys.exit('no licence')\n", "cannot be imported: SystemExit: no licence"),
    ],
)
def test_user_function_that_cannot_be_loaded_is_told_at_the_start(
    tmp_path: Path, specification: str, text: str | None, problem: str
) -> None:
    if text is not None:
        (tmp_path / "reward.py").write_text(text)
    with pytest.raises(RewardError, match=problem) as told:
        make_scorer(tmp_path / specification)
    assert "\n" not in str(told.value)


def test_late_user_function_costs_its_sample_and_a_hopeless_one_stops(tmp_path: Path) -> None:
    path = write_function(tmp_path, "time.sleep(60 if solution_str == 'slow' else 0)\nreturn 1.0")
    with make_scorer(path, timeout_seconds=0.3) as scorer:
        assert scorer.score([item("x", "fast", ""), item("x", "slow", ""), item("x", "fast", "")]) == [1.0, 0.0, 1.0]
        assert scorer.timeouts == 1
    with (
        make_scorer(path, timeout_seconds=0.05, workers=2) as scorer,
        pytest.raises(
            RewardError, match=r"has not returned for any of 8 samples within reward\.timeout_seconds = 0\.05"
        ),
    ):
        scorer.score([item("x", "slow", "") for _ in range(100)])


def test_worker_killed_from_outside_is_replaced_and_its_sample_tried_again(tmp_path: Path) -> None:
    marker = tmp_path / "killed_once"
    path = write_function(
        tmp_path,
        f"""
        if not os.path.exists({str(marker)!r}):
            open({str(marker)!r}, "w").close()
            os.kill(os.getpid(), 9)
        return 1.0
        """,
    )
    with make_scorer(path) as scorer:
        assert scorer.score([item("x", "", ""), item("x", "", "")]) == [1.0, 1.0]
        [idle] = scorer.process_ids()
        os.kill(idle, signal.SIGKILL)
        assert scorer.score([item("x", "", "")]) == [1.0]


def test_workers_ignore_a_schedulers_warning_and_end_with_the_scorer(tmp_path: Path) -> None:
    path = write_function(tmp_path, "return float(os.getpid())")
    scorer = make_scorer(path)
    [first] = scorer.process_ids()
    os.kill(first, signal.SIGTERM)
    assert scorer.score([item("x", "", "")]) == [float(first)]
    scorer.close()
    assert not is_running(first)


def test_no_worker_outlives_its_rank(tmp_path: Path) -> None:
    path = write_function(tmp_path, "return 1.0")
    code = f"""
        import os, sys, signal
        from rlhf_megatron.recipe import RewardSection
        from rlhf_megatron.rewards.score import Scorer
        scorer = Scorer(RewardSection(function={str(path)!r}, timeout_seconds=5.0, workers=1))
        print(*scorer.process_ids(), flush=True)
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    """
    for ending in ("ends", "killed"):
        shown = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), ending], capture_output=True, text=True, timeout=60
        )
        [worker] = map(int, shown.stdout.split())
        deadline = time.monotonic() + 10.0
        while is_running(worker) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_running(worker)


def test_scoring_imports_no_torch() -> None:
    code = "import sys, rlhf_megatron.rewards.score, rlhf_megatron.rewards.worker; print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


def test_every_error_class_is_one_that_commands_print(tmp_path: Path) -> None:
    from rlhf_megatron.errors import UserError

    with pytest.raises(UserError, match=re.escape("reward.function: there is no file")):
        make_scorer(tmp_path / "gone.py:compute_score")


def test_a_worker_whose_rank_is_gone_says_nothing(tmp_path: Path) -> None:
    start = "from rlhf_megatron.rewards import worker; worker.main(0)"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", start], **pipes)  # type: ignore[call-overload]
    process.stdout.close()
    jobs = pack_jobs([{"kind": USER_FUNCTION, "function": str(tmp_path / "nowhere.py"), "nonce": "0"}])
    assert process.communicate(jobs, timeout=60)[1] == b""
    assert process.returncode == 0
