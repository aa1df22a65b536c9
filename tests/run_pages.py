"""Run folders for tests of the page, and a reader of its HTML."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import yaml

VOID = {"meta", "br", "input"}


class Page(HTMLParser):
    """The texts of a page's elements, by their tag; fails where elements are not closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.links: list[str] = []
        self.scripts = 0
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action")]
        assert not any(name.startswith("on") for name, _ in attrs) and tag not in ("img", "iframe", "object", "link")
        self.scripts += tag == "script"
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


TEXTS = ["<b>", " four", "<|end|>"]


def kept(step: int, group: int, reward: float, **more: Any) -> dict[str, Any]:
    """Return a row of training as a run keeps it: two tokens of a prompt, three of the model."""
    differences = [0.0, 0.0, 0.001, -0.2, 0.7]
    row = {
        "step": step,
        "row_id": group,
        "prompt": f"question {group}?",
        "response": "".join(TEXTS),
        "data_source": "sums" if group % 2 else "words",
        "ground_truth": "4",
        "reward": reward,
        "truncated": False,
        "advantage": reward - 0.5,
        "sampled_tokens": 3 + group,
        "token_texts": ["q", "?", *TEXTS],
        "sampled": [False, False, True, True, True],
        "rollout_logprobs": [0.0, 0.0, -1.0, -1.0, -1.0],
        "trainer_logprobs": [0.0, 0.0, -0.999, -1.2, -0.3],
        "logprob_differences": differences,
        "advantages": [0.0, 0.0, 1.0, 1.0, 1.0],
    }
    return row | more


def write_rows(folder: Path, step: int, rows: list[dict[str, Any]]) -> Path:
    path = folder / "rollouts" / f"step-{step}.parquet"
    path.parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path
