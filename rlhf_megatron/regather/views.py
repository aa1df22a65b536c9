"""Views: parameters of the rollout that can be the trainer's own memory, and why the others cannot.

Both follow from the plan of a regathering: where all that a parameter of the rollout gets comes from the same place of
one parameter of this rank, or of several that lie one behind the other, the two are the same matrix, and a view of it
needs no copy.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from torch import Tensor

from rlhf_megatron.models.experts import behind_each_other
from rlhf_megatron.models.weight_map import expert_of
from rlhf_megatron.regather.plan import Copy, RankPlan

_GB = 2**30
ELSEWHERE = "come from other ranks"
SEVERAL = "are put together from several of the actor's"
ORDER = "are cut in another way"
TYPE = "have another type"


def shareable(plan: RankPlan, sources: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return views of ``sources``, the trainer's parameters, for those of the rollout's that could be just that.

    Whether shapes and types are the rollout's is not compared. Where both are of one shape, what no copy fills pads a
    vocabulary on both sides.
    """
    views = {name: _view(copies, sources)[0] for name, copies in _by_destination(plan).items()}
    return {name: view for name, view in views.items() if view is not None}


def describe_sharing(plan: RankPlan, sources: Mapping[str, Tensor], destinations: Mapping[str, Tensor]) -> str:
    """Return one line: how many of ``destinations`` are memory of ``sources``, and what keeps the others from it."""
    shared, total = 0, sum(tensor.nbytes for tensor in destinations.values())
    copied: Counter[str] = Counter()
    copied_bytes: Counter[str] = Counter()
    for name, copies in _by_destination(plan).items():
        tensor = destinations[name]
        own, reason = _view(copies, sources)
        if own is not None and own.data_ptr() == tensor.data_ptr():
            shared += tensor.nbytes
            continue
        reason = reason or (TYPE if own is not None and own.dtype != tensor.dtype else ORDER)
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


def _view(copies: list[Copy], sources: Mapping[str, Tensor]) -> tuple[Tensor | None, str]:
    """Return (what a parameter of the rollout gets, if it lies in this rank's memory as it is to be; why it does
    not)."""
    if any(copy.source != copy.destination for copy in copies):
        return None, ELSEWHERE
    if not copies[0].region:  # a single number
        return sources.get(copies[0].source_parameter), ORDER
    shifts = {
        (copy.source_parameter, *map(operator.sub, copy.destination_offset, copy.source_offset)) for copy in copies
    }
    ordered = sorted(shifts, key=operator.itemgetter(1))
    parts = [sources.get(name) for name, *_ in ordered]
    reason = ORDER if len({name for name, *_ in ordered}) == 1 else SEVERAL
    if len(set(parts)) < len(parts) or any(part is None for part in parts) or any(any(rest) for _, _, *rest in ordered):
        return None, reason
    view = _joined([part for part in parts if part is not None], [row for _, row, *_ in ordered])
    if view is None:
        return None, reason
    experts = {expert_of(copy.tensor) for copy in copies}
    # vLLM's stacks of experts have a dimension for them.
    return (view if None in experts else view.view(len(experts), -1, *view.shape[1:])), ""


def _joined(parts: Sequence[Tensor], begins: Sequence[int]) -> Tensor | None:
    """Return the tensor whose rows from each of ``begins`` on are ``parts``, if these lie in memory one behind the
    other."""
    rows = list(itertools.accumulate(map(len, parts), initial=0))
    if rows[:-1] != list(begins):
        return None
    return parts[0] if len(parts) == 1 else behind_each_other(parts)
