"""torchrun for this project: python launch/torchrun.py ARGUMENTS OF TORCHRUN

A store has no authentication, torchrun unpickles what is in it, and torchrun alone has it listen on all interfaces.
Here it listens on the address of --rdzv-endpoint and --local-addr, or on 127.0.0.1 with --standalone.

Ranks that refuse their input (exit status 2) are not started again. What they have said stands alone, and the status
is 2. A node that hears nothing of the node of the rendezvous for ``--rdzv-conf lost_seconds=180`` ends.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import sys
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import run
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher import api

from rlhf_megatron.errors import UserError
from rlhf_megatron.runtime.command import INPUT_STATUS, command
from rlhf_megatron.runtime.rank_logs import FOLDER
from rlhf_megatron.runtime.rendezvous_watch import LOST_SECONDS, watch_rendezvous
from rlhf_megatron.topology.open_files import raise_file_limit
from rlhf_megatron.topology.store import serve_store
from rlhf_megatron.untrusted import reason_of, shown

LOOPBACK = "127.0.0.1"
MOST_RANKS = 1024  # of one machine
LOGGER = "torch.distributed.elastic.multiprocessing.api"


class Agent(LocalElasticAgent):
    """torchrun's agent, which starts no ranks again that would only say the same, or that no other node would meet."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.is_failed() and (refusal_in(result.failures) or self._others_have_ended()):
            self._remaining_restarts = 0
        return result

    def _others_have_ended(self) -> bool:
        try:
            return bool(self._worker_group.spec.rdzv_handler.is_closed())
        except RendezvousError:  # the store has gone with the node that served it
            return True


def refusal_in(failures: dict[int, ProcessFailure]) -> ProcessFailure | None:
    """Return the failure of a rank whose input is not right, and would not be right in another attempt."""
    for failure in failures.values():
        traits: Any = failure.error_file_data.get("errorTraits")
        may_pass = isinstance(traits, dict) and traits.get("retryability") == "True"
        if failure.exitcode == INPUT_STATUS and not may_pass:
            return failure
    return None


def is_news(record: logging.LogRecord) -> bool:
    """Return whether a record of torchrun's log says more than the ranks, or its own list of failures, do."""
    if str(record.msg).startswith("failed (exitcode") and isinstance(record.args, tuple):
        return record.args[:1] != (INPUT_STATUS,)
    return not str(record.msg).startswith("Sending process")  # to end with the first that failed


@command
def main() -> int:
    """Serve the store of the rendezvous, if it is on this machine, and do what torchrun does; return the status."""
    parser = run.get_args_parser()
    parser.error = refuse  # type: ignore[method-assign, assignment]
    options: argparse.Namespace = parser.parse_args()
    raise_file_limit()  # each rank has a connection to a store here
    try:
        store = serve_rendezvous(options)  # lives as long as torchrun, which takes it for the one that it asks for
        config, program, arguments = configured(options)
    except (ValueError, AssertionError) as error:
        raise error if isinstance(error, UserError) else UserError(f"torchrun: {reason_of(error)}") from error
    if store is None and config.rdzv_backend == "c10d":
        watch_rendezvous(*parse_rendezvous_endpoint(config.rdzv_endpoint, DEFAULT_PORT), lost_seconds_of(config))
    api.LocalElasticAgent = Agent  # type: ignore[misc]
    logging.getLogger(LOGGER).addFilter(is_news)
    try:
        api.elastic_launch(config, program)(*arguments)
    except ChildFailedError as error:
        return status_of(error)
    except SignalException as error:
        return 128 + int(error.sigval)
    except ValueError as error:  # of what torchrun looks at last
        raise UserError(f"torchrun: {reason_of(error)}") from error
    except RendezvousError as error:
        raise UserError(f"torchrun: the nodes do not meet, or one has ended ({shown(error)})") from error
    finally:
        del store
    return 0


def refuse(message: str) -> NoReturn:
    """Tell in one line what argparse complains of."""
    raise UserError(f"torchrun: {message}; --help tells what there is")


def serve_rendezvous(options: argparse.Namespace) -> dist.TCPStore | None:
    """Serve the store of the rendezvous where that is on this machine, and have torchrun use it."""
    nodes = run.parse_min_max_nnodes(options.nnodes)[1]
    if options.standalone and nodes > 1:
        raise UserError(f"--standalone is one node, and --nnodes={shown(options.nnodes)} would wait for more; give one")
    says_nothing = options.rdzv_backend == "static" and not options.rdzv_endpoint and options.master_port is None
    if options.standalone or (nodes == 1 and says_nothing):
        options.standalone, options.rdzv_id, options.local_addr = False, f"standalone-{os.getpid()}", LOOPBACK
        options.rdzv_backend, options.rdzv_endpoint = "c10d", f"{LOOPBACK}:0"
    store = None
    if options.rdzv_backend == "c10d":
        host, port = parse_rendezvous_endpoint(options.rdzv_endpoint, DEFAULT_PORT)
        store = serve_store(host, port, nodes)
    if store is not None:
        options.rdzv_conf = f"{options.rdzv_conf},is_host=1".strip(",")
        options.rdzv_endpoint = f"{host}:{store.port}"
    create = DynamicRendezvousHandler._create_tcp_store_server

    def create_on_one_address(handler: DynamicRendezvousHandler, address: str, port: int) -> dist.TCPStore:
        return serve_store(address, port, nodes) or create(handler, address, port)

    # The second store, which torchrun keeps for its ranks.
    DynamicRendezvousHandler._create_tcp_store_server = create_on_one_address  # type: ignore[assignment, method-assign]
    return store


def configured(options: argparse.Namespace) -> tuple[api.LaunchConfig, Any, list[str]]:
    """Return the launch that the options ask for; raises ValueError or AssertionError where they are not right."""
    ranks = run.determine_local_world_size(options.nproc_per_node)
    if not 1 <= ranks <= MOST_RANKS:
        raise UserError(f"--nproc-per-node={ranks}: must be from 1 to {MOST_RANKS}")
    unknown = [name for name in options.signals_to_handle.split(",") if name.strip() not in signal.Signals.__members__]
    if unknown:
        raise UserError(f"--signals-to-handle: there is no signal {shown(unknown[0], 40)}; name some such as SIGTERM")
    if not 0 < options.monitor_interval < math.inf:
        raise UserError(f"--monitor-interval={options.monitor_interval}: must be a time above 0")
    if ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun has it, after a banner
    if options.master_port is None:
        options.master_port = 29500
    return run.config_from_args(options)


def lost_seconds_of(config: api.LaunchConfig) -> float:
    """Return the seconds without an answer of the rendezvous after which its node is lost; raises UserError."""
    given = config.rdzv_configs.get("lost_seconds", LOST_SECONDS)
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UserError(f"--rdzv-conf: lost_seconds={shown(given, 40)}: must be a time above 0")
    return seconds


def status_of(error: ChildFailedError) -> int:
    """Tell which rank has failed first, unless a rank has told why it refuses its input; return the exit status."""
    refusal = refusal_in(error.failures)
    if refusal is None:
        print(error, file=sys.stderr)
        return 1
    said = refusal.message
    if FOLDER in os.environ and isinstance(said, dict):  # the ranks have told their logs
        print(said.get("message"), file=sys.stderr)
    return INPUT_STATUS


if __name__ == "__main__":
    sys.exit(main())
