"""The error of this room: samples that cannot be scored, and reward functions that cannot be used."""

from __future__ import annotations

from rlhf_megatron.recipe.errors import UserError


class RewardError(UserError):
    """A reward that cannot be computed: one line that names the function or data source, the sample, and what to do."""
