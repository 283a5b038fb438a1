"""Arguments of ``fastpack-trl sft``: TRL's parser and dataclasses, with every wrong value reported as one line.

TRL turns YAML values into argparse defaults, which argparse does not check unless they are strings. Types, choices and
names of the YAML are checked here first; what is valid then takes TRL's own way.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import types
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from fastpack_trl.errors import UserError, did_you_mean, one_line

if TYPE_CHECKING:
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments

    from fastpack_trl.config import FastSFTConfig

EPILOG = (
    "--config FILE reads a YAML whose keys are the options above; flags win over it. Options of `accelerate launch` "
    "(num_processes, mixed_precision, ...) and accelerate_config are accepted in both, `env` (a mapping of environment "
    "variables) in the YAML. --traceback shows the traceback of an error that is otherwise one line."
)
# `training_args.fsdp` is annotated `str | None`, but its __post_init__ takes these as well.
_ALSO_ACCEPTED: dict[str, tuple[type, ...]] = {"fsdp": (bool, list)}
# Text in these is the path of a JSON file; in the other mappings it is JSON.
_PATH_OR_MAPPING = {"accelerator_config", "deepspeed", "fsdp_config"}
_TYPE_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    dict: "a mapping",
}
_TRUE = {"true", "yes", "t", "y", "1"}
_FALSE = {"false", "no", "f", "n", "0"}
# These say which program is launched: that is ours to set.
_RESERVED_LAUNCH_OPTIONS = {"help", "module", "no_python", "training_script", "training_script_args"}


@dataclasses.dataclass(frozen=True, slots=True)
class SftArguments:
    """Everything one run needs: ``--num_processes 2 --max_steps 3`` -> ``launch=["--num_processes", "2"]``."""

    script: ScriptArguments
    training: FastSFTConfig
    model: ModelConfig
    mixture: DatasetMixtureConfig
    launch: list[str]
    """Options for `accelerate launch`, from the YAML and the command line."""
    own: list[str]
    """The command line without the flags in `launch`: what a launched process is given."""


def load_config(path: str) -> dict[str, Any]:
    """The mapping in the YAML file `path`.

    Raises:
        UserError: no such file, not UTF-8, a syntax error or an unsafe tag (with its line), or not a mapping.
    """
    import yaml

    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"config file {path!r} does not exist (looked for {Path(path).absolute()})") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"config file {path!r} cannot be read as UTF-8 text: {one_line(error)}") from error
    try:
        # Safe: a tag such as !!python/object is an error, never an object.
        config = yaml.safe_load(text)
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
        raise UserError(f"{path}: env: {variables!r} is not a mapping of variables, e.g. `env: {{OMP_NUM_THREADS: 1}}`")
    os.environ.update({str(name): str(value) for name, value in variables.items()})


def take_config(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """``["--config", "a.yaml", "--packing"]`` -> ``("a.yaml", ["--packing"])``; ``--config=a.yaml`` as well.

    Raises:
        UserError: ``--config`` without a file, or given twice.
    """
    paths: list[str] = []
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "--config":
            paths.append(next(words, ""))
        elif word.startswith("--config="):
            paths.append(word.removeprefix("--config="))
        else:
            rest.append(word)
    if len(paths) > 1:
        raise UserError(f"--config is given {len(paths)} times ({', '.join(paths)}): merge them into one file")
    if paths and (not paths[0] or paths[0].startswith("--")):
        raise UserError("--config needs a YAML file, e.g. --config sft.yaml")
    return (paths[0] if paths else None), rest


def make_parser(prog: str | None = None) -> Any:
    """TRL's parser over ScriptArguments, FastSFTConfig, ModelConfig and DatasetMixtureConfig."""
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser

    from fastpack_trl.config import FastSFTConfig

    class Parser(TrlParser):
        def error(self, message: str) -> NoReturn:
            raise UserError(f"{message} (see `fastpack-trl sft --help`)")

    parser = Parser(
        (ScriptArguments, FastSFTConfig, ModelConfig, DatasetMixtureConfig),
        prog=prog or "fastpack-trl sft",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    hints = _hints(parser)
    for action in parser._actions:
        if {dict, str} <= _member_types(hints.get(action.dest)) and action.dest not in _PATH_OR_MAPPING:
            action.type = _mapping_text
    return parser


def _hints(parser: Any) -> dict[str, object]:
    hints: dict[str, object] = {}
    for dataclass_type in parser.dataclass_types:
        hints |= get_type_hints(dataclass_type)
    return hints


def _mapping_text(text: str) -> str:
    """JSON for a mapping, unchanged (the configuration class parses it). TRL keeps other text until it fails later."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error}), e.g. '{{\"key\": 1}}'") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a mapping, e.g. '{{\"key\": 1}}'")
    return text


def _launch_options() -> dict[str, argparse.Action]:
    """Name without dashes -> option of `accelerate launch`; ``accelerate_config`` is TRL's addition."""
    from accelerate.commands.launch import launch_command_parser

    options: dict[str, argparse.Action] = {}
    for action in launch_command_parser()._actions:
        if action.dest not in _RESERVED_LAUNCH_OPTIONS:
            options |= {name[2:]: action for name in action.option_strings if name.startswith("--")}
    extra = argparse.ArgumentParser().add_argument("--accelerate_config", "--accelerate-config")
    return options | {"accelerate_config": extra, "accelerate-config": extra}


def _split_flags(
    argv: Sequence[str], known: set[str], launch: Mapping[str, argparse.Action]
) -> tuple[list[str], list[str]]:
    """``["--num_processes", "2", "--packing"]`` -> ``(["--packing"], ["--num_processes", "2"])``.

    Raises:
        UserError: a flag that is neither ours nor of `accelerate launch`, or one without its value.
    """
    own: list[str] = []
    launched: list[str] = []
    words = iter(argv)
    for word in words:
        name, equals, _ = word.partition("=")
        if not word.startswith("--") or name in known:
            own.append(word)  # a value, or one of our options
            continue
        action = launch.get(name[2:])
        if action is None:
            valid = {*known, *(f"--{option}" for option in launch)}
            hint = did_you_mean(name, valid) or "; `fastpack-trl sft --help` lists the options"
            raise UserError(f"unknown option {name!r}{hint}")
        launched.append(word)
        if action.nargs != 0 and not equals:
            value = next(words, None)
            if value is None:
                raise UserError(f"option {name!r} needs a value")
            launched.append(value)
    return own, launched


def _launch_words(name: str, value: object, action: argparse.Action, path: str) -> list[str]:
    """A YAML key of `accelerate launch` as flags: ``num_processes: 2`` -> ``["--num_processes", "2"]``."""
    if isinstance(value, list | dict):
        raise UserError(
            f"{path}: {name}: {value!r} is not a single value: give one, as for `accelerate launch --{name}`"
        )
    if value is None:
        return []
    if action.nargs != 0:
        return [f"--{name}", str(value)]
    # TRL passes "--multi_gpu True", which accelerate reads as the name of the script to launch.
    wanted = _as_bool(value)
    if wanted is None:
        raise UserError(f"{path}: {name}: {value!r} is not true or false")
    return [f"--{name}"] if wanted else []


def _as_bool(value: object) -> bool | None:
    if isinstance(value, int | str):
        word = str(value).lower()
        return True if word in _TRUE else False if word in _FALSE else None
    return None


def _member_types(hint: object) -> set[object]:
    """``dict[str, Any] | str | None`` -> ``{dict, str, NoneType}``; an enum and a Literal count as text."""
    if get_origin(hint) in (Union, types.UnionType):
        return set().union(*(_member_types(member) for member in get_args(hint)))
    if get_origin(hint) is Literal:
        return {type(value) for value in get_args(hint)}
    plain = get_origin(hint) or hint
    return {str} if isinstance(plain, type) and issubclass(plain, Enum) else {plain}


def _convert(value: str | float | bool, allowed: set[object]) -> Any:
    """`value` as the first type of `allowed` that takes it. YAML reads ``2e-4`` as text: numbers are parsed here.

    Raises:
        ValueError: none takes it.
    """
    if type(value) in allowed:
        return value
    if bool in allowed and (truth := _as_bool(value)) is not None:
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


def _checked(name: str, value: Any, hint: object, action: argparse.Action, path: str) -> Any:
    allowed = _member_types(hint) | set(_ALSO_ACCEPTED.get(name, ()))
    plain: set[object] = {kind for kind in _TYPE_NAMES if kind in allowed}
    if not plain or (value is None and not plain <= {int, float}):
        return value  # no plain type to check (parallelism_config); an empty value means "not set", as in TRL
    choices = list(action.choices or ())
    if value is False and "no" in choices:
        value = "no"  # `eval_strategy: no` without quotes
    expected = " or ".join(_TYPE_NAMES[kind] for kind in _TYPE_NAMES if kind in plain)
    default = "" if action.default in (None, argparse.SUPPRESS) else f" (default: {_plain(action.default)!r})"
    try:
        if isinstance(value, list | dict):
            if type(value) not in allowed:
                raise ValueError(value)
        elif value is not None or type(None) not in allowed:
            value = _convert(value, plain)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f"{path}: {name}: {_plain(value)!r} is not {expected}: correct it or remove it{default}"
        ) from error
    if choices and isinstance(value, str | int | float) and value not in choices:
        known = [str(choice) for choice in choices]
        raise UserError(f"{path}: {name}: {value!r} is not one of {', '.join(known)}{did_you_mean(value, known)}")
    return value


