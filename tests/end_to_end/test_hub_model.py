"""A run of two ranks by a model's name on the hub, which sends the last of its files late, or not at all."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import yaml

from end_to_end.commands import ROOT, Command
from end_to_end.runs import SUPERVISED, TRAIN, make_model, make_sums, metrics_of, on_two_ranks, wait_for
from hub_server import cached_files, hub
from unit.test_hub import environment_of
from unit.test_hub_arrival import LAST, in_three_files

FIRST = "model-1-of-3.safetensors"
KEYS = ("model.path=me/tiny", "retry.network.max_retries=0")


def has_read(command: Command, rank: int, home: Path) -> bool:
    """Return whether a rank has all of the first file in the memory that it maps."""
    try:
        maps = command.rank(rank).memory_maps()
    except LookupError:
        return False
    blobs = {str(path.resolve()) for path in cached_files(home, FIRST)}
    return any(each.path in blobs and each.rss >= each.size for each in maps)


def test_ranks_read_while_the_hub_sends_and_end_where_it_does_not(tmp_path: Path) -> None:
    make_model(tmp_path, 2)
    make_sums(tmp_path, 64)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(SUPERVISED | {"steps": 2}))
    on_two_ranks(tmp_path, "recipe.yaml")("name=local").check()
    with hub() as server:
        served = server.add("models/me/tiny", in_three_files(tmp_path / "model"))
        environment = environment_of(server, tmp_path / "hf") | {
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DOWNLOAD_TIMEOUT": "300",
        }
        launcher = [sys.executable, "-P", str(ROOT / "launch/torchrun.py"), "--standalone", "--nproc-per-node=2"]

        def train(*keys: str) -> Command:
            command = [*launcher, str(ROOT / TRAIN), "recipe.yaml", *KEYS, *keys]
            return Command(command, tmp_path, warm=False, environment=environment)

        served.failing.add(LAST)
        with train("name=named") as command:
            refused = command.finish()
        assert "error: model.path: me/tiny@" in refused.only_error() and "the hub fails" in refused.only_error()
        assert '"kind": "network"' in (tmp_path / "runs/named/recovery.jsonl").read_text()
        served.failing.clear()
        served.held[LAST] = threading.Event()
        with train("name=named") as command:
            wait_for(command, lambda: all(has_read(command, rank, tmp_path / "hf") for rank in range(2)))
            assert not cached_files(tmp_path / "hf", LAST)
            served.held[LAST].set()
            command.finish().check()
        assert server.downloads().count(FIRST) == 1
    named, local = metrics_of(tmp_path / "runs/named"), metrics_of(tmp_path / "runs/local")
    assert len(local) == 2 and named == local
