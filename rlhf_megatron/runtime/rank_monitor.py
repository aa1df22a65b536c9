"""Signs of life for the monitor that ft_launcher of nvidia-resiliency-ext has beside each rank.

The monitor kills a rank that is silent, which sees what no thread of the rank can: that the whole process stands still.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

_SECONDS_FOR_AN_ANSWER = 5.0


def give_signs_of_life(every_seconds: float) -> None:
    """Tell this rank's monitor from now on that the rank lives; does nothing where torchrun has started the rank.

    In a thread of its own, since a monitor that does not answer must hold nothing up. One that is gone is no fault of
    the run.
    """
    if "FT_RANK_MONITOR_IPC_SOCKET" in os.environ:
        threading.Thread(target=_give, args=(every_seconds,), name="signs of life", daemon=True).start()


def _give(every_seconds: float) -> None:
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
    from nvidia_resiliency_ext.fault_tolerance.rank_monitor_client import RankMonitorClientError

    monitor = RankMonitorClient()
    try:
        monitor.init_workload_monitoring()
    except (OSError, RankMonitorClientError) as error:
        print(f"warning: ft_launcher's monitor of this rank does not answer ({error})", file=sys.stderr, flush=True)
        return
    monitor.rank_monitor_socket.settimeout(_SECONDS_FOR_AN_ANSWER)
    while True:
        with contextlib.suppress(RankMonitorClientError):
            monitor.send_heartbeat()
        time.sleep(every_seconds)
