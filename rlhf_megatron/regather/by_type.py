"""A regathering of a model some of whose tensors stay float32 beside others of bfloat16 or float16."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.models.weight_map import stays_float32
from rlhf_megatron.regather.execute import Regather
from rlhf_megatron.regather.plan import RankPlan


class RegatherByType:
    """One ``Regather`` for each type of number, so that none is rounded on its way."""

    def __init__(
        self, plan: RankPlan, tensors: Iterable[str], dtype: torch.dtype, device: torch.device | str, **options: Any
    ) -> None:
        """Set up, collectively over the world, which has the same model of these ``tensors``; ``options`` as in
        ``Regather``."""
        usual, exact = plan, None
        if dtype != torch.float32 and any(map(stays_float32, tensors)):
            usual, exact = plan.split(stays_float32)
        self._usual = Regather(usual, dtype, device, **options)
        self._exact = Regather(exact, torch.float32, device) if exact else None
        sides = (exact.local, exact.arriving) if exact else ()
        self._of_exact = {copy.destination_parameter for side in sides for copy in side}

    def run(self, sources: Mapping[str, Tensor], destinations: Mapping[str, Tensor]) -> None:
        """See Regather."""
        for regather, filled in self._parts(destinations):
            regather.run(sources, filled)

    def verify(self, sources: Mapping[str, Tensor], destinations: Mapping[str, Tensor]) -> None:
        """See Regather."""
        for regather, filled in self._parts(destinations):
            regather.verify(sources, filled)

    def _parts(self, destinations: Mapping[str, Tensor]) -> Iterable[tuple[Regather, Mapping[str, Tensor]]]:
        if self._exact is None:
            yield self._usual, destinations
            return
        yield self._usual, {name: each for name, each in destinations.items() if name not in self._of_exact}
        yield self._exact, {name: each for name, each in destinations.items() if name in self._of_exact}
