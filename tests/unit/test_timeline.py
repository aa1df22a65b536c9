"""The timeline of a step: what stands in the trace, and how clocks of other hosts are set right."""

from __future__ import annotations

import pytest

from rlhf_megatron.monitor.timeline import Clock, Span, chrome_trace
from rlhf_megatron.recipe.operations import TimelineSection
from rlhf_megatron.runtime.clocks import clock_ahead


def test_every_rank_is_a_process_on_the_clock_of_rank_0() -> None:
    ranks = [
        [Span("update", 10.5, 11.0, 2.0, 3.0), Span("step 1", 10.0, 11.0, 2.0, 3.0)],
        [Span("step 1", 110.25, 111.25, 1.0, 1.5)],
    ]
    clocks = [Clock("here", 0.0, 0.0), Clock("there", 100.0, 0.00005)]
    trace = chrome_trace(ranks, clocks, {"part": "step 1"})
    events = trace["traceEvents"]
    spans = [(event["pid"], event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    # A viewer nests by the order in the file where two begin together, so the longer one comes first.
    assert spans == [(0, "step 1", 0.0, 1e6), (0, "update", 5e5, 5e5), (1, "step 1", 2.5e5, 1e6)]
    counters = [(event["pid"], event["ts"], event["args"]["held"]) for event in events if event["ph"] == "C"]
    assert counters == [(0, 1e6, 2.0), (0, 1e6, 2.0), (1, 1.25e6, 1.0)]
    labels = [event["args"]["labels"] for event in events if event["name"] == "process_labels"]
    assert labels == ["here", "there, clock within 50 us"]
    assert trace["otherData"] == {"part": "step 1"}


def test_a_clock_is_set_by_the_quickest_exchange() -> None:
    # This clock is 7 s ahead; the second exchange took 2 s there and 1 s back, the first ten.
    exchanges = [(100.0, 102.0, 110.0), (200.0, 195.0, 203.0)]
    ahead, uncertainty = clock_ahead(exchanges)
    assert (ahead, uncertainty) == (6.5, 1.5)
    assert abs(ahead - 7.0) <= uncertainty


@pytest.mark.parametrize(("steps", "every", "written"), [([0, 3], 0, [0, 3]), ([], 2, [0, 2, 4]), ([], 0, [])])
def test_the_recipe_says_which_steps_are_written(steps: list[int], every: int, written: list[int]) -> None:
    section = TimelineSection(steps=steps, every=every)
    assert [step for step in range(5) if section.has(step)] == written
    assert section.is_on == bool(written)
