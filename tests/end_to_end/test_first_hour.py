"""The steps of a newcomer in docs/quickstart.md: its files and its commands, as they stand there, on the CPU."""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file

from end_to_end.commands import ROOT, Command, Finished
from end_to_end.runs import steps_of
from rlhf_megatron.rollout.vllm.process_environment import has_gpu

pytestmark = pytest.mark.skipif(has_gpu(), reason="the engine of this machine needs a GPU, which is hidden here")

PAGE = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
COMMAND_LINE = [sys.executable, "-P", "-m", "rlhf_megatron.runtime.command_line"]
ON_GPUS = "On GPUs"


def files_of(page: str) -> dict[str, str]:
    """Return the page's files: the first name of the line before a block is the block's."""
    blocks = re.findall(r"^`([\w.]+)`[^\n]*\n\n```(?:json|python|yaml)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return dict(blocks)


def commands_of(page: str) -> dict[str, list[list[str]]]:
    """Return the words of the page's commands, by the heading that they stand under."""
    sections = re.split(r"^## (.*)$", page, flags=re.MULTILINE)
    return {heading: commands_in(text) for heading, text in zip(sections[1::2], sections[2::2], strict=True)}


def commands_in(text: str) -> list[list[str]]:
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]


def run(words: list[str], folder: Path) -> Finished:
    with Command([*COMMAND_LINE, *words[1:]], folder) as command:
        return command.finish().check()


@pytest.fixture(scope="module")
def hour(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which all has been done that needs neither a GPU nor a server."""
    folder = tmp_path_factory.mktemp("hour")
    for name, text in files_of(PAGE).items():
        (folder / name).write_text(text, encoding="utf-8")
    for heading, commands in commands_of(PAGE).items():
        for words in commands:
            if words[0] == "rlhf-megatron" and heading != ON_GPUS:
                run(words, folder)
    return folder


def rows_of(file: Path) -> list[dict]:
    return pyarrow.parquet.read_table(file).to_pylist()


def test_the_page_has_files_and_commands() -> None:
    assert list(files_of(PAGE)) == ["questions.jsonl", "reward.py", "tool.py", "mine.yaml"]
    words = [words[:2] for commands in commands_of(PAGE).values() for words in commands if words[0] == "rlhf-megatron"]
    named = {name for _, name in words}
    assert named == {"tiny-model", "prepare", "train", "report", "evaluate", "convert", "plan"}


def test_the_questions_are_data(hour: Path) -> None:
    asked = [json.loads(line) for line in files_of(PAGE)["questions.jsonl"].splitlines()]
    rows = rows_of(hour / "train.parquet")
    assert [row["prompt"][-1]["content"] for row in rows] == [each["question"] for each in asked]
    assert [row["reward_model"]["ground_truth"] for row in rows] == [each["answer"] for each in asked]


def kept_rows(hour: Path, run: str, step: int) -> list[dict]:
    return rows_of(hour / "runs" / run / "rollouts" / f"step-{step}.parquet")


def test_rewards_are_the_functions_and_turns_the_tools(hour: Path) -> None:
    own = runpy.run_path(str(hour / "reward.py"))["compute_score"]
    rows = [row for step in (1, 2) for row in kept_rows(hour, "mine", step)]
    assert len(rows) == 2 * 4 * 8
    assert len({row["reward"] for row in rows}) > 1
    for row in rows:
        last = [turn["text"] for turn in row["turns"] if turn["sampled"]][-1]
        assert row["reward"] == pytest.approx(own("sums", last.replace("<|im_end|>", ""), row["ground_truth"], {}))
    said = {turn["text"] for row in rows for turn in row["turns"] if not turn["sampled"]}
    assert said and all("That is not it. Try again." in text for text in said)


def test_the_second_run_goes_on_from_the_first_at_another_rate(hour: Path) -> None:
    mine, faster = (steps_of(hour / "runs" / name) for name in ("mine", "faster"))
    assert mine[1]["train/learning_rate"] == mine[2]["train/learning_rate"] == 1e-3
    assert faster[2]["train/learning_rate"] == 1e-2 and "train/learning_rate" not in faster.get(1, {})
    # It samples from the same weights, and learns the same differently.
    assert [row["tokens"] for row in kept_rows(hour, "mine", 2)] == [
        row["tokens"] for row in kept_rows(hour, "faster", 2)
    ]
    first, second = (load_file(hour / "runs" / name / "export/step-2/model.safetensors") for name in ("mine", "faster"))
    assert any(not torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_both_runs_are_on_the_page(hour: Path) -> None:
    page = (hour / "comparison.html").read_text(encoding="utf-8")
    assert "mine" in page and "faster" in page and "actor.optimizer.learning_rate" in page


def test_the_model_is_judged(hour: Path) -> None:
    judged = json.loads((hour / "runs" / "judged" / "evaluation.json").read_text(encoding="utf-8"))
    rows = rows_of(hour / "runs" / "judged" / "evaluation.parquet")
    solved = {row["question"] for row in rows if row["correct"]}
    assert len(rows) == 4 * 4
    assert judged["metrics"]["sums"]["pass@4"]["value"] == len(solved) / 4


def test_the_checkpoint_is_exported(hour: Path) -> None:
    exported, own = (
        load_file(folder / "model.safetensors") for folder in (hour / "exported", hour / "runs/faster/export/step-2")
    )
    assert exported.keys() == own.keys()
    assert all(torch.equal(tensor, own[name].to(tensor.dtype)) for name, tensor in exported.items())


def test_the_commands_for_gpus_are_planned(tmp_path: Path) -> None:
    plan, train = commands_of(PAGE)[ON_GPUS]
    assert "the first:" in run(plan, tmp_path).out
    assert "Layouts" in run([*train, "--dry-run", "--world", "8"], tmp_path).out


@contextlib.contextmanager
def served(words: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the server that ``words`` start, with this Python, on the loopback address."""
    program = [sys.executable, "-P", *words[1:]]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    with (folder / "served.log").open("wb") as log:
        process = subprocess.Popen(
            [*program, "--host", "127.0.0.1", "--enforce-eager"],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.grid
def test_the_export_is_served(hour: Path) -> None:
    serve, curl = (words for words in commands_of(PAGE)["pass@k, export, serve"] if words[0] != "rlhf-megatron")
    asked = json.loads(curl[curl.index("-d") + 1])
    with served(serve, hour) as server:
        answer = wait_for_answer(server, curl[1], asked)
    [choice] = answer["choices"]
    assert answer["usage"]["completion_tokens"] <= asked["max_tokens"] and choice["message"]["role"] == "assistant"


def wait_for_answer(server: subprocess.Popen[bytes], address: str, asked: dict) -> dict:
    """Return the answer of the server once it is up; raises URLError where it has ended, or is not up after five
    minutes."""
    request = urllib.request.Request(address, json.dumps(asked).encode(), {"Content-Type": "application/json"})
    deadline = time.monotonic() + 300
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.URLError as error:
            has_ended = server.poll() is not None or time.monotonic() > deadline
            if has_ended or isinstance(error, urllib.error.HTTPError):
                raise
            time.sleep(1)
