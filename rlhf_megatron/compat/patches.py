"""Patches of libraries, each with the versions that it was run with.

Those of a whole process are applied once (``patch``), those of a block or of an engine each time (``replacement``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from packaging.version import Version

from rlhf_megatron.compat.private_names import missing_of_installed

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
NONE_FOUND = "none found"
"""In place of an address, where a search of the library's issues and pull requests found nothing about it."""


@dataclasses.dataclass(frozen=True)
class Patch:
    """A change of a library in this process.

    Attributes:
        packages: names of the distribution, of which one is installed.
        first: the oldest version that it was run with.
        last: the newest one.
        why: what goes wrong without it.
        upstream: where it is discussed, an URL, or ``NONE_FOUND``.
        apply: makes the change.
    """

    packages: tuple[str, ...]
    first: str
    last: str
    why: str
    upstream: str
    apply: Callable[..., Any]

    @property
    def name(self) -> str:
        """Name of the function that makes the change."""
        return self.apply.__name__


class ProcessPatch(Patch):
    """A change for the rest of the process; call it to apply it, which it does once."""

    def __call__(self) -> None:
        """Apply the change, unless that has been done; warn where the version is none that it was run with."""
        _apply_once(self)


PATCHES: list[Patch] = []
"""All patches whose modules have been imported."""


def patch(
    *packages: str, first: str, last: str, why: str, upstream: str
) -> Callable[[Callable[[], None]], ProcessPatch]:
    """Make a function without arguments a ``ProcessPatch``; see the attributes of ``Patch``."""

    def decorate(apply: Callable[[], None]) -> ProcessPatch:
        PATCHES.append(change := ProcessPatch(packages, first, last, why, upstream, apply))
        return change

    return decorate


def replacement(
    *packages: str, first: str, last: str, why: str, upstream: str
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Make a ``Patch`` of a function that replaces something where it is called: inside a block, or of one engine.

    Each call warns, once, where the version is none that it was run with.
    """

    def decorate(apply: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        PATCHES.append(Patch(packages, first, last, why, upstream, apply))

        @functools.wraps(apply)
        def checked(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
            warn_of_unknown_version(packages, first, last)
            return apply(*arguments, **named)

        return checked

    return decorate


@functools.cache
def _apply_once(change: ProcessPatch) -> None:
    warn_of_unknown_version(change.packages, change.first, change.last)
    change.apply()


@functools.cache
def warn_of_unknown_version(packages: tuple[str, ...], first: str, last: str) -> None:
    """Warn, once for each range, where the installed version of a library is outside it; says what that lacks."""
    package, version = _installed(packages)
    if version and not is_known(packages, first, last):
        known = first if first == last else f"{first} to {last}"
        lacks = "".join(f"; it lacks {name}" for name in missing_of_installed(packages))
        warnings.warn(
            f"{package} {version} was never run with this version of rlhf_megatron, which knows {known}; "
            f"install one of these if anything about {package} fails{lacks}",
            stacklevel=2,
        )


def is_known(packages: tuple[str, ...], first: str, last: str) -> bool:
    """Say whether a library is installed, by one of its distributions, in a version from ``first`` to ``last``."""
    _, version = _installed(packages)
    # Without what names a build: 0.33.0+cpu is above 0.33.0.
    return bool(version) and Version(first) <= Version(Version(version).public) <= Version(last)


def _installed(packages: tuple[str, ...]) -> tuple[str, str]:
    """Return the installed one of a library's distributions, and its version; two empty texts if there is none."""
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return package, importlib.metadata.version(package)
    return "", ""
