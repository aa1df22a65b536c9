"""Hosts that are network namespaces of this machine, each with one cable to a common bridge that tests pull.

    with hosts_of(4) as hosts:
        commands = [hosts.start(number, folder, 1, "launch/train.py", "recipe.yaml") for number in range(4)]

Their bytes are counted by the kernel, at both ends of each cable. No test lives here.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from end_to_end.commands import ROOT, Command

HEADERS = 14 + 20 + 32
CABLE = "link0"  # what each host calls its end


def run(tool: str, *arguments: str) -> str:
    """Return the output of a tool of iproute2."""
    return subprocess.run([tool, *arguments], check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class Hosts:
    """Namespaces, that of the bridge between them, and the addresses of their ends of their cables."""

    switch: str
    names: tuple[str, ...]
    addresses: tuple[str, ...]

    def plug(self, host: int, state: str) -> None:
        """Set a host's end of its cable up or down."""
        run("ip", "-n", self.names[host], "link", "set", CABLE, state)

    def shape(self, mbit: float | None, delay_ms: float = 0.0, loss: float = 0.0) -> None:
        """Limit every cable both ways; None: no longer. Delay and loss (of packets) need netem, else it skips."""
        ends = [(name, CABLE) for name in self.names] + [
            (self.switch, f"port{host}") for host in range(len(self.names))
        ]
        for name, device in ends:
            shaping = ["tc", "-n", name, "qdisc"]
            subprocess.run([*shaping, "del", "dev", device, "root"], check=False, capture_output=True)
            if delay_ms or loss:
                rate = ["rate", f"{mbit}mbit"] if mbit else []
                kind = ["netem", "delay", f"{delay_ms}ms", "loss", f"{100 * loss}%", *rate, "limit", "10000"]
            elif mbit:
                kind = ["tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "1s"]
            else:
                continue
            try:
                run(shaping[0], *shaping[1:], "add", "dev", device, "root", *kind)
            except (subprocess.CalledProcessError, FileNotFoundError) as error:
                reason = getattr(error, "stderr", str(error)).strip().splitlines()[0]
                pytest.skip(f"links cannot be shaped by {kind[0]} here: {reason}")

    def vanish(self, host: int, command: Command) -> float:
        """Pull a host's cable and kill all that runs on it; return the time."""
        self.plug(host, "down")
        at = time.time()
        for process in command.family():
            process.kill()
        command.finish()
        return at

    def sent(self) -> list[int]:
        """Return bytes that each host has sent, with all headers."""
        answers = (json.loads(run("ip", "-j", "-s", "-n", name, "link", "show", CABLE)) for name in self.names)
        return [answer[0]["stats64"]["tx"]["bytes"] for answer in answers]

    def sent_without_headers(self) -> int:
        """Return bytes that all hosts have sent, less 66 of each packet: headers of Ethernet, IPv4, and TCP with
        timestamps.

        A packet that the kernel has not cut for the cable counts once, with one header.
        """
        answers = (json.loads(run("ip", "-j", "-s", "-n", name, "link", "show", CABLE)) for name in self.names)
        counts = [answer[0]["stats64"]["tx"] for answer in answers]
        return sum(count["bytes"] - HEADERS * count["packets"] for count in counts)

    def start(
        self, host: int, folder: Path, ranks: int, script: str, *arguments: str, restarts: int = 0, ours: str = ""
    ) -> Command:
        """Start torchrun with so many ranks on a host, as docs/recovery.md shows it; the first host has the
        rendezvous. ``ours``: launch/torchrun.py, with more of --rdzv-conf."""
        launcher = [str(ROOT / "launch" / "torchrun.py")] if ours else ["-m", "torch.distributed.run"]
        launcher += [f"--nnodes={len(self.names)}", f"--nproc-per-node={ranks}"]
        launcher += [f"--max-restarts={restarts}", "--rdzv-backend=c10d", "--rdzv-id=cable"]
        # A namespace has no host name of its own by which torchrun could tell whether the rendezvous is its.
        launcher += [f"--rdzv-endpoint={self.addresses[0]}:29500", f"--rdzv-conf={ours or f'is_host={host == 0}'}"]
        launcher += [f"--local-addr={self.addresses[host]}", str(ROOT / script), *arguments]
        on_node = str(ROOT / "tests" / "end_to_end" / "on_node.py")
        return Command([sys.executable, "-P", on_node, self.names[host], *launcher], folder)


@contextlib.contextmanager
def hosts_of(count: int) -> Iterator[Hosts]:
    """Make so many hosts; skips where namespaces cannot be made."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and ip (package iproute2)")
    switch, *names = [f"{name}-{os.getpid()}" for name in ("switch", *(f"node{host}" for host in range(count)))]
    addresses = tuple(f"10.213.0.{host + 1}" for host in range(count))
    with contextlib.ExitStack() as stack:
        try:
            for name in (switch, *names):
                run("ip", "netns", "add", name)
                stack.callback(run, "ip", "netns", "del", name)
            run("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
            run("ip", "-n", switch, "link", "set", "bridge0", "up")
            for host, (name, address) in enumerate(zip(names, addresses, strict=True)):
                end = f"port{host}"
                run("ip", "link", "add", CABLE, "netns", name, "type", "veth", "peer", "name", end, "netns", switch)
                run("ip", "-n", switch, "link", "set", end, "master", "bridge0", "up")
                run("ip", "-n", name, "address", "add", f"{address}/24", "dev", CABLE)
                for device in ("lo", CABLE):
                    run("ip", "-n", name, "link", "set", device, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield Hosts(switch, tuple(names), addresses)
