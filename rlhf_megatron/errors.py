"""Errors that a user can act on: one line that says what, where and what to do. Shown without a traceback."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rlhf_megatron.redaction import hide_secrets


class UserError(ValueError):
    """Bad input, described in one line; commands print it as ``error: ...`` and exit with status 2."""

    def __str__(self) -> str:
        """Return the line without secrets, which a recipe's value or a server's answer may bring into it."""
        return hide_secrets(super().__str__())

    is_transient = False
    """True if another attempt with the same input may do, as where a service was away; see ``is_transient``."""
    is_of_node = False
    """True if the node's ranks end by it without a word to those of other nodes, which may have hours to go on."""


def is_transient(error: BaseException) -> bool:
    """Return whether an error, or one that it was raised from, says that another attempt may do."""
    chain: BaseException | None = error
    while chain is not None:
        if getattr(chain, "is_transient", False):
            return True
        chain = chain.__cause__
    return False


def errors_of(checks: Iterable[Callable[[], object]]) -> list[UserError]:
    """Make every check, and return what those that fail raise; where the first would do, call them one by one."""
    errors = []
    for check in checks:
        try:
            check()
        except UserError as error:
            errors.append(error)
    return errors


class RecipeError(UserError):
    """A recipe that cannot be read, or that asks for something impossible."""


class ModelError(UserError):
    """A model folder that is missing, damaged or of a kind that is not supported."""


class DataError(UserError):
    """Bad training data or a bad tokenizer: one line that names file, row and column, and says what to do."""


class CheckpointError(UserError):
    """A checkpoint that cannot be used, with the file and the reason."""


class ForeignCheckpoint(CheckpointError):
    """A sound checkpoint of another model or another kind of run, as the older ones beside it will be."""


class RolloutError(UserError):
    """A request or a setting that the rollout engine cannot carry out."""


class RewardError(UserError):
    """A reward that cannot be computed: one line that names the function or data source, the sample, and what to do."""


class TransientRewardError(RewardError):
    """A reward that another attempt may compute, as where a service was away for longer than its tries last."""

    is_transient = True


class MonitorError(UserError):
    """A tracker or a run folder that cannot be used as asked; the line says what to do."""
