"""A run's folder that is damaged: each kind is reported in a line, and the run goes on or is refused with status 2."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import report
import torch
from safetensors.torch import save_file

from rlhf_megatron.checkpoint.manager import sound_checkpoints
from rlhf_megatron.checkpoint.manifest import digest_of, new_digest
from rlhf_megatron.checkpoint.storage import publish, write_tensors
from rlhf_megatron.errors import CheckpointError, UserError
from rlhf_megatron.monitor.metrics import read_steps
from rlhf_megatron.monitor.records import lines_of
from rlhf_megatron.runtime.recovery import Origin, RecoveryLog
from run_restart import ORIGIN, make_run, restart, world_of_one

Damage = Callable[[Path], None]
MANIFEST, TENSORS = "checkpoints/step-2/manifest.json", "checkpoints/step-2/rank-00000.safetensors"
DEEP = b"[" * 100_000
KINDS = ("folder", "pipe", "link to nothing", "link to itself", "device")
# What a power cut, a full disk or a person can make of a file of lines.
OF_LINES: dict[str, Callable[[bytes], bytes]] = {
    "invalid UTF-8 between lines": lambda content: content.replace(b"\n", b"\n\xff\xfe\n", 1),
    "invalid UTF-8 at the end": lambda content: content + b"\xff\xff",
    "zeros at the end": lambda content: content + b"\0" * 4096,
    "zeros before a line": lambda content: content.replace(b"\n", b"\n" + b"\0" * 4096, 1),
    "nothing but zeros": lambda content: b"\0" * len(content),
    "half a line at the end": lambda content: content[:-10],
    "half a line between": lambda content: content[:20] + b"\n" + content,
    "deep": lambda content: content + DEEP + b"\n",
    "a number of many digits": lambda content: content + b"9" * 9999 + b"\n",
    "null": lambda content: content + b"null\n",
    "a long line": lambda content: content + b'{"step": "' + b"x" * 5_000_000 + b'"}\n',
    "nothing": lambda content: b"",
}


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    """Have this process alone, and nothing wait for the disk."""
    with pytest.MonkeyPatch.context() as patch, world_of_one():
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that has saved steps 1 and 2."""
    return make_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def run(sound: Path, tmp_path: Path) -> Path:
    """Return a copy of it."""
    return Path(shutil.copytree(sound, tmp_path / "run"))