def _plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else value


def _check_entries(entries: object, path: str) -> None:
    from trl.scripts.utils import DatasetConfig

    names = [field.name for field in dataclasses.fields(DatasetConfig)]
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"{path}: datasets: {entries!r} is not a list of entries, e.g. `- path: data.jsonl`")
    for entry in entries:
        for key in entry:
            if key not in names:
                raise UserError(
                    f"{path}: datasets: unknown key {key!r}{did_you_mean(key, names)} (keys: {', '.join(names)})"
                )
        if not isinstance(entry.get("path"), str):
            raise UserError(f"{path}: datasets: entry {entry!r} has no path: add `path: data.jsonl` or a hub name")


def _apply_config(parser: Any, config: dict[str, Any], path: str, launch: Mapping[str, argparse.Action]) -> list[str]:
    """Check the YAML values and make them the parser's defaults; returns the options for `accelerate launch`."""
    hints = _hints(parser)
    actions: dict[str, argparse.Action] = {}
    for action in parser._actions:
        actions.setdefault(action.dest, action)  # the first: `--no_x` shares the name of `--x`
    names = {name for name in actions if name in hints}
    words: list[str] = []
    values: dict[str, Any] = {}
    for name, value in config.items():
        if name == "datasets":
            _check_entries(value, path)
            values[name] = value
        elif name in names:
            values[name] = _checked(name, value, hints[name], actions[name], path)
        elif name in launch:
            words += _launch_words(name, value, launch[name], path)
        else:
            valid = {*names, *launch, "env"}
            hint = did_you_mean(name, valid) or "; `fastpack-trl sft --help` lists the names"
            raise UserError(f"{path}: unknown key {name!r}{hint}")
    parser.set_defaults_with_config(**values)
    return words


