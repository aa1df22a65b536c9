"""A preflight: every check of a recipe on the ranks that are to run it, put together into one table on rank 0.

The checks stand in machine.py, agreement.py, bandwidth.py and file_checks.py; here is the order: each rank looks at
what it can see alone, rank 0 compares, and only when all have answered are links measured.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhf_megatron.monitor.run_folder import RunFolder
from rlhf_megatron.preflight import agreement, bandwidth, machine
from rlhf_megatron.preflight.check import (
    Check,
    NoAnswer,
    as_json,
    over_ranks,
    passed,
    print_table,
    run_check,
    within,
)
from rlhf_megatron.preflight.file_checks import (
    data_checks,
    judge_check,
    reward_check,
    tokenizer_check,
    trackers_check,
    turns_check,
    written_files,
)
from rlhf_megatron.preflight.rank_answers import RankAnswers, answers_of_torchrun
from rlhf_megatron.recipe import Recipe, UserError
from rlhf_megatron.runtime.ranks import named_ranks
from rlhf_megatron.topology.world import join_world

GRACE_SECONDS = 15.0  # beyond a rank's own time limit, before it counts as silent


def preflight(recipe: Recipe, seconds: float, json_file: Path | None = None, attempt: str | None = None) -> bool:
    """Check ``recipe`` on all ranks; rank 0 shows the table and writes ``json_file``. True where no check failed.

    Every process of torchrun calls it, before or after the world is joined; it joins the world if that is still to be
    done. Each of its two parts (what a rank sees alone, the links) has ``seconds``; a rank that does not answer in time
    is named. ``attempt`` as for ``answers_of_torchrun``. After a failure a thread may still hang in a collective: end
    the process by ``os._exit`` then.
    """
    answers = answers_of_torchrun(attempt)
    answers.give("place", {"host": socket.gethostname(), "node": int(os.environ.get("GROUP_RANK", "0"))})
    answers.give("alone", see_alone(recipe, answers.rank, answers.world, seconds))
    lead = _Lead(recipe, answers, seconds) if answers.rank == 0 else None
    if lead:
        lead.compare()
    nodes = answers.hear("nodes", 2 * (seconds + GRACE_SECONDS))
    if nodes:
        answers.give("links", see_links(nodes, seconds))
    if lead:
        return lead.conclude(json_file)
    return bool(answers.hear("verdict", 2 * (seconds + GRACE_SECONDS)))


# ---- on every rank


def see_alone(recipe: Recipe, rank: int, world: int, seconds: float) -> dict[str, Any]:
    """Run one rank's own checks: {"facts": ..., "checks": ...}, as JSON values, within ``seconds``."""
    deadline = time.monotonic() + seconds
    checks: list[Check] = []
    local_rank, local_world = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def run(name: str, work: Callable[[], Check | list[Check]]) -> None:
        checks.extend(run_check(name, deadline - time.monotonic(), work))

    facts: list[agreement.Facts] = []

    def describe() -> list[Check]:
        facts.append(agreement.facts(recipe))
        return []

    run("files", describe)
    run("open files", lambda: machine.open_files_check(world))
    run("gpu", lambda: machine.gpu_checks(local_rank))
    if local_rank == 0:  # one of each node speaks for it
        run("rdma", lambda: machine.rdma_check(recipe.slurm.network in ("infiniband", "roce")))
        run("disk", lambda: disk_check(recipe, local_world / world))
    if rank == 0:
        run("listen queue", lambda: machine.listen_check(world))
        run("trackers", lambda: trackers_check(recipe))
        run("rows", lambda: data_checks(recipe))
        run("tokenizer", lambda: tokenizer_check(recipe))
        run("rewards", lambda: reward_check(recipe))
        run("judge", lambda: judge_check(recipe))
        run("turns", lambda: turns_check(recipe))
    return {"facts": facts[0] if facts else None, "checks": checks}


def disk_check(recipe: Recipe, share: float) -> Check:
    """Return room and speed for the run's checkpoints and exports; ``share``: the part of each that this node
    writes."""
    return machine.disk_check(RunFolder(recipe.run_root, recipe.name).path, *written_files(recipe), share)