def put(path: Path, kind: str) -> None:
    """Have something else in a file's or folder's place."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to({"link to nothing": "/none", "link to itself": path.name, "device": "/dev/zero"}[kind])


def in_json(path: Path, change: Callable[[Any], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def of_format_1(manifest: Any) -> None:
    """Write it as the version before did."""
    manifest.pop("digest")
    manifest["format"] = 1


def test_what_is_written_while_it_is_read_is_no_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"ste')
    with path.open("rb") as file:
        lines = lines_of(file)
        assert [next(lines), next(lines)] == [(1, b'{"step": 1}\n'), (2, b'{"ste')]
        with path.open("ab") as run:
            run.write(b'p": 2}\n{"step": 3}\n')
        assert list(lines) == []


def test_a_sound_folder_goes_on_without_a_word(run: Path) -> None:
    assert restart(run) == restart(run).__class__(2, "")
    assert read_steps(run / "metrics.jsonl").keys() == {1, 2, 3, 4}


def test_a_checkpoint_of_the_version_before_is_read_and_that_is_told(run: Path) -> None:
    in_json(run / MANIFEST, of_format_1)
    restarted = restart(run)
    assert restarted.step == 2 and "earlier version" in restarted.told


CONTENTS = {
    "a digit": lambda content: content.replace(b'"step": 2', b'"step": 3'),
    "a value": lambda content: content.replace(b"0.5", b"0.6"),
    "cut": lambda content: content[:-20],
    "empty": lambda content: b"",
    "zeros": lambda content: b"\0" * len(content),
    "no UTF-8": lambda content: b"\xff\xfe" + content,
    "UTF-16": lambda content: content.decode().encode("utf-16"),
    "deep": lambda content: DEEP,
    "null": lambda content: b"null",
    "NaN": lambda content: b'{"format": NaN}',
    "many digits": lambda content: b"9" * 5000,
}


@pytest.mark.parametrize("change", CONTENTS.values(), ids=CONTENTS)
def test_a_manifest_that_has_changed_is_passed_over(run: Path, change: Callable[[bytes], bytes]) -> None:
    (run / MANIFEST).write_bytes(change((run / MANIFEST).read_bytes()))
    passed_over(run)


def passed_over(run: Path) -> None:
    """Check that the run resumes from the checkpoint before; named on the command line, the damaged one is refused."""
    folder = run / "checkpoints"
    decisions = (run / "recovery.jsonl").rename(run / "decisions")  # a restart would take what its launch has saved
    with pytest.raises(CheckpointError, match=r"^--resume .*step-2") as caught:
        next(sound_checkpoints(folder, str(folder / "step-2"), print), None)
    decisions.rename(run / "recovery.jsonl")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600
    restarted = restart(run)
    assert restarted.step == 1 and restarted.told.count("warning: ") == restarted.told.count("passed over") == 1
    assert f"{folder}/step-2" in restarted.told


# What each changes in the manifest, whose digest is then right, or which has none: as somebody could have written it.
FIELDS: dict[str, Callable[[Any], Any]] = {
    "files []": lambda m: m.update(files=[]),
    "files null": lambda m: m.update(files=None),
    "files of null": lambda m: m.update(files=[None]),
    "a file twice": lambda m: m["files"].append(m["files"][0]),
    "bytes as text": lambda m: m["files"][0].update(bytes="5"),
    "bytes below 0": lambda m: m["files"][0].update(bytes=-1),
    "digest null": lambda m: m["files"][0].update(digest=None),
    "digest short": lambda m: m["files"][0].update(digest="ab"),
    "name null": lambda m: m["files"][0].update(name=None),
    "name empty": lambda m: m["files"][0].update(name=""),
    "name ..": lambda m: m["files"][0].update(name=".."),
    "name outside": lambda m: m["files"][0].update(name="../step-1/rank-00000.safetensors"),
    "name with NUL": lambda m: m["files"][0].update(name="a\0b"),
    "name of another rank": lambda m: m["files"][0].update(name="rank-00001.safetensors"),
    "a key more": lambda m: m["files"][0].update(more=1),
    "state null": lambda m: m.update(state=None),
    "state {}": lambda m: m.update(state={}),
    "step null": lambda m: m["state"].update(step=None),
    "step true": lambda m: m["state"].update(step=True),
    "another step": lambda m: m["state"].update(step=7),
    "roles null": lambda m: m["state"].update(roles=None),
    "a part null": lambda m: m["state"]["parts"].update(history=None),
    "launch a list": lambda m: m["state"].update(launch=[]),
    "format null": lambda m: m.update(format=None),
    "format true": lambda m: m.update(format=True),
    "a later format": lambda m: m.update(format=3),
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("change", FIELDS.values(), ids=FIELDS)
def test_a_manifest_of_wrong_values_is_passed_over(run: Path, change: Callable[[Any], Any], version: int) -> None:
    def changed(manifest: Any) -> None:
        of_format_1(manifest)
        if version > 1:
            manifest["format"] = version
        change(manifest)
        if version > 1:
            manifest["digest"] = digest_of(manifest)

    in_json(run / MANIFEST, changed)
    passed_over(run)


def rewrite_tensors(run: Path, content: bytes | None = None, about: str | None = None, **tensors: Any) -> None:
    """Write the newest checkpoint's file anew, and the manifest to it."""
    path = run / TENSORS
    if content is None:
        save_file(tensors or {"x": torch.ones(2)}, path, metadata=about if about is None else {"about": about})
    else:
        path.write_bytes(content)
    digest = new_digest()
    digest.update(path.read_bytes())

    def changed(manifest: Any) -> None:
        manifest["files"][0] |= {"bytes": path.stat().st_size, "digest": digest.hexdigest()}
        del manifest["digest"]
        manifest["digest"] = digest_of(manifest)

    in_json(run / MANIFEST, changed)


@pytest.mark.parametrize(
    "file",
    [
        {"content": b"\xff" * 100},
        {"content": b"\1"},
        {"content": (2**62).to_bytes(8, "little") + b"{}"},
        {"content": len(DEEP).to_bytes(8, "little") + DEEP},
        {"about": None},
        {"about": "x"},
        {"about": DEEP.decode()},
        {"about": "[]"},
    ],
    ids=["noise", "short", "header too long", "header deep", "no words", "bad words", "deep words", "a list"],
)
def test_tensors_that_cannot_be_opened_are_passed_over(run: Path, file: dict[str, Any]) -> None:
    rewrite_tensors(run, **file)
    passed_over(run)