def _accelerate_file(words: list[str]) -> list[str]:
    """``--accelerate_config zero2`` -> ``--config_file .../zero2.yaml``, from a path or by the names TRL ships.

    Raises:
        UserError: neither a file nor one of these names.
    """
    from importlib.resources import files

    out: list[str] = []
    remaining = iter(words)
    for word in remaining:
        name, equals, value = word.partition("=")
        if name not in ("--accelerate_config", "--accelerate-config"):
            out.append(word)
            continue
        value = value if equals else next(remaining)
        shipped = {Path(str(file)).stem: str(file) for file in files("trl.accelerate_configs").iterdir()}
        shipped.pop("__init__", None)
        if not Path(value).is_file() and value not in shipped:
            raise UserError(f"accelerate_config {value!r} is neither a file nor one of {', '.join(sorted(shipped))}")
        out = ["--config_file", value if Path(value).is_file() else shipped[value], *out]
    return out


def parse(argv: Sequence[str], *, may_launch: bool = True) -> SftArguments:
    """Read the YAML and the command line.

    Args:
        may_launch: whether flags of `accelerate launch` can still have an effect. In the YAML they are accepted either
            way: the launched processes read the same file.

    Raises:
        UserError: a file, name or value that is wrong, with the nearest valid name where there is one; a launch flag
            without effect.
        ValueError: raised by the configuration classes for values that do not go together.
    """
    path, flags = take_config(argv)
    # Before torch is imported: a typing error shows at once, and `env` may hold what torch reads on import.
    config = load_config(path) if path is not None else {}
    if "env" in config:
        set_environment(config.pop("env"), str(path))
    parser = make_parser()
    launch = _launch_options()
    own, launch_flags = _split_flags(flags, set(parser._option_string_actions), launch)
    if launch_flags and not may_launch:
        raise UserError(
            f"{' '.join(launch_flags)}: this process is already running, so options of `accelerate launch` have no "
            "effect here: give them to the launcher"
        )
    words = _apply_config(parser, config, str(path), launch)
    *parsed, unknown = parser.parse_args_into_dataclasses(
        args=own, return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        raise UserError(f"unexpected argument {unknown[0]!r}: options start with --, e.g. --max_length 1024")
    script, training, model, mixture = parsed
    return SftArguments(
        script=script,
        training=training,
        model=model,
        mixture=mixture,
        launch=_accelerate_file([*words, *launch_flags]),
        own=[*(["--config", path] if path is not None else []), *own],
    )
