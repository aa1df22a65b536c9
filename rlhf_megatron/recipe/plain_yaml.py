"""YAML as plain values, of bounded size and depth: text, numbers, booleans, null, lists, mappings with text as keys."""

from __future__ import annotations

import io
import itertools
import re
from typing import Any, NamedTuple

import yaml

from rlhf_megatron.untrusted import MOST_LEVELS, shown

# Far beyond a recipe that names every file of a large data set, and read in about a second.
MOST_VALUES = 50_000
_MOST_DIGITS = 100
_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"
_PLAIN = {f"{_TAG}{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map")}
# YAML 1.1 reads 1:30 as 90 and 010 as 8, which nobody who writes them means.
_MISLEADING_NUMBER = re.compile(r"[-+]?(?:0[0-9_]+|[0-9_.]+(?::[0-9_.]+)+)")


class _Extent(NamedTuple):
    """The size of a node where each alias in it is written out."""

    values: int
    levels: int


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, within bounds, and without what it does in silence: it would take the last of two equal
    keys, read other kinds of values than a recipe has, and let errors of Python through."""

    def __init__(self, text: str) -> None:
        super().__init__(io.StringIO(text))
        self._depth = self._nodes = 0
        self._extents: dict[yaml.Node, _Extent] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Raise ComposerError for what is too deep, too large, of another kind, or part of itself."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            node = super().compose_node(parent, index)
            if node is not None and node not in self._extents:
                raise _refused(f"the alias {event.anchor} leads back to itself", event.start_mark)
            return node
        self._depth += 1
        self._nodes += 1
        if self._nodes > MOST_VALUES:
            raise _refused(f"has more than {MOST_VALUES:,} values", event.start_mark)
        if self._depth > MOST_LEVELS:
            raise _refused(f"is nested too deeply; at most {MOST_LEVELS} levels are read", event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is not None:
            _check_kind(node)
            if isinstance(node, yaml.MappingNode):
                _check_keys(node)
            self._extents[node] = self._extent(node)
        return node

    def _extent(self, node: yaml.Node) -> _Extent:
        """Raise ComposerError where aliases make a node too deep or too large."""
        inner = itertools.chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
        extents = [self._extents[each] for each in inner] if isinstance(node, yaml.CollectionNode) else []
        values = 1 + sum(extent.values for extent in extents)
        levels = 1 + max((extent.levels for extent in extents), default=0)
        if values > MOST_VALUES or levels > MOST_LEVELS:
            limit = f"more than {MOST_VALUES:,} values, or more than {MOST_LEVELS} levels"
            raise _refused(f"has {limit}, aliases written out", node.start_mark)
        return _Extent(values, levels)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Raise ConstructorError for a value such as !!int x."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:
            raise _unreadable(node) from error


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text with one document; no part of it is shared with another.

    Raises yaml.YAMLError for what is no YAML, is larger than any recipe, or holds dates, sets, binary data or keys that
    are no text; ``yaml_problem`` tells it in one line.
    """
    loader = _Loader(text)
    try:
        return _copy(loader.get_single_data())
    except RecursionError as error:
        raise yaml.YAMLError("is nested too deeply") from error
    finally:
        loader.dispose()


def yaml_problem(error: yaml.YAMLError) -> str:
    """Return where a text is not right, and why, in one line."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return shown(" ".join(str(error).split()), 300)
    mark = error.problem_mark or error.context_mark
    position = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return position + shown(", ".join(part for part in (error.problem, error.context) if part), 300)


def _copy(value: Any) -> Any:
    """Return a value whose mappings and lists are its own: what changes one use of an alias must not change the
    others."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _check_kind(node: yaml.Node) -> None:
    if node.tag not in _PLAIN and node.tag != _MERGE:
        raise _unreadable(node)
    if not isinstance(node, yaml.ScalarNode):
        return
    text = str(node.value)
    if "\0" in text or (not text.isascii() and re.search("[\ud800-\udfff]", text)):
        raise _refused(f"{_quoted(text)} has a character that no text file can have; take it out", node.start_mark)
    if node.tag in (f"{_TAG}int", f"{_TAG}float"):
        if _MISLEADING_NUMBER.fullmatch(text):
            reason = f"{_quoted(text)} is another number to YAML than it seems; write it in decimal digits, or quote it"
            raise _refused(reason, node.start_mark)
        if len(text) > _MOST_DIGITS:
            raise _unreadable(node)


def _check_keys(node: yaml.MappingNode) -> None:
    """Raise ComposerError at the second of two equal keys, and at one that is no text."""
    seen = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _refused("found unhashable key", key.start_mark)
        if key.tag not in (f"{_TAG}str", _MERGE):
            kind = key.tag.rpartition(":")[2]
            raise _refused(f"the key {_quoted(key.value)} is read as {kind}; quote it", key.start_mark)
        if key.value in seen:
            raise _refused(f"the key {_quoted(key.value)} stands here a second time", key.start_mark)
        seen.add(key.value)


def _unreadable(node: yaml.Node) -> yaml.MarkedYAMLError:
    """Return the error at a node that is not what it says, or that no recipe has."""
    kind = node.tag.removeprefix(_TAG)
    what = _quoted(node.value) if isinstance(node, yaml.ScalarNode) else "this"
    return _refused(f"{what} cannot be read as {kind}; quote it if it is text", node.start_mark)


def _quoted(text: object) -> str:
    return shown(repr(text), 80)


def _refused(reason: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.composer.ComposerError(None, None, reason, mark)