@pytest.mark.parametrize(
    ("about", "tensors"),
    [
        ({}, {}),
        ({"random": []}, {}),
        ({"random": [1]}, {}),
        ({"random": ["cpu"]}, {}),
        ({"random": ["cpu"]}, {"random/cpu": torch.zeros(5, dtype=torch.uint8)}),
        ({"random": ["cpu"]}, {"random/cpu": torch.zeros(5056)}),
    ],
)
def test_a_checkpoint_without_its_random_states_is_passed_over(
    run: Path, about: dict[str, Any], tensors: dict[str, Any]
) -> None:
    rewrite_tensors(run, about=json.dumps(about), **tensors)
    passed_over_where_it_is_restored(run, "random numbers|random generators|random/cpu")


def passed_over_where_it_is_restored(run: Path, told: str) -> None:
    """Do as ``passed_over`` does, of a checkpoint whose files are as their digests say."""
    path = run / "checkpoints/step-2"
    with pytest.raises(
        CheckpointError, match=rf"^--resume {path}: {path}.*({told}).*; name another one, or auto$"
    ) as caught:
        restart(run, str(path), Origin("node 12 100"))
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600
    restarted = restart(run)
    assert restarted.step == 1 and restarted.told.count(f"warning: {path}") == restarted.told.count("passed over") == 1


@pytest.mark.parametrize("history", [{}, {"values": []}, {"values": {"x": 1.0}}, {"values": {"1": "x"}}])
def test_a_part_of_wrong_values_is_passed_over(run: Path, history: Any) -> None:
    def changed(manifest: Any) -> None:
        manifest["state"]["parts"] = {"history": history}
        manifest.pop("digest")
        manifest["digest"] = digest_of(manifest)

    in_json(run / MANIFEST, changed)
    passed_over_where_it_is_restored(run, "what it says of history cannot be used")


def test_where_all_are_damaged_nothing_begins_anew_by_itself(run: Path) -> None:
    for step in (1, 2):
        (run / f"checkpoints/step-{step}/manifest.json").write_text("{")
    before = sorted((run / "checkpoints").rglob("*"))
    with pytest.raises(CheckpointError, match="none of 2 checkpoints can be used; give --resume none to start anew"):
        restart(run)
    assert sorted((run / "checkpoints").rglob("*")) == before


def test_a_checkpoint_under_another_name_is_passed_over(run: Path) -> None:
    folder = run / "checkpoints"
    for name in ("step-5", "step-007", "step-9 ", "step-" + "9" * 200):
        shutil.copytree(folder / "step-1", folder / name)
    (folder / "latest").write_text("step-5\n")
    restarted = restart(run)
    assert restarted.step == 2 and restarted.told.count("passed over") == 3  # that beyond ``latest`` is the last


@pytest.mark.parametrize("kind", [*KINDS, "nothing", "noise", "too much", "a step that is not there"])
@pytest.mark.parametrize("name", ["latest", "best"])
def test_a_pointer_of_any_kind_is_survived_and_replaced(run: Path, name: str, kind: str) -> None:
    path = run / "checkpoints" / name
    if kind in KINDS:
        put(path, kind)
    else:
        gone = '{"checkpoint": "step-7", "metric": "a", "mode": "max", "value": 1}' if name == "best" else "step-7"
        path.write_text({"nothing": "", "noise": "\0\xff", "too much": " " * 10**6}.get(kind, gone))
    first = restart(run)
    assert first.step == 2 and f"warning: {path}: " in first.told
    assert restart(run).step == 3
    assert (run / "checkpoints/latest").read_text() == "step-4\n"


@pytest.mark.parametrize("kind", [*KINDS, "file"])
@pytest.mark.parametrize(
    "name",
    ["step-2", "step-2/manifest.json", "step-2/rank-00000.safetensors", "step-3", "step-3.partial", "latest.partial"],
)
def test_what_lies_among_the_checkpoints_is_survived(run: Path, name: str, kind: str) -> None:
    path = run / "checkpoints" / name
    if kind == "file":
        shutil.rmtree(path) if path.is_dir() else None
        path.write_text("x")
    else:
        put(path, kind)
    restarted = restart(run)
    assert restarted.step == (1 if name.startswith("step-2") else 2)
    assert ("warning: " in restarted.told) == name.startswith("step-2")
    assert restart(run).step == restarted.step + 1


