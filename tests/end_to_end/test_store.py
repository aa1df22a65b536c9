"""launch/torchrun.py: no port of a job can be reached from another machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from end_to_end.commands import ROOT, Command

LISTENING = """
import json, os, psutil
import torch.distributed as dist
from rlhf_megatron.topology.world import join_world, leave_world

join_world()
value = [None, None]
dist.all_gather_object(value, os.environ["MASTER_PORT"])
connections = [each for id in (os.getpid(), os.getppid()) for each in psutil.Process(id).net_connections("tcp")]
addresses = [each.laddr for each in connections if each.status == psutil.CONN_LISTEN]
with open(f"rank-{dist.get_rank()}.json", "w") as file:
    json.dump([sorted({each.ip for each in addresses}), value[0], [str(each.port) for each in addresses]], file)
dist.barrier()
leave_world()
"""


@pytest.mark.parametrize("own_store", [False, True])
def test_a_job_listens_on_the_address_of_its_rendezvous_only(
    own_store: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torchrun's store, and with one that rank 0 makes for each attempt."""
    (tmp_path / "listening.py").write_text(LISTENING)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", str(int(own_store)))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    where = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    where = where if own_store else ["--standalone"]
    command = [sys.executable, "-P", str(ROOT / "launch" / "torchrun.py"), *where, "--nproc-per-node=2", "listening.py"]
    with Command(command, tmp_path) as torchrun:
        finished = torchrun.finish()
    assert finished.status == 0, finished.err
    for rank in (0, 1):
        addresses, port_of_store, ports = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert addresses == ["127.0.0.1"]
        assert not own_store or rank or port_of_store in ports, "the attempt's own store"
