"""The table of model families: what tests have measured is kept, and the page shows its files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import families

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
MEASURING = """
import pytest

TRAINED = {"compared": "trained", "model_type": "llama", "config": {"rope": {"factor": 8.0}}, "export": "bit-equal"}
ROLLED = {"compared": "rolled out", "model_type": "llama", "config": {"rope": {"factor": 8.0}}, "dtype": "bfloat16"}

TRIED = [("TP2", 2e-6), ("TP2", 3e-6), ("PP2 then CP2 sequence_parallel=True", 1e-6), ("CP2", 1.0)]

@pytest.mark.parametrize("layout, apart", TRIED)
def test_trained(layout, apart, record_property):
    record_property("measured", TRAINED | {"layout": layout, "logprobs": apart, "parameters": apart / 2})
    assert apart < 1e-5

def test_rolled_out(record_property):
    measured = ROLLED | {"layout": "one rank to TP2"}
    record_property("measured", measured)
    measured |= {"logprobs": 0.02, "median": 1e-3}

def test_refused(record_property):
    record_property("measured", ROLLED | {"layout": "one rank to one rank"})
    pytest.skip("vLLM does not read it")

def test_published(record_property):
    record_property("measured", {"compared": "published", "name": "Any 8B", "model_type": "llama", "logprobs": 4e-6})

def test_without_numbers():
    pass
"""


def test_what_tests_have_measured_is_one_table(tmp_path: Path) -> None:
    (tmp_path / "test_measuring.py").write_text(MEASURING)
    run = "import sys, pathlib, families, pytest; found = families.Measurements(pathlib.Path(sys.argv[1])); "
    run += "pytest.main(['-q', '-p', 'no:cacheprovider', sys.argv[2]], plugins=[found])"
    report = tmp_path / "models.json"
    subprocess.run(
        [sys.executable, "-P", "-c", run, str(report), "test_measuring.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    kept = json.loads(report.read_text())
    assert kept["failed"] == ["test_measuring.py::test_trained[CP2-1.0]"] and len(kept["rows"]) == 6
    families.draw(tmp_path)
    lines = (tmp_path / "models.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `llama`")]
    device = "CPU" if "no GPU" in kept["hardware"] else kept["hardware"].removeprefix("NVIDIA ")
    rolled = f"{device} bfloat16: one rank to TP2 2.0e-02 (median 1.0e-03), one rank not run (vLLM does not read it)"
    tried = "TP2 3.0e-06, PP2 then CP2 SP 1.0e-06"
    assert rows == [["`llama`", "rope.factor 8.0", "1.5e-06", rolled, "3.0e-06", "bit-equal", tried]]
    assert "| Any 8B | `llama` | 4.0e-06 |" in lines
    assert any("failed: test_measuring.py::test_trained[CP2-1.0]" in line for line in lines)


def test_the_page_shows_its_files() -> None:
    reports = [json.loads((RESULTS / name).read_text()) for name in families.FILES if (RESULTS / name).exists()]
    assert families.page(reports) == (RESULTS / "models.md").read_text()
