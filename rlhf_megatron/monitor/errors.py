"""The error of this room. What is raised by recipes, data and the other rooms lives with them."""

from __future__ import annotations

from rlhf_megatron.recipe.errors import UserError


class MonitorError(UserError):
    """A tracker or a run folder cannot be used as asked; the message is one line that says what to do."""
