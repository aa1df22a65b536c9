"""The error of this room: rows, files and tokenizers that cannot be used. Recipe errors live in recipe/."""

from __future__ import annotations

from rlhf_megatron.recipe.errors import UserError


class DataError(UserError):
    """Bad training data or a bad tokenizer: one line that names file, row and column, and says what to do."""
