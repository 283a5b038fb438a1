"""Each value of the YAML checked against the field it sets.

TRL turns YAML values into argparse defaults, which argparse does not check unless they are strings; so it happens here.
"""

from __future__ import annotations

import argparse
import types
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fastpack_trl.errors import UserError, did_you_mean, short_repr

# `training_args.fsdp` is annotated `str | None`, but its __post_init__ takes these as well.
_ALSO_ACCEPTED: dict[str, set[object]] = {"fsdp": {bool, list}}
_TYPE_NAMES = {
    int: "an integer", float: "a number", bool: "true or false", str: "text", list: "a list", dict: "a mapping",
}  # fmt: skip
_WORDS = dict.fromkeys(("true", "yes", "t", "y", "1"), True) | dict.fromkeys(("false", "no", "f", "n", "0"), False)


def as_bool(value: object) -> bool | None:
    """Read the words that TRL's parser takes for a boolean, and 0 and 1; None for anything else."""
    return _WORDS.get(str(value).lower()) if isinstance(value, int | str) else None


def member_types(hint: object) -> set[object]:
    """Return the types in a hint: ``dict[str, Any] | str | None`` -> ``{dict, str, NoneType}``; an enum is text."""
    if get_origin(hint) in (Union, types.UnionType):
        return set().union(*(member_types(member) for member in get_args(hint)))
    if get_origin(hint) is Literal:
        return {type(value) for value in get_args(hint)}
    plain = get_origin(hint) or hint
    return {str} if isinstance(plain, type) and issubclass(plain, Enum) else {plain}


def _converted(value: Any, allowed: set[object], names: bool) -> Any:
    """Convert to the first type of `allowed` that takes the value: YAML reads ``2e-4`` as text."""
    if type(value) in allowed:
        if names and isinstance(value, list) and not all(isinstance(item, str | list) for item in value):
            raise ValueError(value)  # a list of names has text in it
        return value
    if isinstance(value, list | dict):
        raise ValueError(value)
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

    Raises `UserError` for a value of another type than `hint`, or that is none of the choices of `action`, the option
    that TRL's parser made of the field.
    """
    allowed = member_types(hint) | _ALSO_ACCEPTED.get(name, set())
    plain = [kind for kind in _TYPE_NAMES if kind in allowed]
    if not plain or (value is None and (type(None) in allowed or not {int, float}.issuperset(plain))):
        return value  # no plain type to check (parallelism_config); an empty value means "not set", as in TRL
    choices = list(action.choices or ())
    if value is False and "no" in choices:
        value = "no"  # `eval_strategy: no` without quotes
    names = list[str] in (hint, *get_args(hint))
    try:
        value = _converted(value, set(plain), names)
    except (TypeError, ValueError, OverflowError) as error:
        expected = " or ".join(_TYPE_NAMES[kind] for kind in plain)
        if names:
            expected = expected.replace("a list", "a list of names")
        unset = action.default in (None, argparse.SUPPRESS)
        default = "" if unset else f" (default: {short_repr(getattr(action.default, 'value', action.default))})"
        raise UserError(
            f"{path}: {name}: {short_repr(value)} is not {expected}: correct it or remove it{default}"
        ) from error
    if choices and isinstance(value, str | int | float) and value not in choices:
        known = [str(choice) for choice in choices]
        near = did_you_mean(value, known)  # before the list, which may be cut
        raise UserError(f"{path}: {name}: {short_repr(value)} is not one of its choices{near}: {', '.join(known)}")
    return value


def check_entries(entries: object, path: str) -> None:
    """Check that ``datasets`` is a list of mappings with ``path`` and keys that TRL knows; raise `UserError` if not."""
    from trl.scripts.utils import DatasetConfig

    hints = get_type_hints(DatasetConfig)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"{path}: datasets: {short_repr(entries)} is not a list of entries, e.g. `- path: data.jsonl`")
    for entry in entries:
        for key, value in entry.items():
            if key not in hints:
                raise UserError(
                    f"{path}: datasets: unknown key {short_repr(key)}{did_you_mean(key, hints)} "
                    f"(keys: {', '.join(hints)})"
                )
            if key != "path":
                checked_value(key, value, hints[key], argparse.Action([], key), f"{path}: datasets")
        if not isinstance(entry.get("path"), str):
            raise UserError(
                f"{path}: datasets: entry {short_repr(entry)} has no path: add `path: data.jsonl` or a hub name"
            )
