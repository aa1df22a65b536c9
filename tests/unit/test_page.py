"""The HTML page of runs: what it says of a run folder, that it is safe, and that it loads nothing from elsewhere."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from rlhf_megatron.errors import MonitorError
from rlhf_megatron.monitor.charts import BOTTOM, TOP, WIDTH, chart_of
from rlhf_megatron.monitor.comparison import apart, compared, recipe_differences
from rlhf_megatron.monitor.page import view_of, write_page
from rlhf_megatron.monitor.panels import MACHINE_PANELS, RL_PANELS, axis_bounds
from run_pages import Page, write_run, write_samples


def test_the_page_says_what_became_of_a_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one")
    write_samples(folder, 9, "the newest")
    write_samples(folder, 4, "an older one")
    output = folder / "report.html"
    write_page({"one": folder}, output)
    page = Page(output.read_text(encoding="utf-8"))
    assert page.of("h1") == ["one"]
    assert page.of("b")[0] == "Healthy" and page.of("p")[0] == "step 4 of 8, not ended"
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
    assert page.links == [] and page.scripts == 1, "everything is in the file"


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
    assert (page.links, page.scripts) == ([], 1) and bad in page.of("pre") and page.of("h1") == [bad]


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
    assert cells[cells.index("reward") + 1 :][:2] == ["0.5", "0.5"], "of step 4, which both have"
    views = [view_of("first", first), view_of("second", second)]
    differences = recipe_differences(views)
    assert differences.labels == ["first", "second"]
    assert differences.rows == [("actor.layout.tensor", ["1", "2"]), ("reference", ["null", "{...}"])]
    by_label = {row.label: row for row in compared(views)}
    assert by_label["reward"].best == [] and by_label["held-out accuracy, gsm8k"].values == [0.25, 0.25]
    write_page({"first": first, "again": first}, tmp_path / "same.html")
    same = Page((tmp_path / "same.html").read_text(encoding="utf-8"))
    assert "Nowhere but in their names." in same.of("p")


def test_the_better_one_is_marked_at_a_step_that_both_have(tmp_path: Path) -> None:
    longer, shorter = write_run(tmp_path / "longer", 8), write_run(tmp_path / "shorter", 4)
    lines = (shorter / "metrics.jsonl").read_text().replace('"reward/mean": 0.5', '"reward/mean": 0.625')
    (shorter / "metrics.jsonl").write_text(lines.replace('_time_ms": 4000.0', '_time_ms": 3000.0'))
    by_label = {row.label: row for row in compared([view_of("longer", longer), view_of("shorter", shorter)])}
    assert (by_label["reward"].values, by_label["reward"].best) == ([0.5, 0.625], [1])
    speed = by_label["milliseconds per step"]
    assert (speed.values, speed.best) == ([4000.0, 3000.0], [1])
    apart_in_steps = write_run(tmp_path / "apart", 4)
    (apart_in_steps / "metrics.jsonl").write_text('{"step": 9, "reward/mean": 0.875}\n')
    by_label = {row.label: row for row in compared([view_of("longer", longer), view_of("apart", apart_in_steps)])}
    assert (by_label["reward"].values, by_label["reward"].best) == ([1.0, 0.875], [])


def test_nothing_is_better_where_batches_differ(tmp_path: Path) -> None:
    runs = {
        name: write_run(tmp_path / name, steps, batch={"prompts_per_step": prompts})
        for name, steps, prompts in (("first", 4, 8), ("second", 8, 16))
    }
    views = [view_of(*run) for run in runs.items()]
    assert apart(views) == ["batch"] and not any(row.best for row in compared(views))
    write_page(runs, tmp_path / "both.html")
    page = Page((tmp_path / "both.html").read_text(encoding="utf-8"))
    assert any("No value is marked as better: the recipes differ in batch." in text for text in page.of("p"))


def test_changes_are_coloured_for_the_same_questions_alone(tmp_path: Path) -> None:
    view = view_of("one", write_run(tmp_path / "one"))
    assert {each.label for each in view.headlines if each.same_questions} == {"held-out accuracy, gsm8k"}


@pytest.mark.parametrize(
    ("mismatch", "level", "health"),
    [
        ([0.001] * 8, "good", "all rules of health hold"),
        ([0.5] * 8, "watch", "look at train/mismatch_kl"),
        ([0.5] * 6 + [0.001] * 2, "good", "all rules of health hold; 1 earlier warning passed"),
        ([0.001] * 7 + [None], "bad", "look at train/mismatch_kl"),
    ],
)
def test_the_verdict_is_that_of_the_rules_of_health(
    tmp_path: Path, mismatch: list[float | None], level: str, health: str
) -> None:
    folder = write_run(tmp_path / "one", 8)
    with (folder / "metrics.jsonl").open("a") as file:
        for step, value in enumerate(mismatch, start=1):
            file.write(json.dumps({"step": step, "train/kl": 0.0, "train/mismatch_kl": value}) + "\n")
    view = view_of("one", folder)
    assert (view.level, view.health) == (level, health)


def test_a_run_that_has_fallen_silent_is_in_trouble(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one")
    os.utime(folder / "metrics.jsonl", (0, 0))
    assert view_of("one", folder).level == "good", "a saved page is of no moment"
    silent = view_of("one", folder, live=True)
    assert silent.level == "bad" and silent.health.startswith("nothing written for ")
    assert view_of("done", write_run(tmp_path / "done", 8), live=True).level == "good"


@pytest.mark.parametrize(
    ("values", "bounds"),
    [([4e-13, 5e-13], (0.0, 1e-4)), ([1.0, 1.00001], (0.999955, 1.000055)), ([0.0, 1.0], (-0.05, 1.05))],
)
def test_an_axis_has_a_floor(values: list[float], bounds: tuple[float, float]) -> None:
    assert axis_bounds(values, 1e-4) == pytest.approx(bounds)


@pytest.mark.parametrize(
    "values", [[0.0], [5e-324, 1e-323], [-1e99, 1e99], [1.0, 1.0 + 2e-16], [1e-9] * 300, [3.0, -2.0]]
)
def test_any_finite_numbers_are_drawn_within_the_panel(values: list[float]) -> None:
    for panel in (*RL_PANELS, *MACHINE_PANELS):
        points = list(range(1, len(values) + 1)), values
        chart = chart_of(panel, {"a": points})
        places = [float(word) for pair in chart.lines[0].points.split() for word in pair.split(",")]
        assert all(0 <= place <= WIDTH for place in places)
        assert all(TOP - 1 <= place <= BOTTOM + 1 for place in places[1::2])
        assert json.loads(chart.lines[0].values)[-1][1] == len(values)


def test_a_recipe_that_has_changed_is_shown_with_its_steps_alone_and_beside_others(tmp_path: Path) -> None:
    changed = write_run(tmp_path / "changed", actor={"rate": 5e-7}, seed=3)
    for step, rate in ((40, 1e-6), (7, 2e-6)):
        earlier = {"name": "changed", "loop": "rl", "steps": 8, "seed": 3, "model": {"path": "models/some"}}
        (changed / f"recipe.until-step-{step}.yaml").write_text(yaml.safe_dump({**earlier, "actor": {"rate": rate}}))
    other = write_run(tmp_path / "other", actor={"rate": 5e-7})
    write_page({"changed": changed}, tmp_path / "alone.html")
    alone = Page((tmp_path / "alone.html").read_text(encoding="utf-8"))
    assert "Where the recipe has changed" in alone.of("h2")
    assert [label for label in alone.of("th") if "step" in label and label[-1].isdigit()] == [
        *("steps 1 to 7", "steps 8 to 40", "from step 41")
    ]
    cells = alone.of("td")
    assert cells[cells.index("actor.rate") + 1 :][:3] == ["2.0e-06", "1.0e-06", "5.0e-07"]
    differences = recipe_differences([view_of("changed", changed), view_of("other", other)])
    assert differences.labels == [f"changed {steps}" for steps in ("steps 1 to 7", "steps 8 to 40", "from step 41")] + [
        "other"
    ]
    assert differences.rows == [
        ("actor.rate", ["2.0e-06", "1.0e-06", "5.0e-07", "5.0e-07"]),
        ("seed", ["3", "3", "3", "1"]),
    ]
