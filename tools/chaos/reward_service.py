"""A reward service for the fault campaign: python tools/chaos/reward_service.py PORT. Rewards follow from the text."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Handler that answers {"samples": [...]} with {"scores": [...]}."""

    def do_POST(self) -> None:
        """Score each sample by the length of its text."""
        samples = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["samples"]
        answer = json.dumps({"scores": [len(sample["solution_str"]) % 5 / 4 for sample in samples]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
