"""torchrun on two nodes: network namespaces of this machine, with a cable between them that a test can pull."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from end_to_end.commands import ROOT, Command, torchrun
from end_to_end.runs import SUPERVISED, TRAIN, decisions, logged, make_model, make_sums, metrics_of, wait_for

STEPS = 100
CHANGES = {
    "steps": STEPS,
    "checkpoint": {"save_interval": 5, "export_at_end": False},
    "retry": {"hang_seconds": 10, "hang_seconds_at_start": 300},
}


def ip(*arguments: str) -> None:
    """Runs ip, from iproute2."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@dataclass(frozen=True)
class Nodes:
    """Two namespaces and the addresses of their ends of the cable, which both call link0."""

    names: tuple[str, str]
    addresses: tuple[str, str]

    def plug(self, state: str) -> None:
        """Sets the cable's end at the second node up or down."""
        ip("-n", self.names[1], "link", "set", "link0", state)

    def start(self, node: int, folder: Path, *arguments: str) -> Command:
        """torchrun with one rank on a node, as docs/slurm.md shows it; the first node has the rendezvous."""
        launcher = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=1"]
        launcher += ["--rdzv-backend=c10d", f"--rdzv-endpoint={self.addresses[0]}:29500", "--rdzv-id=cable"]
        # A namespace has no host name of its own by which torchrun could tell whether the rendezvous is its.
        launcher += [f"--rdzv-conf=is_host={node == 0}", f"--local-addr={self.addresses[node]}"]
        launcher += [str(ROOT / TRAIN), "sft.yaml", *arguments]
        script = str(ROOT / "tests" / "end_to_end" / "on_node.py")
        return Command([sys.executable, "-P", script, self.names[node], *launcher], folder)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Two nodes; skips where namespaces cannot be made."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and ip (package iproute2)")
    names = (f"node0-{os.getpid()}", f"node1-{os.getpid()}")
    addresses = ("10.213.0.1", "10.213.0.2")
    with ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
            ip("link", "add", "link0", "netns", names[0], "type", "veth", "peer", "name", "link0", "netns", names[1])
            for name, address in zip(names, addresses, strict=True):
                ip("-n", name, "address", "add", f"{address}/24", "dev", "link0")
                for device in ("lo", "link0"):
                    ip("-n", name, "link", "set", device, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield Nodes(names, addresses)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, and data; both nodes see it."""
    path = tmp_path_factory.mktemp("nodes")
    (path / "sft.yaml").write_text(yaml.safe_dump(SUPERVISED | CHANGES))
    make_model(path, layers=1)
    make_sums(path, 60)
    return path


def test_a_cable_that_is_pulled_and_put_back_costs_a_restart_and_changes_no_number(
    nodes: Nodes, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torchrun(2, TRAIN, "sft.yaml", folder=folder) as command:
        command.finish().check()
    whole = metrics_of(folder / "runs" / "whole")
    assert sorted(whole) == list(range(1, STEPS + 1))

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "link0")
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    run = folder / "runs" / "pulled"
    with nodes.start(0, folder, "name=pulled") as first, nodes.start(1, folder, "name=pulled") as second:
        wait_for(first, lambda: logged(run) > 11)
        nodes.plug("down")
        wait_for(first, lambda: decisions(run)[-1]["what"] == "hang")
        nodes.plug("up")
        assert [command.finish().status for command in (first, second)] == [0, 0]
    lines = decisions(run)
    assert [line["what"] for line in lines] == ["start", "hang", "restart", "resume", "done"]
    hang, restart, resume = lines[1:4]
    assert "said nothing" not in hang["why"], "the ranks of both nodes have told where they were"
    assert 0 < resume["step"] <= restart["step"] < STEPS
    assert metrics_of(run) == whole
