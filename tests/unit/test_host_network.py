"""Counters of a host's network, and a step's metrics by phase from them."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from rlhf_megatron.runtime.host_network import MB, HostNetwork, bytes_carried


def device(root: Path, name: str, sent: int, received: int, physical: bool = False) -> None:
    """Add a line to /proc/net/dev, in its form."""
    lines = root / "net" / "dev"
    lines.parent.mkdir(exist_ok=True)
    if not lines.exists():
        lines.write_text("Inter-|   Receive |  Transmit\n face |bytes packets errs\n")
    zeros = "0 " * 7
    with lines.open("a") as file:
        file.write(f"{name:>6}: {received} {zeros} {sent} {zeros}\n")
    if physical:
        (root / "net" / name / "device").mkdir(parents=True, exist_ok=True)


def port(root: Path, name: str, sent_words: int, received_words: int) -> None:
    counters = root / "infiniband" / name / "ports" / "1" / "counters"
    counters.mkdir(parents=True, exist_ok=True)
    (counters / "port_xmit_data").write_text(f"{sent_words}\n")
    (counters / "port_rcv_data").write_text(f"{received_words}\n")


def test_a_containers_only_device_counts_and_the_loopback_does_not(tmp_path: Path) -> None:
    device(tmp_path, "lo", 10**9, 10**9)
    device(tmp_path, "veth0", 100, 50)
    assert bytes_carried(tmp_path, tmp_path) == (100, 50)


def test_physical_devices_count_and_not_what_is_made_of_them(tmp_path: Path) -> None:
    device(tmp_path, "eth0", 100, 50, physical=True)
    device(tmp_path, "bond0", 100, 50)
    port(tmp_path, "mlx5_0", 1000, 500)
    assert bytes_carried(tmp_path, tmp_path) == (100 + 4 * 1000, 50 + 4 * 500), "InfiniBand counts words of four bytes"


def test_this_machines_own_counters_are_read() -> None:
    assert min(bytes_carried(Path("/proc/self"), Path("/sys/class"))) >= 0


def test_one_host_has_no_metrics(tmp_path: Path) -> None:
    network = HostNetwork({"GROUP_WORLD_SIZE": "1"}, tmp_path, tmp_path)
    with network.phase("update"):
        pass
    assert network.metrics({"update": 1.0}, 1.0, 10) == {}


def test_phases_have_what_was_carried_beside_the_plan(tmp_path: Path) -> None:
    device(tmp_path, "eth0", 0, 0, physical=True)
    network = HostNetwork({"GROUP_WORLD_SIZE": "2"}, tmp_path, tmp_path)
    network.planned = lambda tokens: {"update": (tokens * MB, 0.5)}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    try:
        network.begin()
        with network.phase("update"):
            device(tmp_path, "eth1", 4 * MB, 8 * MB, physical=True)
            threading.Event().wait(1.0)
        with network.phase("sleep"):
            pass
        found = network.metrics({"update": 100.0, "sleep": 1.0}, 101.0, 7)
    finally:
        network.close()
        dist.destroy_process_group()
    rate = found["network/link_mb_per_sec"]
    assert 0 < rate <= 8 / 0.2 * 1.01
    assert found["network/update_mb"] == 8 and found["network/update_planned_mb"] == 7
    assert found["network/update_seconds"] == pytest.approx(8 / rate)
    assert found["network/update_planned_seconds"] == 0.5
    assert found["network/busy_fraction"] == pytest.approx(8 / rate / 101.0)
    assert "network/sleep_mb" not in found
