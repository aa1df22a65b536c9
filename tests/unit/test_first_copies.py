"""Which copies start before all addresses are compared."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rlhf_megatron.regather.first_copies import split_off_first
from rlhf_megatron.regather.plan import Copy


def copy(source: int, parameter: int, rows: int) -> Copy:
    name = f"p{parameter}"
    return Copy(name, ((0, rows),), source, name, (0,), 0, name, (0,), True)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 50)), max_size=40), st.integers(0, 900))
def test_first_copies_are_a_share_of_every_source(drawn: list[tuple[int, int, int]], elements: int) -> None:
    copies = [copy(*each) for each in drawn]
    first, rest = split_off_first(copies, elements)
    assert Counter(first) + Counter(rest) == Counter(copies)
    total = sum(each.elements for each in copies)
    for source in {each.source for each in copies}:
        of_source, taken = ([each for each in part if each.source == source] for part in (copies, first))
        wanted = min(0.5, elements / total) * sum(each.elements for each in of_source)
        assert wanted - 1e-6 <= sum(each.elements for each in taken) < wanted + max(each.elements for each in of_source)


def test_the_largest_parameters_come_first() -> None:
    copies = [copy(0, 0, 10), copy(0, 1, 60), copy(1, 2, 5), copy(0, 1, 40), copy(1, 3, 50), copy(0, 4, 30)]
    assert split_off_first(copies, 70) == ([copies[1], copies[4]], [copies[0], copies[2], copies[3], copies[5]])
