"""torchrun on hosts that are network namespaces: bytes between them against the plan, a pulled cable."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from end_to_end.commands import torchrun
from end_to_end.hosts import CABLE, Hosts, hosts_of
from end_to_end.runs import SUPERVISED, TRAIN, decisions, logged, make_model, make_sums, metrics_of, wait_for

STEPS = 100
RUN = (TRAIN, "sft.yaml", "name=pulled")
CHANGES = {
    "steps": STEPS,
    "checkpoint": {"save_interval": 5, "export_at_end": False},
    "retry": {"hang_seconds": 10, "hang_seconds_at_start": 300},
}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Return two hosts; skips where namespaces cannot be made."""
    with hosts_of(2) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with random weights, and data; both nodes see it."""
    path = tmp_path_factory.mktemp("nodes")
    (path / "sft.yaml").write_text(yaml.safe_dump(SUPERVISED | CHANGES))
    make_model(path, layers=1)
    make_sums(path, 60)
    return path


def over_the_cable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what ranks of several hosts need in their environment."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", CABLE)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


@pytest.mark.parametrize(
    ("count", "case"),
    [
        (2, "one host trains"),
        pytest.param(2, "stages on hosts", marks=pytest.mark.grid),
        pytest.param(2, "tensors over hosts", marks=pytest.mark.grid),
        pytest.param(4, "one host trains", marks=pytest.mark.grid),
    ],
)
def test_a_host_gets_each_byte_of_the_weights_once(
    count: int, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over_the_cable(monkeypatch)
    with hosts_of(count) as hosts, ExitStack() as stack:
        script = "tests/end_to_end/regather_on_hosts.py"
        ranks = 4 if count == 2 else 8
        commands = [
            stack.enter_context(hosts.start(host, tmp_path, ranks // count, script, str(tmp_path), case))
            for host in range(count)
        ]
        wait_for(commands[0], lambda: len(list(tmp_path.glob("ready-*"))) == ranks)
        before = hosts.sent()
        (tmp_path / "go").touch()
        wait_for(commands[0], lambda: len(list(tmp_path.glob("rank-*.json"))) == ranks)
        crossed = sum(hosts.sent()) - sum(before)
        for command in commands:
            command.finish().check()
    found = [json.loads(path.read_text()) for path in tmp_path.glob("rank-*.json")]
    assert all(each["equal"] for each in found)
    planned = sum(each["crossing"] for each in found)
    assert planned == pytest.approx(found[0]["planned"], rel=1e-6)
    assert crossed == pytest.approx(planned, rel=0.05)
    if case == "one host trains":  # each other host gets the model once, and not once for each of its ranks
        assert planned == (count - 1) * found[0]["whole"]


def test_a_cable_that_is_pulled_and_put_back_costs_a_restart_and_changes_no_number(
    hosts: Hosts, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torchrun(2, TRAIN, "sft.yaml", folder=folder) as command:
        command.finish().check()
    whole = metrics_of(folder / "runs" / "whole")
    assert sorted(whole) == list(range(1, STEPS + 1))

    over_the_cable(monkeypatch)
    run = folder / "runs" / "pulled"
    with hosts.start(0, folder, 1, *RUN, restarts=1) as first, hosts.start(1, folder, 1, *RUN, restarts=1) as second:
        wait_for(first, lambda: logged(run) > 11)
        hosts.plug(1, "down")
        wait_for(first, lambda: decisions(run)[-1]["what"] == "hang")
        hosts.plug(1, "up")
        assert [command.finish().status for command in (first, second)] == [0, 0]
    lines = decisions(run)
    assert [line["what"] for line in lines] == ["start", "hang", "restart", "resume", "done"]
    hang, restart, resume = lines[1:4]
    assert "said nothing" not in hang["why"], "the ranks of both nodes have told where they were"
    assert 0 < resume["step"] <= restart["step"] < STEPS
    assert metrics_of(run) == whole
