"""Errors that a user can act on: one line that says what, where and what to do. Shown without a traceback."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input, described in one line; commands print it as ``error: ...`` and exit with status 2."""


class RecipeError(UserError):
    """A recipe that cannot be read, or that asks for something impossible."""
