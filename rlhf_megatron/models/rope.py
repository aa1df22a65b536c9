"""The description of rotary position embeddings: frequencies, their scaling, the part of a head that turns.

A new kind of scaling is a class here, with config.json's own names, and its formula in ``rotary_table``. Free of torch.
"""

from __future__ import annotations

import dataclasses
import math

from rlhf_megatron.yarn import attention_factor


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Every frequency divided by ``factor`` (https://arxiv.org/abs/2306.15595)."""

    factor: float


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's: long waves slowed by ``factor``, short ones as they are, a mixture of both in between.

    Wavelengths are bounded by ``original_max_position_embeddings`` over ``low_freq_factor`` and ``high_freq_factor``.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class AlphaScaling:
    """Hunyuan's: a theta of its own, ``alpha`` ^ (d / (d - 2)) times the config's for d turned numbers.

    Its rope_type is "dynamic", but with ``alpha`` nothing depends on the rows.
    """

    alpha: float


@dataclasses.dataclass(frozen=True)
class ProportionalScaling:
    """Gemma 4's: of the pairs of a head the first ``partial_rotary_factor`` turn, the others are as they were.

    Frequencies are those of the whole head, divided by ``factor``.
    """

    partial_rotary_factor: float = 1.0
    factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN (https://arxiv.org/abs/2309.00071): frequencies divided by ``factor`` on a ramp over the pairs of a head.

    The ramp begins at the pair that turns ``beta_fast`` times within the original length and ends at that with
    ``beta_slow`` turns; with ``truncate`` both are rounded outwards to whole pairs. Without ``attention_factor`` it
    follows from ``factor`` and the mscales.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True


@dataclasses.dataclass(frozen=True)
class LongScaling:
    """LongRoPE (https://arxiv.org/abs/2402.13753): each frequency divided by a factor of its own.

    ``short_factor`` is for rows of at most ``original_max_position_embeddings`` tokens, ``long_factor`` for longer
    ones. vLLM chooses once, by the longest row that it may serve, so a run does too: ``is_long``, None until then.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    max_position_embeddings: int
    is_long: bool | None = None


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongScaling | AlphaScaling | ProportionalScaling
SCALINGS: dict[str, type[Scaling]] = {
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
    "longrope": LongScaling,
}


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embeddings of a layer (RoFormer, https://arxiv.org/abs/2104.09864).

    The first ``rotated_fraction`` of a head turns and the rest is as it was. Pair i of n turned numbers is
    (i, i + n / 2), or with ``interleaved`` (2i, 2i + 1).
    """

    theta: float
    scaling: Scaling | None = None
    rotated_fraction: float = 1.0
    interleaved: bool = False

    def rotated(self, head_dim: int) -> int:
        """Return how many of a head's numbers turn."""
        return int(head_dim * self.rotated_fraction)

    @property
    def attention_factor(self) -> float:
        """The factor of turned queries and keys."""
        match self.scaling:
            case YarnScaling():
                yarn = self.scaling
                return attention_factor(yarn.factor, yarn.attention_factor, yarn.mscale, yarn.mscale_all_dim)
            case LongScaling():
                original = self.scaling.original_max_position_embeddings
                longer = self.scaling.max_position_embeddings / original
                return math.sqrt(1 + math.log(longer) / math.log(original)) if longer > 1 else 1.0
            case _:
                return 1.0

    @property
    def positions_in_vllm(self) -> int | None:
        """Positions of vLLM's table where those are not max_position_embeddings at least."""
        if isinstance(self.scaling, YarnScaling):
            return math.ceil(self.scaling.original_max_position_embeddings * self.scaling.factor)
        return None

    def for_rows(self, longest: int | None) -> Rope:
        """Return these embeddings in a run whose rows have at most ``longest`` tokens; None: as the config says.

        Only LongRoPE depends on it.
        """
        if not isinstance(self.scaling, LongScaling):
            return self
        is_long = None if longest is None else longest > self.scaling.original_max_position_embeddings
        return dataclasses.replace(self, scaling=dataclasses.replace(self.scaling, is_long=is_long))
