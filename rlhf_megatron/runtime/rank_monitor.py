"""Signs of life for the monitor that ft_launcher of nvidia-resiliency-ext has beside each rank.

The monitor kills a rank that is silent, which sees what no thread of the rank can: that the whole process stands still.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable

_SECONDS_FOR_AN_ANSWER = 5.0


def sign_of_life() -> Callable[[], None]:
    """Connects with this rank's monitor; what it returns tells the monitor that the rank lives.

    Does nothing where torchrun has started the rank. A monitor that is gone is no fault of the run.
    """
    if "FT_RANK_MONITOR_IPC_SOCKET" not in os.environ:
        return lambda: None
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
    from nvidia_resiliency_ext.fault_tolerance.rank_monitor_client import RankMonitorClientError

    monitor = RankMonitorClient()
    try:
        monitor.init_workload_monitoring()
    except (OSError, RankMonitorClientError) as error:
        print(f"warning: ft_launcher's monitor of this rank does not answer ({error})", file=sys.stderr, flush=True)
        return lambda: None
    monitor.rank_monitor_socket.settimeout(_SECONDS_FOR_AN_ANSWER)

    def send() -> None:
        with contextlib.suppress(RankMonitorClientError):
            monitor.send_heartbeat()

    return send
