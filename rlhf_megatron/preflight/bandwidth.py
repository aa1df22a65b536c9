"""Bandwidth between the ranks: an all-reduce over all of them, and echoes between neighbours. Sums and echoes are
checked, so a link that damages data is found too.

Which pairs are tried, and what the numbers mean, is pure; measuring happens in one function on every rank.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rlhf_megatron.preflight.check import Check
from rlhf_megatron.regather.transport import PointToPoint
from rlhf_megatron.runtime.ranks import named_ranks

Pair = tuple[int, int]
_LOW, _BAD = 0.7, 0.35  # of the bandwidth that the recipe expects
_SLOW_OF_ITS_KIND = 0.5  # of the median pair in a node, or between nodes
_REPEATS = 4
_CPU_BYTES, _GPU_BYTES = 1 << 23, 1 << 28
_PAIRS_SHOWN = 3
_ADVICE = "check the link and its settings (NCCL_DEBUG=INFO, NCCL_IB_HCA, nvidia-smi topo -m); leave the node out"


def neighbours(nodes: Sequence[int]) -> list[Pair]:
    """Return the pairs to try, lower rank first: a ring within each node, and rings over the nodes of ranks in equal
    places.

    ``nodes[rank]`` is the node of a rank. So every GPU's own way out of its node is used.
    """
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    rings = list(members.values())
    rings += [list(ring) for ring in itertools.zip_longest(*members.values())] if len(members) > 1 else []
    pairs: dict[Pair, None] = {}
    for ring in rings:
        there = [rank for rank in ring if rank is not None]
        for a, b in zip(there, [*there[1:], there[0]], strict=True):
            if a != b:
                pairs[min(a, b), max(a, b)] = None
    return list(pairs)


def rounds(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Return the pairs in as few rounds as come out when each is put into the first in which neither of its ranks is
    busy."""
    planned: list[list[Pair]] = []
    busy: list[set[int]] = []
    for pair in pairs:
        turn = next((index for index, ranks in enumerate(busy) if ranks.isdisjoint(pair)), len(busy))
        if turn == len(busy):
            planned.append([])
            busy.append(set())
        planned[turn].append(pair)
        busy[turn].update(pair)
    return planned


