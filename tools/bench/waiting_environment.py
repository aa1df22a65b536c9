"""A simulated environment: it answers each turn after the seconds that its row says, as a slow tool does."""

from __future__ import annotations

import asyncio
from typing import Any


class Environment:
    """Turns without rewards, up to as many as there are waits."""

    def reset(self, row: dict[str, Any]) -> None:
        """Take the waits of the row."""
        self.waits = list(row["extra_info"]["waits"])

    async def step(self, action: str) -> tuple[str, float, bool]:
        """Wait, and answer with as many digits as a tool's result has."""
        await asyncio.sleep(self.waits.pop(0))
        return "0123456789" * 6, 0.0, not self.waits
