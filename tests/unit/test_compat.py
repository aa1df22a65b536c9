"""Patches of libraries say what they are for, apply once, and warn of versions that they were never run with."""

from __future__ import annotations

import importlib.metadata
import warnings

import pytest
import torch

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


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"mscale": 1.2}, "mscale=1.2"),
        ({"rotary_interleaved": True}, "rotary_interleaved"),
        ({"multi_latent_attention": True}, "mla_rotary_interleaved"),
        ({"cp_group": None}, "no context-parallel group"),
    ],
)
def test_rotary_embeddings_that_are_not_known_are_refused(how: dict[str, object], said: str) -> None:
    class One:
        """A context-parallel group of one rank."""

        def size(self) -> int:
            return 1

        def rank(self) -> int:
            return 0

    values, lengths, frequencies = torch.randn(3, 2, 8), torch.tensor([0, 3]), torch.randn(4, 1, 1, 8)
    assert megatron.rotate_packed(values, lengths, frequencies, cp_group=One()).shape == values.shape  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match=said):
        megatron.rotate_packed(values, lengths, frequencies, **{"cp_group": One()} | how)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="4 of 8 dimensions"):
        megatron.rotate_packed(values, lengths, frequencies[..., :4], cp_group=One())  # type: ignore[arg-type]
