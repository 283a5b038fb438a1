"""PyYAML's safe loader with bounds: a few aliases can stand for billions of values, deep nesting ends in a crash."""

from __future__ import annotations

from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

_DEEPEST = 64
_MOST_VALUES = 100_000


def load_yaml(text: str) -> Any:
    """Return the value of the YAML document `text`.

    Raises:
        yaml.YAMLError: a syntax error, an unsafe tag, or more than the bounds allow; mostly with its line.
    """
    loader = _BoundedLoader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


class _BoundedLoader(yaml.SafeLoader):
    """A loader that refuses, with the line, deep nesting, huge values made by aliases, keys given twice, and impossible
    scalars.

    Safe: a tag such as ``!!python/object`` is an error, never an object.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._depth = 0
        self._values: dict[Any, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose as PyYAML does; count values as if every alias were written out."""
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        alias = self.check_event(yaml.AliasEvent)
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ComposerError(None, None, f"values are nested more than {_DEEPEST} levels deep", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if alias and node not in self._values:
            raise ComposerError(None, None, "an alias stands inside of what it names", mark)
        if not alias:
            self._values[node] = 1 + sum(self._values[child] for child in _children(node))
        if self._values[node] > _MOST_VALUES:
            raise ComposerError(None, None, f"aliases make more than {_MOST_VALUES:,} values of these", mark)
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Compose as PyYAML does; refuse a key that is given twice, of which PyYAML keeps the last."""
        node = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], Any] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            before = first.setdefault((key.tag, key.value), key).start_mark
            if before.index != key.start_mark.index:
                said = f"{key.value!r} is given a second time, after line {before.line + 1}"
                raise ComposerError(None, None, said, key.start_mark)
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Construct as PyYAML does, but with the line for a bare ValueError (a date in month 13)."""
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            raise ConstructorError(None, None, str(error), node.start_mark) from error


def _children(node: Any) -> list[Any]:
    if isinstance(node, yaml.MappingNode):
        return [child for pair in node.value for child in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []
