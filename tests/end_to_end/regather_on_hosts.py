"""A rank of a regathering between hosts, for tests under torchrun: python regather_on_hosts.py FOLDER CASE.

Each of CASES is (layout of the trainer on the first ranks, ranks of a replica). A rank waits until FOLDER has the
file ``go``, regathers TIMES times, checks every bit, and writes what its plan says to FOLDER. No test lives here.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rlhf_megatron.models.rectangles import elements
from rlhf_megatron.regather.execute import Regather
from rlhf_megatron.regather.plan import plan_regather
from rlhf_megatron.regather.shard_specs import rollout_shards, trainer_shards
from rlhf_megatron.regather.traffic import host_traffic
from rlhf_megatron.topology.layout import Layout
from rlhf_megatron.topology.world import hosts_of_ranks, join_world, leave_world
from shards import architecture, checkpoint, filled

CASES = {
    "one host trains": (Layout(2), 1),
    "stages on hosts": (Layout(1, 2, 2), 1),
    "tensors over hosts": (Layout(4), 2),
}
TIMES = 3


def main(folder: Path, case: str) -> None:
    join_world()
    rank, hosts = dist.get_rank(), hosts_of_ranks()
    layout, tensor = CASES[case]
    a = architecture(tied=False, vocabulary=40_000)
    sources, wanted = trainer_shards(a, layout, range(layout.size)), rollout_shards(a, tensor, range(len(hosts)))
    plan = plan_regather(sources, wanted, rank, hosts)
    tensors = checkpoint(a)
    held, expected = (filled(side.blocks(rank), tensors) for side in (sources, wanted))
    targets = {name: torch.full_like(value, torch.nan) for name, value in expected.items()}
    regather = Regather(plan, torch.float32, "cpu")
    dist.barrier()
    (folder / f"ready-{rank}").touch()
    while not (folder / "go").exists():
        time.sleep(0.05)
    for _ in range(TIMES):
        regather.run(held, targets)
    dist.barrier()
    equal = all(torch.equal(targets[name], value) for name, value in expected.items())
    crossing = 4 * sum(copy.elements for copy in plan.receives if hosts[copy.source] != hosts[rank])
    found = {
        "host": hosts[rank],
        "equal": equal,
        "crossing": crossing * TIMES,
        "planned": 4 * TIMES * host_traffic(sources, wanted, hosts).between_hosts,
        "whole": 4 * TIMES * sum(elements(block.region) for block in wanted.blocks(rank)),
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    leave_world()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
