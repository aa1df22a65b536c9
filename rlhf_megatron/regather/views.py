"""Views: parameters of the rollout that can be the trainer's own memory, and why the others cannot.

Both follow from the plan of a regathering: where all that a parameter of the rollout gets comes from the same place of
one parameter of this rank, the two are the same matrix, and a view of it needs no copy.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from torch import Tensor

from rlhf_megatron.regather.plan import Copy, RankPlan

_GB = 2**30
ELSEWHERE = "come from other ranks"
SEVERAL = "are put together from several of the actor's"
ORDER = "are cut in another way"
TYPE = "have another type"
SHAPE = "have another shape"  # vLLM's stack of experts has a dimension for them


def shareable(plan: RankPlan) -> dict[str, str]:
    """The trainer's parameter for each of the rollout's that could be a view of it; shapes and types not yet compared.

    Where both are of one shape, what no copy fills pads a vocabulary on both sides.
    """
    sources = {name: _origin(copies) for name, copies in _by_destination(plan).items()}
    return {name: source for name, (source, reason) in sources.items() if not reason}


def describe_sharing(plan: RankPlan, sources: Mapping[str, Tensor], destinations: Mapping[str, Tensor]) -> str:
    """One line: how many of ``destinations`` are memory of ``sources``, and what keeps the others from it."""
    shared, total = 0, sum(tensor.nbytes for tensor in destinations.values())
    copied: Counter[str] = Counter()
    copied_bytes: Counter[str] = Counter()
    for name, copies in _by_destination(plan).items():
        source, reason = _origin(copies)
        own, tensor = sources.get(source), destinations[name]
        if own is not None and own.data_ptr() == tensor.data_ptr():
            shared += tensor.nbytes
            continue
        if not reason and own is not None:
            reason = TYPE if own.dtype != tensor.dtype else SHAPE if own.shape != tensor.shape else ORDER
        reason = reason or ORDER
        copied[reason] += 1
        copied_bytes[reason] += tensor.nbytes
    count = len(destinations) - copied.total()
    text = f"{count} of {len(destinations)} parameters, {_gb(shared)} of {_gb(total)} GB, are the actor's own memory"
    others = [f"{number} ({_gb(copied_bytes[reason])} GB) {reason}" for reason, number in copied.most_common()]
    return "; ".join([text, *others])


def _gb(size: int) -> str:
    return f"{size / _GB:.3g}"


def _by_destination(plan: RankPlan) -> dict[str, list[Copy]]:
    by_parameter: dict[str, list[Copy]] = defaultdict(list)
    for copy in (*plan.local, *plan.arriving):
        by_parameter[copy.destination_parameter].append(copy)
    return by_parameter


def _origin(copies: list[Copy]) -> tuple[str, str]:
    """(a parameter of this rank that a rollout's parameter is filled from, why it cannot be a view of it, if so)."""
    source = copies[0].source_parameter
    if any(copy.source != copy.destination for copy in copies):
        return source, ELSEWHERE
    if any(copy.source_parameter != source for copy in copies):
        return source, SEVERAL
    if any(copy.source_offset != copy.destination_offset for copy in copies):
        return source, ORDER
    return source, ""
