"""Read configuration files, YAML mappings; every fault is one line. Write values and comments as YAML."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError

from fastpack_trl.errors import UserError, one_line, printable
from fastpack_trl.recipe.paths import configs_folder, did_you_mean_path

_MOST_NODES, _MOST_CHARACTERS = 100_000, 600


class _StrictLoader(yaml.SafeLoader):
    """Refuse keys given twice, of which PyYAML keeps the last, and aliases of aliases: nine by nine are 387,420,489."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.sizes: dict[object, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        is_alias = self.check_event(yaml.AliasEvent)
        node: Any = super().compose_node(parent, index)
        if not is_alias:
            parts = chain(*node.value) if isinstance(node, yaml.MappingNode) else node.value
            self.sizes[node] = 1 + sum(self.sizes.get(part, 0) for part in parts)  # 0: a character of text
        if not 0 < self.sizes.get(node, 0) <= _MOST_NODES:  # 0: an alias to what contains it
            problem = f"more than {_MOST_NODES:,} values, aliases expanded, or an alias to itself: write the values out"
            raise ComposerError(None, None, problem, node.start_mark)
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        first: dict[str, Any] = {}
        for key, _ in node.value:
            is_name = isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge"
            if is_name and (before := first.setdefault(key.value, key)) is not key:
                problem = f"{key.value!r} is given a second time, after line {before.start_mark.line + 1}"
                raise ComposerError(None, None, problem, key.start_mark)
        return node


def load_config(path: str) -> dict[str, Any]:
    """Return the mapping in the YAML file `path`; raise `UserError` for any other file, with the line of the error."""
    file = Path(path).expanduser()
    try:
        config = yaml.load(file.read_text(encoding="utf-8"), _StrictLoader)  # noqa: S506 - a SafeLoader
    except FileNotFoundError as error:
        shipped = configs_folder() / file.with_suffix(".yaml").name
        remedy = did_you_mean_path(path)
        if not remedy and shipped.is_file():
            remedy = f"; `fastpack-trl init {file.stem}` writes {shipped.name}"
        raise UserError(f"config file {path!r} does not exist (looked for {file.absolute()}){remedy}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"config file {path!r} cannot be read as UTF-8 text: {one_line(error)}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # e.g. a date in month 13, brackets without end
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = one_line(getattr(error, "problem", None) or error).replace(r"character '\t'", "a tab (use spaces)")
        raise UserError(f"config file {path!r}{place} is not valid YAML: {problem}") from error
    if not isinstance(config, dict):
        content = "is empty" if config is None else f"holds a {type(config).__name__}"
        raise UserError(f"config file {path!r} {content}: it must be a YAML mapping, e.g. `max_length: 1024`")
    return {str(key): value for key, value in config.items()}


def comment(text: str) -> str:
    """Return foreign text as one line of comment: nothing in it becomes YAML."""
    return f"# {printable(text)[:_MOST_CHARACTERS]}\n"


def dump(values: Mapping[str, Any]) -> str:
    """Return values as YAML that loads as the same values."""
    text = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)
    bare = text.replace("\n", "")  # PyYAML reads some line breaks, which it writes as they are, as others
    return text if printable(bare) == bare else yaml.safe_dump(dict(values), sort_keys=False)
