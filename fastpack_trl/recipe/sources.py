"""Options of TRL, transformers and accelerate, read from their source files: importing those takes ten seconds."""

from __future__ import annotations

import ast
import builtins
import typing
from argparse import ArgumentParser
from dataclasses import field, make_dataclass
from enum import Enum
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_CONFIGS = (
    *("transformers/debug_utils.py", "transformers/trainer_utils.py", "transformers/training_args.py"),
    *("trl/trainer/base_config.py", "trl/trainer/{}_config.py"),
)
_OF_THE_PROGRAM = {"--help", "--module", "--no_python"}
"""Options of `accelerate launch` for the program to launch, which the command sets itself."""


@cache
def _tree(file: str) -> ast.Module:
    """Return the source of a file of an installed package: ``trl/trainer/sft_config.py``."""
    package, _, inside = file.partition("/")
    (folder,) = getattr(find_spec(package), "submodule_search_locations", None) or [""]
    return ast.parse((Path(folder) / inside).read_text(encoding="utf-8"))


def _literal(node: ast.expr | None) -> Any:
    """Return the value of a literal, or the literal entries of a mapping; None for everything else."""
    if isinstance(node, ast.Dict):
        pairs = ((_literal(key), _literal(value)) for key, value in zip(node.keys, node.values, strict=True))
        return {key: known for key, known in pairs if known}
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


@cache
def config_of(name: str, command: str, own: type) -> type:
    """Return a dataclass with the fields of `own` and of a config of TRL: ``("SFTConfig", "sft", Settings)``.

    Defaults are those that are literals, else None; types are those of Python and the enumerations, else text.
    """
    trees = [_tree(file.format(command)) for file in _CONFIGS]
    types = _Types({node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)})
    fields: dict[str, tuple[str, Any, Any]] = {}
    while name:
        for node in types.classes[name].body:
            if isinstance(node, ast.AnnAssign) and not (key := ast.unparse(node.target)).startswith("_"):
                words = {one.arg: one.value for one in getattr(node.value, "keywords", ())}
                extra = {**(_literal(words.get("metadata")) or {}), "help": ""}
                value = field(default=_literal(words.get("default", node.value)), metadata=extra)
                kind = eval(ast.unparse(node.annotation), {"__builtins__": {}}, types)  # noqa: S307 - installed code
                fields.setdefault(key, (key, kind, value))
        (name,) = [ast.unparse(base) for base in types.classes[name].bases] or [""]
    return make_dataclass(own.__name__, fields.values(), bases=(own,))


class _Types(dict[str, Any]):
    """Types by the names that annotations use."""

    def __init__(self, classes: dict[str, ast.ClassDef]) -> None:
        super().__init__()
        self.classes = classes

    def __missing__(self, name: str) -> Any:
        node = self.classes.get(name)
        if node is not None and any("Enum" in ast.unparse(base) for base in node.bases):
            members = [one for one in node.body if isinstance(one, ast.Assign)]
            return Enum(name, {ast.unparse(one.targets[0]): _literal(one.value) for one in members})
        return getattr(builtins, name, None) or getattr(typing, name, str)


def add_launch_options(parser: ArgumentParser) -> None:
    """Add the options of `accelerate launch`; their values are of Python's types and literal choices, or text."""
    add: Any = parser.add_argument
    for node in ast.walk(_tree("accelerate/commands/launch.py")):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            given = {one.arg: one.value for one in node.keywords}
            keywords = {key: _literal(given[key]) for key in {"action", "nargs", "choices", "dest"} & given.keys()}
            if "type" in given:
                keywords["type"] = getattr(builtins, ast.unparse(given["type"]), str)
            names = [name for name in map(_literal, node.args) if str(name).startswith("-")]
            if not _OF_THE_PROGRAM & {*names} and names:
                add(*dict.fromkeys((*names, *(name.replace("_", "-") for name in names))), **keywords)
