"""The YAML of ``fastpack-trl sft``: reading it, and checking each value against the field it sets.

TRL turns YAML values into argparse defaults, which argparse does not check unless they are strings; so it happens here.
"""

from __future__ import annotations

import argparse
import os
import types
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fastpack_trl.errors import UserError, did_you_mean, one_line, shown
from fastpack_trl.recipe.paths import configs_folder, did_you_mean_path

# `training_args.fsdp` is annotated `str | None`, but its __post_init__ takes these as well.
_ALSO_ACCEPTED: dict[str, tuple[type, ...]] = {"fsdp": (bool, list)}
_TYPE_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    dict: "a mapping",
}
_LARGEST_FILE = 1_000_000
_TRUE = {"true", "yes", "t", "y", "1"}
_FALSE = {"false", "no", "f", "n", "0"}


def load_config(path: str) -> dict[str, Any]:
    """Return the mapping in the YAML file `path`.

    Raises:
        UserError: no such file, not UTF-8, a syntax error or an unsafe tag (with its line), or not a mapping.
    """
    import yaml

    from fastpack_trl.recipe.yaml_loader import load_yaml

    file = Path(path).expanduser()
    try:
        if file.stat().st_size > _LARGEST_FILE:
            raise UserError(
                f"config file {path!r} has {file.stat().st_size:,} bytes: name the YAML, not data or weights"
            )
        text = file.read_text(encoding="utf-8")
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
    try:
        config = load_yaml(text)
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


def set_environment(variables: object, path: str) -> None:
    """Set the variables of the YAML key ``env``.

    Raises:
        UserError: `variables` is not a mapping of names to scalars.
    """
    if not isinstance(variables, Mapping) or any(isinstance(value, list | dict) for value in variables.values()):
        raise UserError(
            f"{path}: env: {shown(variables)} is not a mapping of variables, e.g. `env: {{OMP_NUM_THREADS: 1}}`"
        )
    os.environ.update({str(name): str(value) for name, value in variables.items()})


def as_bool(value: object) -> bool | None:
    """Read the words that TRL's parser takes for a boolean, and 0 and 1; None for anything else."""
    if isinstance(value, int | str):
        word = str(value).lower()
        return True if word in _TRUE else False if word in _FALSE else None
    return None


def member_types(hint: object) -> set[object]:
    """Return the types in a hint: ``dict[str, Any] | str | None`` -> ``{dict, str, NoneType}``; an enum is text."""
    if get_origin(hint) in (Union, types.UnionType):
        return set().union(*(member_types(member) for member in get_args(hint)))
    if get_origin(hint) is Literal:
        return {type(value) for value in get_args(hint)}
    plain = get_origin(hint) or hint
    return {str} if isinstance(plain, type) and issubclass(plain, Enum) else {plain}


def names_only(hint: object) -> bool:
    """Return True if lists of a field hold text: ``list[str] | str | None``."""
    return list[str] in (hint, *get_args(hint))


def _convert(value: str | float | bool, allowed: set[object]) -> Any:
    """Convert to the first type of `allowed` that takes the value. YAML reads ``2e-4`` as text: it is parsed here.

    Raises:
        ValueError: none takes it.
    """
    if type(value) in allowed:
        return value
    if bool in allowed and (truth := as_bool(value)) is not None:
        return truth
    if str in allowed and dict not in allowed:
        # An unquoted on/off is a bool for YAML; the fields that have these words turn it back.
        return value if isinstance(value, bool) else str(value)
    if list in allowed and isinstance(value, str):
        return value  # TRL takes one name for a list: lora_target_modules: all-linear
    if int in allowed and not isinstance(value, bool) and float(value).is_integer():
        return int(float(value))
    if float in allowed and not isinstance(value, bool):
        return value if isinstance(value, int) else float(value)
    raise ValueError(value)


def checked_value(name: str, value: Any, hint: object, action: argparse.Action, path: str) -> Any:
    """Return a YAML value in the type of its field: ``learning_rate: 2e-4`` (text) -> ``0.0002``.

    Args:
        hint: the type annotation of the field.
        action: the option that TRL's parser made of the field; has its default and choices.
        path: the YAML file, for the message.

    Raises:
        UserError: another type, or none of the choices.
    """
    allowed = member_types(hint) | set(_ALSO_ACCEPTED.get(name, ()))
    plain: set[object] = {kind for kind in _TYPE_NAMES if kind in allowed}
    if not plain or (value is None and not plain <= {int, float}):
        return value  # no plain type to check (parallelism_config); an empty value means "not set", as in TRL
    choices = list(action.choices or ())
    if value is False and "no" in choices:
        value = "no"  # `eval_strategy: no` without quotes
    expected = " or ".join(_TYPE_NAMES[kind] for kind in _TYPE_NAMES if kind in plain)
    if names_only(hint):
        expected = expected.replace("a list", "a list of names")
    default = "" if action.default in (None, argparse.SUPPRESS) else f" (default: {shown(_plain(action.default))})"
    try:
        if isinstance(value, list | dict):
            if type(value) not in allowed:
                raise ValueError(value)
            if names_only(hint) and any(not isinstance(item, str | list) for item in value):
                raise ValueError(value)
        elif value is not None or type(None) not in allowed:
            value = _convert(value, plain)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f"{path}: {name}: {shown(_plain(value))} is not {expected}: correct it or remove it{default}"
        ) from error
    if choices and isinstance(value, str | int | float) and value not in choices:
        known = [str(choice) for choice in choices]
        near = did_you_mean(value, known)  # before the list, which may be cut
        raise UserError(f"{path}: {name}: {shown(value)} is not one of its choices{near}: {', '.join(known)}")
    return value


def _plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else value


def check_entries(entries: object, path: str) -> None:
    """Check that ``datasets`` is a list of mappings with ``path`` and other keys that TRL knows.

    Raises:
        UserError: names the entry or key that is not.
    """
    from trl.scripts.utils import DatasetConfig

    hints = get_type_hints(DatasetConfig)
    names = list(hints)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"{path}: datasets: {shown(entries)} is not a list of entries, e.g. `- path: data.jsonl`")
    for entry in entries:
        for key, value in entry.items():
            if key not in names:
                raise UserError(
                    f"{path}: datasets: unknown key {shown(key)}{did_you_mean(key, names)} (keys: {', '.join(names)})"
                )
            if key != "path":
                checked_value(key, value, hints[key], argparse.Action([], key), f"{path}: datasets")
        if not isinstance(entry.get("path"), str):
            raise UserError(f"{path}: datasets: entry {shown(entry)} has no path: add `path: data.jsonl` or a hub name")
