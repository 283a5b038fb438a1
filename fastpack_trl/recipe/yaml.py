"""The YAML of ``fastpack-trl sft``, read with bounds and with what is wrong on one line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from fastpack_trl.errors import UserError, one_line, short_repr
from fastpack_trl.recipe.paths import configs_folder, did_you_mean_path

_LARGEST_FILE = 1_000_000  # bytes
_DEEPEST = 64
_MOST_VALUES = 100_000


def load_config(path: str) -> dict[str, Any]:
    """Return the mapping in the YAML file `path`.

    Raises:
        UserError: no such file, not UTF-8, a syntax error or an unsafe tag (with its line), or not a mapping.
    """
    text = _read(path)
    try:
        loader = _BoundedLoader(text)  # reads ahead: a control character fails here
        try:
            config = loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"config file {path!r}{where}: {one_line(error.problem)}: correct the YAML there") from error
    except yaml.YAMLError as error:
        raise UserError(f"config file {path!r} is not YAML: {one_line(error)}") from error
    if not isinstance(config, dict):
        found = "is empty" if config is None else f"holds a {type(config).__name__}"
        raise UserError(f"config file {path!r} {found}: it must be a YAML mapping, e.g. `max_length: 1024`")
    return {str(key): value for key, value in config.items()}


def _read(path: str) -> str:
    file = Path(path).expanduser()
    try:
        size = file.stat().st_size
        if size > _LARGEST_FILE:
            raise UserError(f"config file {path!r} has {size:,} bytes: name the YAML, not data or weights")
        return file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        shipped = configs_folder() / file.with_suffix(".yaml").name
        remedy = did_you_mean_path(path)
        if not remedy and shipped.is_file():
            remedy = f"; `fastpack-trl init {file.stem}` writes {shipped.name}"
        raise UserError(f"config file {path!r} does not exist (looked for {Path(path).absolute()}){remedy}") from error
    except IsADirectoryError as error:
        inside = sorted(str(one) for suffix in ("yaml", "yml") for one in file.glob(f"*.{suffix}"))
        remedy = f"name a YAML in it, e.g. {inside[0]!r}" if inside else "it holds no YAML; name a file"
        raise UserError(f"config file {path!r} is a folder: {remedy}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"config file {path!r} cannot be read as UTF-8 text: {one_line(error)}") from error


def set_environment(variables: object, path: str) -> None:
    """Set the variables of the YAML key ``env``; raise `UserError` if it is not a mapping of names to scalars."""
    if not isinstance(variables, Mapping) or any(isinstance(value, list | dict) for value in variables.values()):
        raise UserError(
            f"{path}: env: {short_repr(variables)} is not a mapping of variables, e.g. `env: {{OMP_NUM_THREADS: 1}}`"
        )
    os.environ.update({str(name): str(value) for name, value in variables.items()})


class _BoundedLoader(yaml.SafeLoader):
    """PyYAML's safe loader, which also refuses, with the line, what PyYAML takes without a word or crashes on.

    Deep nesting, keys given twice, impossible scalars, and aliases: a few can stand for billions of values.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._depth = 0
        self._values: dict[Any, int] = {}
        """Values of a node, as if every alias were written out."""

    def compose_node(self, parent: Any, index: Any) -> Any:
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
            children = node.value if isinstance(node, yaml.CollectionNode) else ()
            if isinstance(node, yaml.MappingNode):
                children = [child for pair in node.value for child in pair]
            self._values[node] = 1 + sum(self._values[child] for child in children)
        if self._values[node] > _MOST_VALUES:
            raise ComposerError(None, None, f"aliases make more than {_MOST_VALUES:,} values of these", mark)
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], Any] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            before = first.setdefault((key.tag, key.value), key).start_mark
            if before.index != key.start_mark.index:  # PyYAML keeps the last
                said = f"{key.value!r} is given a second time, after line {before.line + 1}"
                raise ComposerError(None, None, said, key.start_mark)
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:  # without a line: a date in month 13
            raise ConstructorError(None, None, str(error), node.start_mark) from error
