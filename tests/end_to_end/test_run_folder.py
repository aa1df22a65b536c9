"""What becomes of a run when its folder is full, or another job's."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import yaml
from safetensors import safe_open
from transformers import AutoTokenizer

from end_to_end.commands import Command, python, torchrun
from end_to_end.runs import SUPERVISED, TRAIN, decisions, logged, make_model, make_sums, metrics_of, wait_for

MORE = "for more raise steps; for a new run use another name, or --resume none"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with random weights, another tokenizer's folder, a template, and data."""
    path = tmp_path_factory.mktemp("run_folder")
    (path / "sft.yaml").write_text(yaml.safe_dump(SUPERVISED))
    make_model(path, 1, "--intermediate-size=512")  # more than a disk that is full on purpose takes
    make_model(path, 1, name="other")
    (path / "model" / "tokenizer.json").unlink()  # of a model that comes without its tokenizer
    (path / "other" / "vocabulary.tiktoken").write_text("")
    (path / "chat.jinja").write_text("{% for message in messages %}<{{ message.content }}>{% endfor %}")
    make_sums(path, 60)
    return path


def train(folder: Path, name: str, *arguments: str, restarts: int = 0) -> Command:
    """Start the recipe on two ranks, with the other folder's tokenizer."""
    names = (f"name={name}", "model.tokenizer=other", "data.chat_template=chat.jinja")
    return torchrun(2, TRAIN, "sft.yaml", *names, *arguments, folder=folder, restarts=restarts)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nothing large written from the fifth step on, as it cannot be written, in a torchrun's first attempt."""
    monkeypatch.setenv("RLHF_MEGATRON_FAULT", "disk_full@step:5-300")


