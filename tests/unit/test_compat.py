"""Patches of libraries say what they are for, apply once, and warn of versions that they were never run with."""

from __future__ import annotations

import importlib.metadata
import warnings

import pytest

from rlhf_megatron.compat import megatron, megatron_cpu, vllm_cpu
from rlhf_megatron.compat.patches import PATCHES, Patch, warn_of_unknown_version

MODULES = (megatron, megatron_cpu, vllm_cpu)


def test_every_patch_says_what_it_is_for() -> None:
    assert {change.apply.__module__ for change in PATCHES} == {module.__name__ for module in MODULES}
    for change in PATCHES:
        assert len(change.why) > 20 and change.apply.__doc__, change.name
        assert not change.upstream or change.upstream.startswith("https://github.com/"), change.name


def test_the_installed_versions_are_known() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for change in PATCHES:
            warn_of_unknown_version.__wrapped__(change.packages, change.first, change.last)


def test_a_patch_applies_once_and_warns_of_another_version() -> None:
    applied = []
    installed = importlib.metadata.version("torch").partition("+")[0]
    change = Patch(("no-such-package", "torch"), "1.0", "1.9", "a reason", "", lambda: applied.append(1))
    with pytest.warns(UserWarning, match=rf"^torch {installed}\S* was never run .* which knows 1\.0 to 1\.9; install"):
        change()
    change()
    assert applied == [1]
