"""The garbage collector stands still where it is told to, and is as it was afterwards."""

from __future__ import annotations

import gc

import pytest

from rlhf_megatron.garbage_collection import without_garbage_collection


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_off_within_and_as_before_afterwards(was_on: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if was_on else gc.disable)()
        with without_garbage_collection():
            assert not gc.isenabled()
            with without_garbage_collection():
                pass
            assert not gc.isenabled()
        assert gc.isenabled() is was_on
        with pytest.raises(ValueError, match="within"), without_garbage_collection():
            raise ValueError("within")
        assert gc.isenabled() is was_on
    finally:
        (gc.enable if before else gc.disable)()
