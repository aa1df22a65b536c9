"""The HTML page of runs: what it says of a run folder, that it is safe, and that it loads nothing from elsewhere."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from rlhf_megatron.errors import MonitorError
from rlhf_megatron.monitor.page import recipe_differences, view_of, write_page

VOID = {"meta", "img", "br", "polyline"}


class Page(HTMLParser):
    """The texts of a page's elements, by their tag; fails where elements are not closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.links: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action")]
        assert not any(name.startswith("on") for name, _ in attrs) and tag != "script"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", data.strip()))

    def of(self, tag: str) -> list[str]:
        return [text for kind, text in self.texts if kind == tag]


def write_run(folder: Path, steps: int = 4, events: list[dict[str, Any]] | None = None, **recipe: Any) -> Path:
    folder.mkdir(parents=True)
    rows: list[dict[str, Any]] = [{"step": 0, "eval/gsm8k/accuracy": 0.25}]
    for step in range(1, steps + 1):
        rows.append(
            {
                "step": step,
                "reward/mean": step / 8,
                "train/kl": None if step == 2 else step * 1e-5,
                "train/step_time_ms": 4000.0 if step > 1 else 9000.0,
                "perf/tokens_per_gpu_per_sec": 500.0,
                "time/generate": 3.0,
                "time/update": 1.0,
            }
        )
    last = {"eval/gsm8k/accuracy": 0.75, "eval/gsm8k/accuracy_low": 0.7, "eval/gsm8k/accuracy_high": 0.8}
    rows.append({"step": steps, **last})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"name": folder.name, "loop": "rl", "steps": 8, "seed": 1, "model": {"path": "models/some"}, **recipe}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    (folder / "environment.json").write_text(
        json.dumps({"variables": {"WORLD_SIZE": "2"}, "git": {"commit": "c0ffee"}})
    )
    lines = events or [{"what": "start", "step": 0, "why": "the first attempt"}]
    (folder / "recovery.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write_samples(folder: Path, step: int, response: str) -> None:
    (folder / "samples").mkdir(exist_ok=True)
    row = {"prompt": "2 + 2?", "response": response, "ground_truth": "4", "score": 1.0, "truncated": False}
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{**row, "unscored": False}]), folder / "samples" / f"step-{step}.parquet"
    )


def test_the_page_says_what_became_of_a_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one")
    write_samples(folder, 9, "the newest")
    write_samples(folder, 4, "an older one")
    output = folder / "report.html"
    write_page({"one": folder}, output)
    page = Page(output.read_text(encoding="utf-8"))
    assert page.of("h1") == ["one"]
    assert page.of("p")[0].startswith("step 4 of 8, not ended")
    cells = page.of("td")
    assert "0.75 (0.7 to 0.8)" in cells, "the last evaluation with its interval"
    assert cells[cells.index("generate") + 1 :][:2] == ["3", "75%"]
    view = view_of("one", folder)
    headlines = {headline.label: (headline.first, headline.last) for headline in view.headlines}
    assert headlines["held-out accuracy, gsm8k"] == (0.25, 0.75)
    assert headlines["reward"] == (0.125, 0.5)
    assert headlines["KL to the reference"] == (1e-5, 4e-5), "null is no number"
    assert headlines["milliseconds per step"] == (None, 4000.0), "a slow first step does not count"
    assert dict(view.facts)["tokens"] == f"{500 * 2 * (9 + 3 * 4):,}"
    assert dict(view.facts)["time in steps"] == "0 min 21 s"
    assert "the newest" in page.of("pre") and "an older one" not in page.of("pre")
    assert [link[:22] for link in page.links] == ["data:image/png;base64,"], "everything is in the file"


@pytest.mark.parametrize(
    ("events", "state"),
    [
        (["start", "done"], "done, step 4 of 8"),
        (["start", "fault"], "step 4 of 8, fault: because"),
        (["start", "fault", "restart", "resume"], "step 4 of 8, not ended"),
        (["start", "health_stop"], "step 4 of 8, health stop: because"),
    ],
)
def test_the_state_is_that_of_the_last_attempt(tmp_path: Path, events: list[str], state: str) -> None:
    lines = [{"what": what, "step": 4, "why": "because"} for what in events]
    assert view_of("one", write_run(tmp_path / "one", events=lines)).state == state


def test_a_run_with_all_its_steps_is_done(tmp_path: Path) -> None:
    assert view_of("one", write_run(tmp_path / "one", steps=8)).state == "done, step 8 of 8"


def test_what_a_model_or_a_person_wrote_stays_text(tmp_path: Path) -> None:
    bad = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>"
    folder = write_run(tmp_path / "one", note=bad, events=[{"what": bad, "why": bad, "step": 0}])
    write_samples(folder, 1, bad)
    write_page({bad: folder}, tmp_path / "page.html", title=bad)
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert len(page.links) == 1 and bad in page.of("pre") and page.of("h1") == [bad]


def test_torn_files_leave_gaps_and_no_metrics_are_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one")
    for name in ("recipe.yaml", "environment.json", "recovery.jsonl"):
        (folder / name).write_bytes(b"{\xff: [")
    write_samples(folder, 3, "x")
    (folder / "samples" / "step-4.parquet").write_bytes(b"PAR1")
    write_page({"one": folder}, tmp_path / "page.html")
    assert Page((tmp_path / "page.html").read_text(encoding="utf-8")).of("h1") == ["one"]
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(MonitorError, match=r"one: no metrics\.jsonl"):
        write_page({"one": folder}, tmp_path / "page.html")


def test_runs_are_compared_and_so_are_their_recipes(tmp_path: Path) -> None:
    section = {"tokens_per_gpu": 64, "layout": {"tensor": 2}}
    first = write_run(tmp_path / "first", actor={"layout": {"tensor": 1, "data": None}}, reference=None)
    second = write_run(tmp_path / "second", 8, actor={"layout": {"tensor": 2, "data": None}}, reference=section)
    write_page({"first": first, "second": second}, tmp_path / "both.html")
    page = Page((tmp_path / "both.html").read_text(encoding="utf-8"))
    cells = page.of("td")
    assert cells[cells.index("reward") + 1 :][:2] == ["0.5", "1"]
    views = [view_of("first", first), view_of("second", second)]
    assert recipe_differences(views) == [("actor.layout.tensor", ["1", "2"]), ("reference", ["null", "{...}"])]
    assert "best" in (tmp_path / "both.html").read_text(encoding="utf-8")
    write_page({"first": first, "again": first}, tmp_path / "same.html")
    same = Page((tmp_path / "same.html").read_text(encoding="utf-8"))
    assert "Nowhere but in their names." in same.of("p")
