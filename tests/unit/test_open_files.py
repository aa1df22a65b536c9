"""Limits of open files: the limit is raised before ranks connect, and a run that cannot work is refused."""

from __future__ import annotations

import multiprocessing
import resource
from pathlib import Path

import pytest

from rlhf_megatron.errors import UserError
from rlhf_megatron.preflight import machine
from rlhf_megatron.topology.open_files import check_file_limit, files_needed, raise_file_limit


def limited(hard: int) -> str:
    """Return the message of a process of so low limits about 1,024 ranks."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        check_file_limit(1024)
    except UserError as error:
        check = machine.open_files_check(1024)
        return f"{check.result}, {check.advice}; {error}"
    assert machine.open_files_check(1024).result == "ok"
    return str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def test_the_limit_is_raised_or_the_start_refused() -> None:
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as processes:
        enough, too_low = processes.map(limited, [4096, 2000], chunksize=1)
    assert enough == "4096"
    assert too_low.startswith("fail, raise the hard limit: ulimit -Hn")
    assert "a rank of 1024 may have 2,558 files and sockets open, and 2,000 are allowed" in too_low
    assert "\n" not in too_low


def test_a_limit_that_is_high_stays() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert raise_file_limit() >= min(before[0], 1 << 16)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= before[0]
    assert files_needed(1) < 1024 < files_needed(1024) < files_needed(8192) < 1 << 16


@pytest.mark.parametrize(("limit", "ranks", "result"), [("128", 64, "ok"), ("128", 1024, "warn"), ("", 8, "skipped")])
def test_the_queue_of_a_store(tmp_path: Path, limit: str, ranks: int, result: str) -> None:
    path = tmp_path / "somaxconn"
    path.write_text(limit + "\n")
    check = machine.listen_check(ranks, path)
    assert check.result == result
    assert check.result != "warn" or check.advice == "sysctl -w net.core.somaxconn=1024"
