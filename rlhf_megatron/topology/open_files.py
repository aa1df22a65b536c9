"""Files and sockets that a process may have open, against what joining a world of so many ranks needs.

Needs no torch, and nothing that is open already is counted.
"""

from __future__ import annotations

import resource

from rlhf_megatron.errors import UserError

# Weights, data, logs, libraries and the engine: what a rank of one GPU has open besides connections, with room.
_BESIDES_CONNECTIONS = 512
# At most one connection to each other rank in the world's group, and one in a team's or a role's own.
_CONNECTIONS_TO_A_RANK = 2
_ENOUGH = 1 << 16  # asked for wherever the hard limit allows, also for the store of torchrun, which each rank talks to
HOW_TO_RAISE = "raise the hard limit: ulimit -Hn, LimitNOFILE= of the service, or nofile in limits.conf"


def files_needed(ranks: int) -> int:
    """Return how many files and sockets a process of a world of ``ranks`` may come to have open."""
    return _BESIDES_CONNECTIONS + _CONNECTIONS_TO_A_RANK * (ranks - 1)


def raise_file_limit() -> int:
    """Raise this process's limit as far as it may, and the processes' that it starts; return what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return _ENOUGH if soft == resource.RLIM_INFINITY else soft


def check_file_limit(ranks: int) -> None:
    """Raise the limit, and UserError where that is not enough for a world of ``ranks``."""
    limit, needed = raise_file_limit(), files_needed(ranks)
    if limit < needed:
        raise UserError(
            f"a rank of {ranks} may have {needed:,} files and sockets open, and {limit:,} are allowed here; "
            f"{HOW_TO_RAISE}"
        )
