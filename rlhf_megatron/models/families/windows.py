"""Sliding windows: which layers of a model attend to the last tokens only, as transformers reads it from the config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.config_fields import flag, size, unsupported
from rlhf_megatron.models.description import Architecture, LayerKind
from rlhf_megatron.untrusted import shown

SWITCH = frozenset({"use_sliding_window"})  # the field of families that have a ``switch``
PATTERN = "sliding_window_pattern"
_WITHIN = {"full_attention": False, "sliding_attention": True}


@dataclasses.dataclass(frozen=True)
class WindowFields:
    """The fields by which the config of one ``model_type`` says which layers have a window.

    ``absent``: the tokens of an absent ``sliding_window``; None: no window.
    ``switch``: there is none without ``use_sliding_window``.
    ``layers``: those with a window where ``layer_types`` says nothing: all, those from ``max_window_layers`` on,
    every other one before it, or all but every ``full_every``-th, a number that ``sliding_window_pattern`` may say.
    ``by_type``: transformers reads ``layer_types``; otherwise vLLM alone does, so that it must not disagree.
    """

    absent: int | None = None
    switch: bool = False
    layers: Literal["all", "last", "alternate", "pattern"] = "all"
    full_every: int = 1
    by_type: bool = False


def read_windows(
    path: Path, config: Mapping[str, Any], fields: WindowFields | None, layers: int, positions: int
) -> tuple[int | None, tuple[bool, ...]]:
    """Return the tokens of the window, None without one, and for each layer whether it has it.

    A window as wide as the model's ``positions`` is none. Raises ModelError where ``layer_types`` disagrees.
    """
    window, within = declared_windows(path, config, fields, layers)
    if window is None or window >= positions or not any(within):
        return None, (False,) * layers
    return window, within


def declared_windows(
    path: Path, config: Mapping[str, Any], fields: WindowFields | None, layers: int
) -> tuple[int | None, tuple[bool, ...]]:
    """Return the same however wide the window is, for families in which more than the window follows from it."""
    window = _size(path, config, fields) if fields else None
    derived = _derived(path, config, fields, layers) if fields and window is not None else (False,) * layers
    return window, _by_type(path, config, window, derived, by_type=fields is not None and fields.by_type)


def mixed_layers(within: tuple[bool, ...], feed_forward: Literal["dense", "experts"]) -> tuple[LayerKind, ...]:
    """Return the kind of each layer where some have a window and some have not, else nothing."""
    if len(set(within)) < 2:
        return ()
    return tuple(LayerKind("window" if one else "full", feed_forward) for one in within)


def _size(path: Path, config: Mapping[str, Any], fields: WindowFields) -> int | None:
    if fields.switch and not flag(path, "use_sliding_window", config):
        return None
    if config.get("sliding_window", fields.absent) is None:
        if fields.layers in ("alternate", "pattern"):  # whose layers are then still those of a window
            where = " where use_sliding_window is true" if fields.switch else ""
            raise unsupported(path, "sliding_window", None, f"a number{where}")
        return None
    return size(path, "sliding_window", config, fields.absent)


def _derived(path: Path, config: Mapping[str, Any], fields: WindowFields, layers: int) -> tuple[bool, ...]:
    if fields.layers == "all":
        return (True,) * layers
    if fields.layers == "pattern":
        full_every = size(path, PATTERN, config, fields.full_every)
        return tuple((layer + 1) % full_every != 0 for layer in range(layers))
    bound = config.get("max_window_layers", 28)  # transformers' default, whatever the number of layers
    if fields.layers == "last":
        return tuple(layer >= bound for layer in range(layers))
    return tuple(layer < bound and layer % 2 == 0 for layer in range(layers))


def _by_type(
    path: Path, config: Mapping[str, Any], window: int | None, derived: tuple[bool, ...], *, by_type: bool
) -> tuple[bool, ...]:
    """Return for each layer whether it has a window; ``derived``: what the other fields say."""
    types, layers = config.get("layer_types"), len(derived)
    if types is None:
        return derived
    supported = (
        "full_attention in every layer"
        if window is None
        else "full_attention or sliding_attention in each layer"
        if by_type
        else "sliding_attention in every layer, as sliding_window says"
    )
    if not isinstance(types, list) or any(not isinstance(kind, str) or kind not in _WITHIN for kind in types):
        described = sorted(set(map(str, types))) if isinstance(types, list) else types
        raise unsupported(path, "layer_types", described, supported)
    within = tuple(_WITHIN[kind] for kind in types)
    if any(within) if window is None else not by_type and not all(within):
        raise unsupported(path, "layer_types", sorted(set(types)), supported)
    if len(types) != layers:
        raise ModelError(f"{shown(path)}: layer_types has {len(types)} layers, and num_hidden_layers is {layers}")
    return within


def window_settings(architecture: Architecture) -> dict[str, Any]:
    """Return Megatron's settings, which count the keys before a token's own, and the layers of all stages."""
    if architecture.window is None:
        return {}
    within = [int(kind.attention == "window") for kind in architecture.layer_kinds]
    return {"window_size": (architecture.window - 1, 0), "window_attn_skip_freq": within}


def causal_pairs(tokens: float, window: int | None) -> float:
    """Return the pairs of a token with itself and those before it, ``window`` at most, in a row of ``tokens``."""
    before_it_is_full = tokens if window is None else min(tokens, window)
    return before_it_is_full * (before_it_is_full + 1) / 2 + (tokens - before_it_is_full) * before_it_is_full
