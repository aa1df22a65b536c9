"""Measures exchanges of a step over links of a known rate, against the expectation of planning/step_terms.py.

    python tools/bench/shaped_links.py [--mbit 200] [--output docs/results/shaped_links.json]   # as root

Two to four processes, each in a network namespace of its own behind a link that tc shapes, with gloo. Timings are given
as ratios, measured over expected: the bytes that the fullest rank has to receive, at the link's rate. Namespaces and
links go when it ends. Where they cannot be made it says why, and ends with status 0.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from reports import write_report

from rlhf_megatron.planning.step_terms import NUMBER_BYTES, TOKEN_BYTES

BRIDGE, PREFIX, NETWORK = "rlhfbr", "rlhfns", "10.231.77"
ROWS, TOKENS = 16_384, 400_000  # of all ranks: rows, whose numbers go to all; tokens of one rank's rows
PARAMETERS = 1_000_000


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mbit", type=int, default=200, help="of each link, per second (default: %(default)s)")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        return of_rank(options.rank, options.processes[0], options.repeats, options.output)
    if not shutil.which("ip") or not shutil.which("tc"):
        print("skipped: needs ip and tc of iproute2")
        return 0
    rows = []
    for count in options.processes:
        try:
            make_links(count, options.mbit)
            seconds_of = run(count, options.repeats)
        except subprocess.CalledProcessError as error:
            print(f"skipped: {' '.join(error.cmd)}: status {error.returncode}; network namespaces need root")
            return 0
        finally:
            remove_links(count)
        for name, seconds in seconds_of.items():
            expected = 8 * expected_bytes(name, count) / (options.mbit * 1e6)
            measured = statistics.median(seconds)
            rows.append({"processes": count, "exchange": name, "expected": expected, "measured": measured})
            print(f"{count} processes, {name}: {measured:.3f} s, {measured / expected:.2f} of the expected")
    if options.output:
        write_report(options.output, {"settings": {"mbit": options.mbit, "repeats": options.repeats}, "rows": rows})
    return 0


def expected_bytes(name: str, ranks: int) -> float:
    """Return bytes that a rank receives in an exchange, by the formulas of planning."""
    away = (ranks - 1) / ranks
    return {
        "numbers": 2 * NUMBER_BYTES * ROWS * away,
        "rows": TOKEN_BYTES * TOKENS * away,
        "gradients": 2 * 4 * PARAMETERS * away,
    }[name]


def make_links(count: int, mbit: int) -> None:
    """Make a bridge, and for each process a namespace with a link to it, shaped at both ends."""
    command(f"ip link add {BRIDGE} type bridge")
    command(f"ip link set {BRIDGE} up")
    for rank in range(count):
        space = f"{PREFIX}{rank}"
        command(f"ip netns add {space}")
        command(f"ip link add rlhfh{rank} type veth peer name rlhfn{rank}")
        command(f"ip link set rlhfn{rank} netns {space}")
        command(f"ip link set rlhfh{rank} master {BRIDGE} up")
        command(f"ip -n {space} addr add {NETWORK}.{rank + 1}/24 dev rlhfn{rank}")
        command(f"ip -n {space} link set rlhfn{rank} up")
        command(f"ip -n {space} link set lo up")
        command(f"tc qdisc add dev rlhfh{rank} root tbf rate {mbit}mbit burst 256kb latency 1s")
        command(f"ip netns exec {space} tc qdisc add dev rlhfn{rank} root tbf rate {mbit}mbit burst 256kb latency 1s")


def remove_links(count: int) -> None:
    """Remove what there is of them."""
    for rank in range(count):
        subprocess.run(["ip", "netns", "del", f"{PREFIX}{rank}"], check=False, stderr=subprocess.DEVNULL)
    subprocess.run(["ip", "link", "del", BRIDGE], check=False, stderr=subprocess.DEVNULL)


def command(text: str) -> None:
    """Run it; raises CalledProcessError where it fails."""
    subprocess.run(text.split(), check=True, stderr=subprocess.DEVNULL)


def run(count: int, repeats: int) -> dict[str, list[float]]:
    """Return seconds of each exchange, by the first rank."""
    arguments = [f"--processes={count}", f"--repeats={repeats}"]
    processes = [
        subprocess.Popen(
            ["ip", "netns", "exec", f"{PREFIX}{rank}", sys.executable, __file__, f"--rank={rank}", *arguments],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    outputs = [process.communicate()[0] for process in processes]
    for process in processes:
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, ["a rank"])
    seconds_of: dict[str, list[float]] = json.loads(outputs[0].splitlines()[-1])
    return seconds_of


def of_rank(rank: int, count: int, repeats: int, _: Path | None) -> int:
    """Take part in the exchanges, and print their seconds."""
    import os

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = f"rlhfn{rank}"
    dist.init_process_group("gloo", init_method=f"tcp://{NETWORK}.1:29511", rank=rank, world_size=count)
    table = torch.zeros(ROWS, NUMBER_BYTES // 8, dtype=torch.float64)
    gradients = torch.zeros(PARAMETERS)
    share = torch.zeros(TOKENS * TOKEN_BYTES // count, dtype=torch.uint8)
    arriving = [torch.empty_like(share) for _ in range(count)]

    def rows() -> None:
        peers = [peer for peer in range(count) if peer != rank]
        operations = [dist.P2POp(dist.isend, share, peer) for peer in peers]
        operations += [dist.P2POp(dist.irecv, arriving[peer], peer) for peer in peers]
        for request in dist.batch_isend_irecv(operations):
            request.wait()

    seconds_of: dict[str, list[float]] = {}
    exchanges = {
        "numbers": lambda: dist.all_reduce(table),
        "rows": rows,
        "gradients": lambda: dist.all_reduce(gradients),
    }
    for name, exchange in exchanges.items():
        for _repeat in range(repeats + 1):
            dist.barrier()
            began = time.perf_counter()
            exchange()
            dist.barrier()
            seconds_of.setdefault(name, []).append(time.perf_counter() - began)
    print(json.dumps({name: seconds[1:] for name, seconds in seconds_of.items()}))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
