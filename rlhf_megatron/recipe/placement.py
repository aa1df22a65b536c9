"""Placement of roles: the key ``ranks`` as global ranks of a world."""

from __future__ import annotations

import functools
import re
from typing import Annotated

from pydantic import BeforeValidator

from rlhf_megatron.errors import RecipeError
from rlhf_megatron.untrusted import shown

# YAML reads one rank as a number.
Ranks = Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, int) else value)]
_SPAN = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def ranks_of(where: str, text: str, world_size: int, gpus_per_node: int) -> list[int]:
    """Return the rising global ranks that ``text`` names: "all", "0-3", "0,2-3", or "node0:0-3;node1:0-3".

    Ranks of a node are counted within it. ``where`` is the recipe's key, for errors: raises RecipeError where the text
    is none of these, names a rank twice, or one that ``world_size`` does not have.
    """
    return list(_ranks_of(where, text, world_size, gpus_per_node))


@functools.lru_cache(maxsize=64)  # a search for layouts asks for the same ones again and again
def _ranks_of(where: str, text: str, world_size: int, gpus_per_node: int) -> tuple[int, ...]:
    if text == "all":
        return tuple(range(world_size))
    ranks: list[int] = []
    for part in text.split(";"):
        node, colon, spans = part.strip().rpartition(":")
        named = re.fullmatch(r"node([0-9]{1,9})", node) if colon else None
        if colon and named is None:
            raise _not_understood(where, text)
        first, limit = (int(named[1]) * gpus_per_node, gpus_per_node) if named else (0, world_size)
        for span in spans.split(","):
            match = _SPAN.fullmatch(span.strip())
            if match is None:
                raise _not_understood(where, text)
            start, stop = int(match[1]), int(match[2] or match[1])
            if stop >= limit:
                of = f"node {named[1]} has GPUs 0-{limit - 1}" if named else f"the ranks are 0-{limit - 1}"
                raise RecipeError(f"{where}={text}: there is no {stop}: {of}")
            ranks.extend(range(first + start, first + stop + 1))
    if not ranks or len(set(ranks)) != len(ranks) or ranks != sorted(ranks):
        raise RecipeError(f"{where}={text}: name each rank once, in rising order")
    if ranks[-1] >= world_size:
        raise RecipeError(f"{where}={text}: there is no rank {ranks[-1]}: the ranks are 0-{world_size - 1}")
    return tuple(ranks)


def _not_understood(where: str, text: str) -> RecipeError:
    return RecipeError(f'{where}={shown(text)}: not understood; write all, "0-3", "0,2-3" or "node0:0-3;node1:0-3"')