def measure(nodes: Sequence[int], progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure on this rank, together with all others; ``progress`` is told what comes next.

    Returns {"all_reduce": GB/s of bus bandwidth, "wrong": [what gave wrong data], "pairs": [[a, b, GB/s], ...]} with
    the pairs of this rank; GB are 10^9 bytes.
    """
    rank, gpu = dist.get_rank(), torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    elements = (_GPU_BYTES if gpu else _CPU_BYTES) // 4
    wrong: list[str] = []
    progress("all-reduce")
    bandwidth = _all_reduce(elements, device, wrong)
    pairs = []
    for stage in rounds(neighbours(nodes)):
        for pair in stage:
            if rank in pair:
                progress(f"pair {pair[0]}-{pair[1]}")
                pairs.append([*pair, _echo(pair, elements, device, wrong)])
    return {"all_reduce": bandwidth, "wrong": wrong, "pairs": pairs}


def _all_reduce(elements: int, device: torch.device, wrong: list[str]) -> float:
    """Return bus bandwidth in GB/s: bytes * 2 (n - 1) / n / seconds, as nccl-tests define it (doc/PERFORMANCE.md)."""
    world = dist.get_world_size()
    values = torch.full((elements,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(values)  # connects, and is checked
    if not bool((values == world * (world + 1) / 2).all()):
        wrong.append("all-reduce")
    values.zero_()
    seconds = _timed(lambda: dist.all_reduce(values))
    return values.nbytes * 2 * (world - 1) / world / seconds / 1e9


def _echo(pair: Pair, elements: int, device: torch.device, wrong: list[str]) -> float:
    """Return GB/s of one direction, from the lower rank's sending to the return of what it sent."""
    first = dist.get_rank() == pair[0]
    other, transport = pair[1] if first else pair[0], PointToPoint()
    generator = torch.Generator().manual_seed(pair[0])
    sent = torch.randint(0, 1 << 30, (elements,), generator=generator, dtype=torch.int32).to(device) if first else None
    values = torch.empty(elements, dtype=torch.int32, device=device)

    def pass_on(sends: Mapping[int, list[torch.Tensor]], receives: Mapping[int, list[torch.Tensor]]) -> None:
        for pending in transport.start(sends, receives):
            pending.wait()

    def there_and_back() -> None:
        if sent is not None:
            pass_on({other: [sent]}, {})
            pass_on({}, {other: [values]})
        else:
            pass_on({}, {other: [values]})
            pass_on({other: [values]}, {})

    there_and_back()
    if sent is not None and not torch.equal(sent, values):
        wrong.append(f"pair {pair[0]}-{pair[1]}")
    return 2 * values.nbytes / _timed(there_and_back) / 1e9


def _timed(work: Callable[[], object]) -> float:
    """Return median seconds of a few repeats, each to its end on the device."""
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


# ---- judging, on rank 0


def judge(
    answers: Mapping[int, Mapping[str, Any]], nodes: Sequence[int], hosts: Mapping[int, str], expected: float | None
) -> list[Check]:
    """Judge the measurements of all ranks.

    Args:
        answers: rank -> what ``measure`` returned; or {"stuck": where} or {"error": text} with "at": where.
        nodes: the node of each rank.
        hosts: names of the ranks' machines.
        expected: cluster.link_gb_per_sec, GB/s of one GPU to other nodes; compared where there are several nodes.
    """
    silent = sorted(set(range(len(nodes))) - set(answers))
    if silent:
        return [Check("links", "fail", f"{named_ranks(silent, hosts)} did not answer", _ADVICE)]
    broken = {rank: answer for rank, answer in answers.items() if "at" in answer}
    if broken:
        return [Check("links", "fail", _broken_text(broken, hosts), _ADVICE)]
    wrong = sorted({what for answer in answers.values() for what in answer["wrong"]})
    if wrong:
        return [Check("links", "fail", f"wrong data from {', '.join(wrong)}", "take these ranks' nodes out")]
    several = len(set(nodes)) > 1
    speeds: dict[Pair, float] = {}
    for answer in answers.values():
        for a, b, speed in answer["pairs"]:
            speeds[a, b] = min(speed, speeds.get((a, b), speed))
    slowest = min(answers, key=lambda rank: answers[rank]["all_reduce"])
    bandwidth = answers[slowest]["all_reduce"]
    seen = f"{bandwidth:.2f} GB/s bus bandwidth, slowest on {named_ranks([slowest], hosts)}"
    checks = [_against("all-reduce", bandwidth, expected if several else None, seen)]
    for name, between in (("pairs in a node", False), ("pairs between nodes", True)):
        kind = {pair: speed for pair, speed in speeds.items() if (nodes[pair[0]] != nodes[pair[1]]) == between}
        if kind:
            checks.append(_judge_pairs(name, kind, hosts, expected if between else None))
    return checks


def _broken_text(broken: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]) -> str:
    """Describe where ranks are stuck or failed. A pair whose ends both wait is the cause; others may wait for it."""
    where: dict[str, list[int]] = {}
    for rank, answer in broken.items():
        where.setdefault(answer["at"], []).append(rank)
    both = {location: ranks for location, ranks in where.items() if location.startswith("pair") and len(ranks) > 1}
    texts = [f"{named_ranks(ranks, hosts)} at {location}" for location, ranks in sorted((both or where).items())]
    errors = sorted({str(answer["error"]) for answer in broken.values() if answer.get("error")})
    return "no end: " + "; ".join(texts) + (f" ({errors[0]})" if errors else "")


def _judge_pairs(name: str, speeds: Mapping[Pair, float], hosts: Mapping[int, str], expected: float | None) -> Check:
    """Return the slowest pairs of a kind, against what is expected and against the median."""
    usual = statistics.median(speeds.values())
    slowest = sorted(speeds, key=lambda pair: speeds[pair])
    seen = f"{speeds[slowest[0]]:.2f} GB/s on {named_ranks(slowest[0], hosts)}, median {usual:.2f} of {len(speeds)}"
    check = _against(name, speeds[slowest[0]], expected, seen)
    slow = [pair for pair in slowest if speeds[pair] < _SLOW_OF_ITS_KIND * usual]
    if check.result != "ok" or not slow:
        return check
    listed = "; ".join(f"{speeds[pair]:.2f} on {named_ranks(pair, hosts)}" for pair in slow[:_PAIRS_SHOWN])
    more = f"; and {len(slow) - _PAIRS_SHOWN} more" if len(slow) > _PAIRS_SHOWN else ""
    return Check(name, "warn", f"{listed}{more}; median {usual:.2f} GB/s of {len(speeds)} pairs", _ADVICE)


def _against(name: str, bandwidth: float, expected: float | None, seen: str) -> Check:
    if expected is None:
        return Check(name, "ok", seen)
    seen += f", {expected:g} expected"
    if bandwidth >= _LOW * expected:
        return Check(name, "ok", seen)
    return Check(name, "warn" if bandwidth >= _BAD * expected else "fail", seen, _ADVICE)
