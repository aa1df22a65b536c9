"""tools/prepare_data.py: its main function, and its files read back by the library. As a process: end_to_end."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import prepare_data
import pyarrow.parquet
import pytest

from called import called
from rlhf_megatron.data import foreign_files
from rlhf_megatron.data.prompts import Prompt, PromptDataset
from rlhf_megatron.data.tokenizer_loading import load_tokenizer
from rlhf_megatron.errors import DataError
from rlhf_megatron.recipe import DataSection, RewardSection
from rlhf_megatron.rewards import task_rows
from rlhf_megatron.rewards.score import ScoreItem, Scorer
from tiny_tokenizer import write_bpe_tokenizer

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return called(prepare_data.main, *arguments)


def read(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    return rows


def assert_error(shown: subprocess.CompletedProcess[str], text: str) -> None:
    assert shown.returncode == 2
    assert shown.stderr.startswith("error: ")
    assert shown.stderr.count("\n") == 1
    assert text in shown.stderr


def write_gsm8k(path: Path, count: int, first: int = 0) -> Path:
    records = [
        {"question": f"What is 1000 + {number}?", "answer": f"It is so.\n#### {1000 + number:,}"}
        for number in range(first, first + count)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_gsm8k_rows_have_verls_columns(tmp_path: Path) -> None:
    shown = run(
        "gsm8k", "--input", write_gsm8k(tmp_path / "train.jsonl", 5), "--output", tmp_path / "out" / "train.parquet"
    )
    assert (shown.returncode, shown.stdout) == (0, "")
    assert shown.stderr.endswith("train.parquet: 5 rows\n")
    rows = read(tmp_path / "out" / "train.parquet")
    assert rows[2] == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": 'What is 1000 + 2? Let\'s think step by step and output the final answer after "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1002"},
        "extra_info": {
            "split": "train",
            "index": 2,
            "question": "What is 1000 + 2?",
            "answer": "It is so.\n#### 1,002",
        },
    }
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train.parquet"]


def test_excluded_questions_never_appear_whatever_the_template(tmp_path: Path) -> None:
    held_out = tmp_path / "test.parquet"
    source = write_gsm8k(tmp_path / "a.jsonl", 6)
    template = ("--prompt-template", "Q: {question}", "--system", "Be brief.", "--size", "2")
    assert run("gsm8k", "--input", source, "--output", held_out, *template).returncode == 0
    assert read(held_out)[0]["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Q: What is 1000 + 0?"},
    ]
    output = tmp_path / "train.parquet"
    assert run("gsm8k", "--input", source, "--output", output, "--exclude", held_out).returncode == 0
    assert [row["extra_info"]["index"] for row in read(output)] == [2, 3, 4, 5]
    asked = run("gsm8k", "--input", source, "--output", output, "--exclude", held_out, "--size", "5")
    assert_error(asked, "4 rows are left after --exclude, 5 were asked for")


def test_reasoning_gym_rows_are_distinct_and_scored_by_the_library(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    task = ("reasoning-gym", "--task", "chain_sum", "--set", "max_terms=3", "max_digits=2")
    held_out, train = tmp_path / "test.parquet", tmp_path / "train.parquet"
    assert run(*task, "--size", "50", "--seed", "1", "--output", held_out).returncode == 0
    made = run(*task, "--size", "60", "--seed", "2", "--output", train, "--exclude", held_out, "--split", "train")
    assert made.returncode == 0
    questions = [[row["extra_info"]["question"] for row in read(path)] for path in (held_out, train)]
    assert len(set(questions[0] + questions[1])) == 110
    tokenizer = load_tokenizer(write_bpe_tokenizer(tmp_path / "bpe"))
    section = DataSection(train_files=["x"], max_prompt_length=400, overlong_prompts="stop")
    prompts = [item for item in PromptDataset([train], tokenizer, section).read(range(5)) if isinstance(item, Prompt)]
    assert len(prompts) == 5
    items = [
        ScoreItem(prompt.data_source, solution, prompt.ground_truth, prompt.extra_info, prompt.row)
        for prompt in prompts
        for solution in (f"<answer>{prompt.ground_truth}</answer>", f"{prompt.ground_truth}0 or {prompt.ground_truth}")
    ]
    with Scorer(RewardSection(timeout_seconds=20.0, workers=1)) as scorer:
        assert scorer.score(items) == [1.0, 0.0] * 5


def test_episodes_are_named_by_seeds_and_settings(tmp_path: Path) -> None:
    asked = ["episodes", "--environment", "textarena/X", "--size", "3", "--output", tmp_path / "test.parquet"]
    run(*asked, "--seed", "9", "--set", "turns=5", "sizes={a: 1}")
    rows = read(tmp_path / "test.parquet")
    assert [row["extra_info"]["seed"] for row in rows] == [9, 10, 11]
    assert json.loads(rows[2]["extra_info"]["settings"]) == {"turns": 5, "sizes": {"a": 1}}
    assert (rows[0]["data_source"], rows[0]["extra_info"]["split"]) == ("textarena/X", "test")
    section = DataSection(train_files=[str(tmp_path / "test.parquet")], max_prompt_length=64)
    tokenizer = load_tokenizer(write_bpe_tokenizer(tmp_path / "bpe"))
    prompts = PromptDataset(section.training_files, tokenizer, section).read([0])
    [messages] = [prompt.messages for prompt in prompts if isinstance(prompt, Prompt)]
    assert list(messages) == [{"role": "system", "content": "Play."}]
    assert_error(run(*asked[:4], "0", *asked[5:]), "--size: 0 rows cannot be made")


def test_episodes_are_played_by_random_moves(tmp_path: Path) -> None:
    games, game, output = (tmp_path / name for name in ("games.parquet", "game.py", "moves.parquet"))
    run("episodes", "--environment", "guess", "--size", "30", "--output", games)
    game.write_text(
        "class Environment:\n"
        "    def reset(self, row):\n"
        "        self.right = 'abc'[row['extra_info']['seed'] % 3]\n"
        "        return 'Say a letter.'\n"
        "    def step(self, action):\n"
        "        return 'Another one.', 0.0, action == self.right\n"
    )
    asked = ("played", "--input", games, "--environment", game, "--output", output)
    assert run(*asked, "--moves", "a", "b", "c").returncode == 0
    lengths = set()
    for index, row in enumerate(read(output)):
        system, first, *turns = row["messages"]
        assert (system["content"], first["content"]) == ("Play.", "Say a letter.")
        said = [turn["content"] for turn in turns if turn["role"] == "assistant"]
        assert len(set(said)) == len(said) and said[-1] == "abc"[(1 + index) % 3], "each once, up to the right one"
        assert [turn["content"] for turn in turns if turn["role"] == "user"] == ["Another one."] * (len(said) - 1)
        lengths.add(len(said))
    assert lengths == {1, 2, 3}
    assert run(*asked, "--moves", "d").returncode == 0, "none ends the game: the last move is kept, and no answer to it"
    assert [turn["role"] for turn in read(output)[0]["messages"]] == ["system", "user", "assistant"]
    bad = tmp_path / "bad.py"
    bad.write_text("class Environment:\n    reset = step = lambda self, *_: 1 / 0\n")
    assert_error(run(*asked, "--environment", bad, "--moves", "a"), "division by zero")


def test_a_task_with_too_few_questions_is_told(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    arguments = ("reasoning-gym", "--task", "chain_sum", "--output", tmp_path / "x.parquet", "--size", "300")
    small = run(*arguments, "--set", "min_terms=2", "max_terms=2", "max_digits=1")
    assert_error(small, "task chain_sum: only 200 of 300 distinct questions found")
    assert not (tmp_path / "x.parquet").exists()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--task", "chain_som"), "no task chain_som; did you mean chain_sum"),
        (("--task", "chain_sum", "--set", "terms=3"), "has no setting terms; it has allow_negation"),
        (("--task", "chain_sum", "--set", "max_terms"), "--set: 'max_terms' is not KEY=VALUE"),
        (("--task", "chain_sum", "--set", "max_terms=1"), "refuses these settings: max_terms must be >= min_terms"),
        (("--task", "chain_sum", "--prompt-template", "x"), "--prompt-template: 'x' has no {question}"),
        (("--task", "chain_sum", "--exclude", "gone.parquet"), "gone.parquet: there is no such file"),
    ],
)
def test_bad_requests_get_one_line(tmp_path: Path, arguments: tuple[str, ...], problem: str) -> None:
    pytest.importorskip("reasoning_gym")
    assert_error(run("reasoning-gym", "--size", "3", "--output", tmp_path / "x.parquet", *arguments), problem)


def test_bad_gsm8k_files_get_one_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    for text, problem in (
        ('{"question": "q", "answer": "#### 1"}\n{"question": "q"}\n', "line 2: needs the texts question and answer"),
        ('{"question": "q", "answer": "one"}\n', "line 1, field answer: no number behind ####"),
        ("\n{nothing\n", "line 2: not JSON"),
        ("", "0 rows are left"),
    ):
        path.write_text(text)
        assert_error(run("gsm8k", "--input", path, "--output", tmp_path / "x.parquet"), problem)
    assert_error(run("gsm8k", "--input", tmp_path / "gone", "--output", tmp_path / "x.parquet"), "cannot be read")


def test_all_of_gsm8k_is_prepared_and_opened(tmp_path: Path) -> None:
    source = ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"
    if not source.is_file():
        pytest.skip(f"GSM8K is not at {source.parent}")
    assert run("gsm8k", "--input", source, "--output", tmp_path / "train.parquet").returncode == 0
    tokenizer = load_tokenizer(write_bpe_tokenizer(tmp_path / "bpe"))
    section = DataSection(train_files=["x"], max_prompt_length=400, response_column="extra_info.answer")
    found = list(PromptDataset([tmp_path / "train.parquet"], tokenizer, section, responses="one").read_all())
    assert len(found) == 7473
    prompts = [item for item in found if isinstance(item, Prompt)]
    assert 0 < len(prompts) < len(found)
    response = prompts[0].response_token_ids
    assert response is not None
    assert tokenizer.decode(response) == prompts[0].extra_info["answer"]


def test_distinct_keeps_the_first_of_equal_prompts_and_every_column(tmp_path: Path) -> None:
    run("gsm8k", "--input", write_gsm8k(tmp_path / "a.jsonl", 30), "--output", tmp_path / "a.parquet")
    once = pyarrow.parquet.read_table(tmp_path / "a.parquet")
    once = once.append_column("difficulty", pyarrow.array(range(30), pyarrow.int16()))
    again = once.set_column(once.num_columns - 1, "difficulty", pyarrow.array([99] * 30, pyarrow.int16()))
    repeated = pyarrow.concat_tables([once.slice(0, 10), again.slice(0, 10), once.slice(10), again])
    pyarrow.parquet.write_table(repeated, tmp_path / "many.parquet", row_group_size=7)
    checked = json.loads(run("check", tmp_path / "many.parquet", "--json").stdout)
    assert (checked["repeated"], checked["fit"]) == (40, True)
    shown = run("distinct", "--input", tmp_path / "many.parquet", "--output", tmp_path / "one.parquet")
    assert shown.stderr.endswith("one.parquet: 30 rows of 70\n")
    assert pyarrow.parquet.read_table(tmp_path / "one.parquet").equals(once)
    assert json.loads(run("check", tmp_path / "one.parquet", "--json").stdout)["repeated"] == 0
    assert_error(
        run("distinct", "--input", tmp_path / "no.parquet", "--output", tmp_path / "x.parquet"), "no such file"
    )
    damaged = bytearray((tmp_path / "many.parquet").read_bytes())
    damaged[40:400] = bytes(value ^ 255 for value in damaged[40:400])
    (tmp_path / "bad.parquet").write_bytes(damaged)
    assert_error(
        run("distinct", "--input", tmp_path / "bad.parquet", "--output", tmp_path / "x.parquet"), "bad.parquet"
    )
    assert not list(tmp_path.glob("*x.parquet*"))


BAD_LINES = {
    "deep": (b"[" * 3000 + b"]" * 3000, "line 1: not JSON (is nested too deeply"),
    "no number": (b'{"question": NaN}', "line 1: not JSON (NaN is no number of JSON"),
    "not UTF-8": (b'{"question": "\xff"}', "line 1: not JSON ("),
    "half of a pair": (b'{"question": "\\ud800", "answer": "#### 1"}', "line 1: holds half of a surrogate pair"),
    "a list": (b"[1]", "line 1: list instead of a JSON object"),
    "no answer": (b'{"question": "x"}', "line 1: needs the texts question and answer"),
    "a table": (b'a,b\n"x,1\n', "line 1: not JSON ("),
    "NUL": (b"\0\0\0\0", "line 1: not JSON ("),
    "endless digits": (b'{"question": ' + b"9" * 5000 + b"}", "line 1: not JSON ("),
}


@pytest.mark.parametrize(("content", "problem"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_told_by_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, problem: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    status = prepare_data.main(["gsm8k", "--input", str(path), "--output", str(tmp_path / "x.parquet")])
    shown = capsys.readouterr().err
    assert status == 2 and shown.startswith(f"error: {path}, {problem}") and shown.count("\n") == 1


def test_a_long_line_is_not_read_to_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_files, "MOST_LINE_BYTES", 1000)
    (tmp_path / "long.jsonl").write_bytes(b" " * 5000)
    arguments = ["--output", str(tmp_path / "x.parquet")]
    assert prepare_data.main(["gsm8k", "--input", str(tmp_path / "long.jsonl"), *arguments]) == 2
    assert "line 1: has over 1,000 bytes" in capsys.readouterr().err
    assert prepare_data.main(["gsm8k", "--input", "/dev/zero", *arguments]) == 2
    assert capsys.readouterr().err == "error: --input: /dev/zero cannot be read (is not a regular file (a device))\n"


def test_a_mark_of_the_order_of_bytes_is_passed_over(tmp_path: Path) -> None:
    path = write_gsm8k(tmp_path / "a.jsonl", 2)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    output = tmp_path / "x.parquet"
    assert prepare_data.main(["gsm8k", "--input", str(path), "--output", str(output)]) == 0 and len(read(output)) == 2


@pytest.mark.parametrize(
    ("output", "setting", "problem"),
    [
        ("", "max_terms=3", "--output: is empty"),
        ("pipe", "max_terms=3", "(a pipe is there)"),
        ("new.parquet", "max_terms=.inf", "max_terms=.inf: must be finite"),
    ],
)
def test_what_would_be_written_over_or_is_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], output: str, setting: str, problem: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    place = str(tmp_path / output) if output else ""
    asked = ["reasoning-gym", "--task", "chain_sum", "--size", "2", "--set", setting, "--output", place]
    assert prepare_data.main(asked) == 2
    assert problem in capsys.readouterr().err
    assert (tmp_path / "pipe").is_fifo()


def test_a_row_that_would_take_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_rows, "SECONDS_PER_ROW", 1)
    with pytest.raises(DataError, match="one row takes over 1 s"), task_rows.limited("one row"):
        while True:
            pass