def test_a_stop_that_could_not_be_saved_is_not_taken_for_one_that_was(
    folder: Path, full_disk: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folder / "runs" / "unsaved"
    with train(folder, "unsaved", "checkpoint.save_interval=2", restarts=1) as command:
        wait_for(command, lambda: logged(run) > 6)
        command.rank(1).send_signal(signal.SIGTERM)
        stopped = command.finish()
    start, stop = decisions(run)  # torchrun has started the ranks again, and they have ended at once
    assert (start["what"], stop["what"], stop["saved"]) == ("start", "stop", False)
    assert f"warning: step-{stop['step']} was not saved: rank 0: " in stopped.out
    ends = f"stopped after step {stop['step']}: SIGTERM came; the same command resumes from step "
    assert ends in stopped.out
    saved = int(stopped.out.partition(ends)[2].split()[0])
    assert saved in (2, 4)  # that of step 4 may still have been on its way
    assert stopped.status != 0 and "exitcode  : 1" in stopped.err and not (run / "requeue").exists()

    monkeypatch.delenv("RLHF_MEGATRON_FAULT")
    with train(folder, "unsaved", f"steps={stop['step'] + 1}") as command:
        command.finish().check()
    _, _, again, resumed, done = decisions(run)
    assert (again["what"], again["why"]) == ("start", "SIGTERM came; the step was not saved")
    assert (resumed["step"], done["step"]) == (saved, stop["step"] + 1)


def test_an_end_that_could_not_be_saved_is_a_fault(folder: Path, full_disk: None) -> None:
    run = folder / "runs" / "unsaved_end"
    with train(folder, "unsaved_end", "checkpoint.save_interval=3", "steps=6") as command:
        error = command.finish().only_error()
    told, _, begins = error.partition("step 6 could not be saved; make room, and the same command resumes from ")
    assert told.endswith("runs/unsaved_end/checkpoints: ")
    assert begins in ("step 3", "the beginning")  # that of step 3 may still have been on its way
    assert [line["what"] for line in decisions(run)] == ["start", "fault"]


def test_a_run_that_is_to_be_shorter_than_it_is_says_so(folder: Path) -> None:
    run = folder / "runs" / "shorter"
    with train(folder, "shorter", "checkpoint.save_interval=2", "steps=4", "checkpoint.export_at_end=false") as command:
        command.finish().check()
    with train(folder, "shorter", "checkpoint.save_interval=2", "steps=3") as command:
        error = command.finish().only_error()
    assert error.removeprefix("[rank 1] ").startswith(
        "error: steps=3: runs/shorter/checkpoints/step-4 has done 4 already; raise steps, "
    )
    assert not (run / "export").exists(), "what four steps have made is not that of three"


def test_an_export_waits_for_room_where_nothing_else_has_the_result(folder: Path, full_disk: None) -> None:
    run = folder / "runs" / "exported"
    exports = ("checkpoint.export_interval=2", "checkpoint.export_at_end=true")
    with train(folder, "exported", "steps=7", *exports) as command:
        wait_for(command, lambda: "it is tried again in" in command.so_far().out)
        assert sorted(path.name for path in (run / "export").iterdir()) == ["step-2", "step-4"], "nothing half-written"
        for rank in (0, 1):
            resource.prlimit(command.rank(rank).pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        finished = command.finish().check()
    assert "warning: step 6 was not exported: " in finished.out
    assert [line["what"] for line in decisions(run)] == ["start", "done"]
    exported = run / "export" / "step-7"
    with safe_open(exported / "model.safetensors", "pt") as file:
        assert "model.embed_tokens.weight" in file.keys()  # noqa: SIM118  (no mapping)
    # What the model was trained with goes along.
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert (exported / "vocabulary.tiktoken").exists()
    assert tokenizer.apply_chat_template([{"role": "user", "content": "2 + 3"}], tokenize=False) == "<2 + 3>"
    assert tokenizer("2 + 3")["input_ids"] == AutoTokenizer.from_pretrained(folder / "other")("2 + 3")["input_ids"]


def test_an_export_that_fails_beside_a_checkpoint_is_made_by_the_next_attempt(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_MEGATRON_FAULT", "disk_full@export:6")
    run = folder / "runs" / "again"
    exports = ("checkpoint.save_interval=3", "checkpoint.export_at_end=true")
    with train(folder, "again", "steps=6", *exports, restarts=1) as command:
        finished = command.finish().check()
    assert "the last step was not exported: " in finished.err and "resumes from step 6" in finished.err
    assert f"no step is left: {MORE}" in finished.out
    told = [(line["what"], line["step"]) for line in decisions(run)]
    assert told == [("start", 0), ("fault", None), ("restart", 6), ("resume", 6), ("done", 6)]
    with train(folder, "again", "steps=6", *exports) as command:  # it could not export here
        again = command.finish().check().out
    assert again == f"runs/again: all 6 steps are done, and nothing is left to write: {MORE}\n"
    assert len(decisions(run)) == len(told)
    # What has gone meanwhile is made again.
    monkeypatch.delenv("RLHF_MEGATRON_FAULT")
    shutil.rmtree(run / "export")
    with train(folder, "again", "steps=6", *exports) as command:
        assert f"no step is left: {MORE}" in command.finish().check().out
    # A checkpoint is converted into the same folder.
    convert = ("checkpoint-to-hf", "--input=runs/again/checkpoints/step-6", "--output=converted", "--dtype=float32")
    python("tools/convert.py", *convert, folder=folder).check()
    exported, converted = (
        {path.name: path.read_bytes() for path in made.iterdir()}
        for made in (run / "export" / "step-6", folder / "converted")
    )
    assert exported == converted


def test_a_second_job_leaves_the_first_ones_folder_alone(folder: Path) -> None:
    run = folder / "runs" / "shared"
    steps = ("steps=100000", "checkpoint.save_interval=2")
    with train(folder, "shared", *steps) as first:
        wait_for(first, lambda: logged(run) > 2)
        with train(folder, "shared", *steps, "retry.max_retries=0") as second:
            error = second.finish().only_error()
        assert f"error: runs/shared: process {first.rank(0).pid} of " in error and "trains in this folder" in error
        assert [line["what"] for line in decisions(run)] == ["start"]
        first.rank(1).send_signal(signal.SIGTERM)
        first.finish()
    assert decisions(run)[-1]["saved"] and not (run / "claim").exists()
    assert sorted(metrics_of(run)) == list(range(1, decisions(run)[-1]["step"] + 1))


def test_a_damaged_folder_is_told_and_survived(folder: Path) -> None:
    run = folder / "runs" / "damaged"
    with train(folder, "damaged", "steps=4", "checkpoint.save_interval=2") as command:
        command.finish().check()
    manifest = run / "checkpoints" / "step-4" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 4', '"step": 5'))
    (run / "checkpoints" / "latest").unlink()
    os.mkfifo(run / "checkpoints" / "latest")
    for name, damage in (
        ("metrics.jsonl", b"\0" * 4096 + b"\n"),
        ("recovery.jsonl", b'{"what": "start", "step": 4}\n'),
    ):
        with (run / name).open("ab") as file:
            file.write(damage)
    with train(folder, "damaged", "steps=6", "checkpoint.save_interval=2") as command:
        finished = command.finish().check()
    assert "step-4/manifest.json: is damaged" in finished.out and "checkpoints/step-2, after step 2" in finished.out
    assert "checkpoints/latest: is not a regular file (a pipe)" in finished.out
    assert all(f"{name}.damaged-1.jsonl" in finished.err for name in ("metrics", "recovery"))
    assert sorted(metrics_of(run)) == [1, 2, 3, 4, 5, 6]
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    with train(folder, "damaged", "steps=7") as command:
        error = command.finish().only_error()
    assert (
        error.removeprefix("[rank 1] ")
        == "error: runs/damaged/metrics.jsonl: is a folder, and a file of the run belongs there; move it away"
    )