def see_links(nodes: Sequence[int], seconds: float) -> dict[str, Any]:
    """Measure the links within ``seconds``; else {"at": where this rank stands, "error": ...}.

    Joins the world first if that is still to be done, since that can fail as well.
    """
    stage = ["joining"]

    def work() -> dict[str, Any]:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # each thread has its own
        if not dist.is_initialized():
            join_world(timeout_minutes=2 * seconds / 60)
        return bandwidth.measure(nodes, lambda what: stage.__setitem__(0, what))

    try:
        measured: dict[str, Any] = within(seconds, work)
    except NoAnswer:
        return {"at": stage[0]}
    except Exception as error:
        return {"at": stage[0], "error": (str(error).strip().splitlines() or [type(error).__name__])[0]}
    return measured


# ---- on rank 0


class _Lead:
    """Rank 0's part: what all ranks saw, compared and shown."""

    def __init__(self, recipe: Recipe, answers: RankAnswers, seconds: float) -> None:
        self._recipe, self._answers, self._seconds = recipe, answers, seconds
        self._checks: list[Check] = []
        self._hosts: dict[int, str] = {}
        self._nodes: list[int] = []
        self._others: list[int] = []  # who have answered, and so will listen

    def compare(self) -> None:
        """Wait for all ranks, judge what each saw alone, and call for the measuring of links if all are there."""
        world = self._answers.world
        alone = self._answers.collect("alone", self._seconds + GRACE_SECONDS)
        identities = self._answers.collect("place", 0.0)
        self._hosts = {rank: identity["host"] for rank, identity in identities.items()}
        self._others = sorted(set(alone) - {self._answers.rank})
        silent = sorted(set(range(world)) - set(alone))
        if silent:
            seen = f"{named_ranks(silent, self._hosts)} did not answer within {self._seconds + GRACE_SECONDS:g} s"
            self._checks.append(Check("ranks", "fail", seen, "look at these processes and their machines"))
        else:
            self._nodes = [identities[rank]["node"] for rank in range(world)]
            count = len(set(self._nodes))
            self._checks.append(Check("ranks", "ok", f"{world} on {count} {'node' if count == 1 else 'nodes'}"))
        described = {rank: answer["facts"] for rank, answer in alone.items() if answer["facts"]}
        for fact in next(iter(described.values()), {}):
            seen_by = {rank: facts[fact] for rank, facts in described.items()}
            self._checks.append(agreement.agree(fact, seen_by, self._hosts))
        checks = {rank: [Check(*check) for check in answer["checks"]] for rank, answer in alone.items()}
        self._checks += over_ranks(checks, self._hosts)
        self._answers.announce("nodes", self._nodes if world > 1 else [])

    def conclude(self, json_file: Path | None) -> bool:
        """Judge the links, show and write everything, and tell the verdict to all."""
        if not self._nodes:
            self._checks.append(Check("links", "skipped", "not all ranks have answered"))
        elif len(self._nodes) == 1:
            self._checks.append(Check("links", "skipped", "one rank has none"))
        else:
            measured = self._answers.collect("links", self._seconds + GRACE_SECONDS)
            expected = self._recipe.cluster.link_gb_per_sec
            self._checks += bandwidth.judge(measured, self._nodes, self._hosts, expected)
        verdict = passed(self._checks)
        print_table(self._checks, f"preflight of {self._recipe.name}: {'passed' if verdict else 'failed'}", sys.stdout)
        try:
            self._write(json_file)
        finally:  # not before all is shown: the first rank that ends with a failure has torchrun end all others
            sys.stdout.flush()
            self._answers.announce("verdict", verdict)
            self._answers.wait_until_heard("verdict", self._others, GRACE_SECONDS)
        return verdict

    def _write(self, json_file: Path | None) -> None:
        if json_file is None:
            return
        about = {"recipe": self._recipe.name, "hosts": [self._hosts.get(r) for r in range(self._answers.world)]}
        try:
            json_file.write_text(as_json(self._checks, about), encoding="utf-8")
        except OSError as error:
            raise UserError(f"--json {json_file}: {error.strerror}; name a file that can be written") from error