@pytest.mark.parametrize("kind", [*KINDS, "file"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.csv", "recovery.jsonl", "claim", "checkpoints", "logs"])
def test_what_is_of_another_kind_is_refused_in_a_line(run: Path, name: str, kind: str) -> None:
    is_file = "." in name or name == "claim"
    if kind == ("file" if is_file else "folder"):
        pytest.skip("that is its kind")
    if kind == "file":
        shutil.rmtree(run / name, ignore_errors=True)
        (run / name).write_text("x")
    else:
        put(run / name, kind)
    with pytest.raises(UserError, match=rf"^{run / name}: .*; (move it away|delete it)$"):
        restart(run)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["requeue", "metrics.csv.partial", "logs/hang-of-start-2", "recipe.yaml", "report.html"]
)
def test_what_is_replaced_anyway_may_be_of_any_kind(run: Path, name: str, kind: str) -> None:
    put(run / name, kind)
    assert restart(run).step == 2


@pytest.mark.parametrize("change", OF_LINES.values(), ids=OF_LINES)
@pytest.mark.parametrize("name", ["metrics.jsonl", "recovery.jsonl", "metrics.csv"])
def test_damaged_lines_are_told_once_and_survived(run: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    path = run / name
    content = change(path.read_bytes())
    path.write_bytes(content)
    lines = content.splitlines()[: None if content.endswith(b"\n") else -1]
    assert restart(run).step == 2
    again = restart(run)
    assert again.step == 3 and "warning" not in again.told
    if name == "metrics.jsonl":
        kept = [line for line in lines if line.startswith(b'{"step": ') and line.endswith(b"0.5}")]
        assert len(read_steps(path)) == len(set(kept)) + 2, "no sound number is lost"
    assert all(line["launch"] == ORIGIN.torchrun for line in RecoveryLog(run, ORIGIN).lines())


@pytest.mark.parametrize("name", ["metrics.jsonl", "recovery.jsonl", "metrics.csv"])
def test_a_log_that_no_run_has_written_is_moved_aside_unread(run: Path, name: str) -> None:
    with (run / name).open("r+b") as file:
        file.truncate(100 << 30)  # a hole, which takes no room
    if name == "metrics.jsonl":
        assert report.main([str(run)]) == 2
    restarted = restart(run)
    stem, suffix = name.split(".")
    assert restarted.step == 2 and f"it is {stem}.damaged-1.{suffix} now and begun anew" in restarted.told
    assert restart(run).step == 3


def test_a_metrics_file_that_cannot_be_written_is_a_line(run: Path) -> None:
    (run / "metrics.csv").unlink()
    (run / "metrics.csv").symlink_to("/proc/self/mem")  # a regular file, by its kind
    with pytest.raises(UserError, match="what the tracker csv writes cannot be written"):
        restart(run)


@pytest.mark.parametrize(
    "line",
    ['{"step": "x"}', '{"step": null}', '{"step": 1e999}', '{"step": -5}', '{"step": true}', '{"step": 2.5}', "{}",
     '{"step": 3, "a": "x"}', '{"step": 3, "a": NaN}', '{"step": 3, "a": 1e999}', '{"step": 3, "a": [1]}',
     '{"step": 3, "a": ' + "9" * 400 + "}"],
)  # fmt: skip
def test_metrics_of_wrong_types_are_set_aside(run: Path, line: str) -> None:
    path = run / "metrics.jsonl"
    path.write_text(line + "\n" + path.read_text())
    assert report.main([str(run)]) == 2, "a report says which line"
    restarted = restart(run)
    assert (
        restarted.step == 2 and f"{path}: line 1 is damaged and was moved to metrics.damaged-1.jsonl" in restarted.told
    )
    assert (run / "metrics.damaged-1.jsonl").read_text() == line + "\n"
    assert read_steps(path).keys() == {1, 2, 3}


START = {"launch": "node 1 5", "attempt": 0, "step": 0, "what": "start", "why": "x", "metrics_bytes": 0} | {
    "torchrun": ORIGIN.torchrun, "job": None, "requeues": 0
}  # fmt: skip
FAULT = {"launch": "node 1 5", "attempt": 0, "step": None, "what": "fault", "why": "x", "phase": "update"}
DECISIONS = [
    *([{name: value for name, value in START.items() if name != key}] for key in START),
    *([{**START, key: bad}] for key in START for bad in ([], {}, 1.5, True)),
    *(
        [START, {**FAULT, **more}]
        for more in (
            {"what": "resume"}, {"what": "stop"}, {"what": "stop", "step": 2, "saved": "x"}, {"what": "done"},
            {"what": []}, {"what": "other"}, {"kind": "out_of_memory", "phase": 5}, {"kind": "not_finite"},
            {"kind": "not_finite", "first": 3, "data": "x"}, {"why": None}, {"reduced": "x"},
            {"step": "5"}, {"step": 10**30},
        )
    ),
    *([{**START, "reduced": bad}] for bad in ("x", {"x": 1}, {"a.b.c": 1}, {"actor.tokens_per_gpu": "x"}, {"a.b": -1})),
]  # fmt: skip


def test_decisions_without_a_key_or_of_wrong_types_are_left_out(run: Path) -> None:
    for decisions in DECISIONS:
        (run / "recovery.jsonl").write_text("".join(json.dumps(line) + "\n" for line in decisions))
        assert len(RecoveryLog(run, ORIGIN).lines()) == len(decisions) - 1, decisions[-1]
        before = restart(run).step
    assert before == 1 + len(DECISIONS), "each attempt has gone on from the one before"


def test_what_a_decision_says_is_shown_without_control_characters(run: Path) -> None:
    stop = {**FAULT, "what": "health_stop", "why": "\x1b[31m\nerror: x" + "y" * 9999}
    (run / "recovery.jsonl").write_text(json.dumps(START) + "\n" + json.dumps(stop) + "\n")
    with pytest.raises(UserError, match="recovery.jsonl: ") as caught:
        restart(run)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1500


def test_budgets_that_the_recipe_does_not_have_are_passed_over(run: Path) -> None:
    (run / "recovery.jsonl").write_text(json.dumps({**START, "reduced": {"critic.tokens_per_gpu": 5, "x.y": 1}}) + "\n")
    assert restart(run).step == 2


@pytest.mark.parametrize("words", ["hello", "", "a b c", "\x1b[31m 1 5", "{machine} abc 5", "{machine} 99999999 5"])
def test_a_claim_of_nobody_is_taken_over(run: Path, words: str) -> None:
    from rlhf_megatron.runtime.processes import this_machine

    (run / "claim").write_text(words.format(machine=this_machine()))
    assert "\x1b" not in restart(run).told


OF_OTHERS = {
    "recipe.yaml": ["[" * 20_000, "!!python/object/apply:os.system ['x']", "[]", "model: x\nbatch: [1]\nsteps: []",
                    "a: &a [x]\nb: &b [*a, *a]", "steps: .nan\nbatch: {prompts_per_step: x, responses_per_prompt: y}"],
    "environment.json": [DEEP.decode(), '{"variables": [], "hardware": [], "git": []}', "\0",
                         '{"variables": {"WORLD_SIZE": "x"}, "hardware": {"gpus": 5}, "git": {"commit": 5}}'],
    "recovery.jsonl": ["\0\n" + DEEP.decode(), '{"what": 5}\n{"what": "start", "step": []}'],
    "samples/step-9.parquet": ["PAR1", ""],
    "samples/step-\u00b2.parquet": [""],
}  # fmt: skip


def test_a_page_is_made_of_what_can_be_read(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(max(map(len, OF_OTHERS.values()))):
        for name, contents in OF_OTHERS.items():
            (run / name).write_text(contents[number % len(contents)])
        assert report.main([str(run), "--output", str(run / "page.html")]) == 0
    assert "not read" in (run / "page.html").read_text()
    for kind in KINDS:
        put(run / "recipe.yaml", kind)
    assert report.main([str(run)]) == 0
    large = [{"step": 1, "train/loss": 1e308, "time/update": 1.7e308}, {"step": 2, "train/loss": -1e308, "\ud800": 1.0}]
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(record | {"train/grad_norm": 1.0}) + "\n" for record in large)
    )
    assert report.main([str(run)]) == report.main([str(run), "--output", str(run / "curves.png")]) == 0
    assert not capsys.readouterr().err


def test_a_report_of_what_has_no_metrics_is_refused_in_a_line(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run)
    for kind in KINDS:
        put(run / "metrics.jsonl", kind)
        assert report.main(["."]) == report.main([".", "--output", "curves.png"]) == 2
    put(run / "metrics.jsonl", "folder")
    (run / "empty").mkdir()
    assert report.main(["empty"]) == report.main(["a\0b"]) == report.main(["n" * 9999]) == 2
    assert report.main(["mistyped", "--output", "page.html"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("error: mistyped: no metrics.jsonl")
    assert len(lines) == 2 * len(KINDS) + 4 and all(line.startswith("error: ") and len(line) < 700 for line in lines)


def test_a_checkpoint_keeps_numbers_that_are_not_finite(tmp_path: Path) -> None:
    """Such as those of an evaluation."""
    folder = tmp_path / "checkpoints"
    file = write_tensors(folder / "step-1", "rank-00000.safetensors", {"x": torch.ones(1)}, {})
    publish(folder / "step-1", [file], {"step": 1, "parts": {"history": {"values": {"1": float("nan")}}}}, 1)
    assert next(sound_checkpoints(folder, "auto", print), None) == folder / "step-1"
