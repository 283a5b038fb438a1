"""Read configuration files, YAML mappings; every fault is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError

from fastpack_trl.errors import UserError, one_line
from fastpack_trl.recipe.paths import configs_folder, did_you_mean_path


class _UniqueKeys(yaml.SafeLoader):
    """PyYAML's safe loader, which also refuses keys given twice: PyYAML keeps the last one."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        first: dict[str, Any] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                line = first.setdefault(key.value, key).start_mark.line + 1
                if first[key.value] is not key:
                    problem = f"{key.value!r} is given a second time, after line {line}"
                    raise ComposerError(None, None, problem, key.start_mark)
        return node


def load_config(path: str) -> dict[str, Any]:
    """Return the mapping in the YAML file `path`.

    Raises:
        UserError: no such file, not UTF-8, a syntax error or an unsafe tag (with its line), or not a mapping.
    """
    file = Path(path).expanduser()
    try:
        config = yaml.load(file.read_text(encoding="utf-8"), _UniqueKeys)  # noqa: S506 - a SafeLoader
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
        problem = one_line(getattr(error, "problem", None) or error)
        raise UserError(f"config file {path!r}{place} is not valid YAML: {problem}") from error
    if not isinstance(config, dict):
        content = "is empty" if config is None else f"holds a {type(config).__name__}"
        raise UserError(f"config file {path!r} {content}: it must be a YAML mapping, e.g. `max_length: 1024`")
    return {str(key): value for key, value in config.items()}
