"""Serve the page of a run while it goes on, or of several beside each other.

    rlhf-megatron watch runs/one
    rlhf-megatron watch runs/one baseline=runs/other --port 8700

Prints the address, which has the token that opens the page. It listens on this machine alone: from elsewhere use
``ssh -L 8700:127.0.0.1:8700 HOST``. A token of your own comes from RLHF_MEGATRON_PAGE_TOKEN.
"""

from __future__ import annotations

import sys

from rlhf_megatron.errors import MonitorError
from rlhf_megatron.monitor.access import is_loopback
from rlhf_megatron.monitor.page_server import Pages, PageServer, listening_socket, page_token, url_of
from rlhf_megatron.monitor.run_choice import runs_by_label
from rlhf_megatron.runtime.command import ArgumentParser, command

PORT = 8700
MOST_RUNS = 8


@command
def main(arguments: list[str] | None = None) -> int:
    """Serve until it is interrupted; return the exit status, 2 for input that is not right."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder, or NAME=PATH")
    parser.add_argument("--address", default="127.0.0.1", help="to listen on (default: 127.0.0.1, this machine alone)")
    parser.add_argument("--port", type=int, default=PORT, help=f"default: {PORT}; 0: any that is free")
    options = parser.parse_args(arguments)
    with server_of(options.runs, options.address, options.port) as server:
        print(url_of(options.address, server.server_port, server.token), flush=True)
        if not is_loopback(options.address):
            print("warning: not encrypted: whoever can listen on the network can read the token", flush=True)
        server.serve_forever()
    return 0


def server_of(runs: list[str], address: str, port: int) -> PageServer:
    """Return a server of run folders that listens; raises MonitorError where there is no such folder or port."""
    files = runs_by_label(runs)
    if len(files) > MOST_RUNS:
        raise MonitorError(f"watch: {len(files)} runs; at most {MOST_RUNS} are shown beside each other")
    for file in files.values():
        folder = file.parent if file.name == "metrics.jsonl" else file
        if not folder.is_dir():
            raise MonitorError(f"{folder}: there is no such folder; give the folder of a run")
    folders = {label: file.parent for label, file in files.items()}
    return PageServer(Pages(folders), page_token(), listening_socket(address, port, "--port"))


if __name__ == "__main__":
    sys.exit(main())
