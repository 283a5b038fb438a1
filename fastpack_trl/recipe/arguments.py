"""Arguments of ``fastpack-trl sft``: TRL's parser and dataclasses, with every wrong value reported as one line.

Names are checked here, YAML values in `recipe.yaml`; valid values then go through TRL's own parser.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_type_hints

from fastpack_trl.errors import UserError, naming_keys, shown
from fastpack_trl.recipe.help import COMMAND_OPTIONS, meant, write_help
from fastpack_trl.recipe.yaml import as_bool, check_entries, checked_value, load_config, member_types, set_environment

if TYPE_CHECKING:
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments

    from fastpack_trl.config import FastSFTConfig

# Text in these is the path of a JSON file; in the other mappings it is JSON.
_PATH_OR_MAPPING = {"accelerator_config", "deepspeed", "fsdp_config"}
_COUNTS = ("num_processes", "num_machines")
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


def take_config(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split off ``--config``: ``["--config", "a.yaml", "--packing"]`` -> ``("a.yaml", ["--packing"])``.

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
    """Return TRL's parser over ScriptArguments, FastSFTConfig, ModelConfig and DatasetMixtureConfig."""
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser

    from fastpack_trl.config import FastSFTConfig

    class Parser(TrlParser):
        def error(self, message: str) -> NoReturn:
            # "argument --max_steps/--max-steps: ..." names an option twice.
            said = re.sub(r"^argument (--\w+)\S*: ", r"\1: ", message)
            raise UserError(f"{said} (see `fastpack-trl sft --help`)")

        def format_help(self) -> str:
            return write_help(self)

    parser = Parser(
        (ScriptArguments, FastSFTConfig, ModelConfig, DatasetMixtureConfig),
        prog=prog or "fastpack-trl sft",
        allow_abbrev=False,
    )
    hints = _hints(parser)
    for action in parser._actions:
        if {dict, str} <= member_types(hints.get(action.dest)):
            action.type = _path_or_mapping_text if action.dest in _PATH_OR_MAPPING else _mapping_text
    return parser


def _hints(parser: Any) -> dict[str, object]:
    hints: dict[str, object] = {}
    for dataclass_type in parser.dataclass_types:
        hints |= get_type_hints(dataclass_type)
    return hints


def _mapping_text(text: str) -> str:
    """Return JSON of a mapping as it is, for the configuration class to parse; refuse other text before TRL does."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not JSON ({error}), e.g. '{{\"key\": 1}}'") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a mapping, e.g. '{{\"key\": 1}}'")
    return text


def _path_or_mapping_text(text: str) -> str:
    return _mapping_text(text) if text.startswith("{") else text  # the test that transformers makes


def _launch_options() -> dict[str, argparse.Action]:
    """Return the options of `accelerate launch` by name without dashes; ``accelerate_config`` is TRL's addition."""
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
    """Split flags into ours and launch options: ``(["--packing"], ["--num_processes", "2"])``.

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
            command = (option.partition(" ")[0] for option in COMMAND_OPTIONS)
            hint = (
                meant(name, {*known, *command, *(f"--{option}" for option in launch)})
                or "; `fastpack-trl sft --help` lists the options"
            )
            raise UserError(f"unknown option {shown(name)}{hint}")
        launched.append(word)
        if action.nargs != 0 and not equals:
            value = next(words, None)
            if value is None:
                raise UserError(f"option {shown(name)} needs a value")
            launched.append(value)
        _check_count(name, name, launched[-1].rpartition("=")[2])
    return own, launched


def _check_count(said: str, name: str, value: str) -> None:
    """Refuse no process and no machine: accelerate trains on one then, without a word."""
    if name.removeprefix("--").replace("-", "_") in _COUNTS and re.fullmatch(r"0|-\d+", value):
        raise UserError(f"{said} {value} is below 1: give 1 or more, or leave it out")


def _launch_words(name: str, value: object, action: argparse.Action, path: str) -> list[str]:
    """Turn a YAML key of `accelerate launch` into flags: ``num_processes: 2`` -> ``["--num_processes", "2"]``."""
    if isinstance(value, list | dict):
        raise UserError(
            f"{path}: {name}: {shown(value)} is not a single value: give one, as for `accelerate launch --{name}`"
        )
    if value is None:
        return []
    if action.nargs != 0:
        _check_count(f"{path}: {name}", name, str(value))
        return [f"--{name}", str(value)]
    # TRL passes "--multi_gpu True", which accelerate reads as the name of the script to launch.
    wanted = as_bool(value)
    if wanted is None:
        raise UserError(f"{path}: {name}: {shown(value)} is not true or false")
    return [f"--{name}"] if wanted else []


def _apply_config(parser: Any, config: dict[str, Any], path: str, launch: Mapping[str, argparse.Action]) -> list[str]:
    """Check the YAML values and make them the parser's defaults; return the options for `accelerate launch`."""
    from fastpack_trl.config import _CHOICES, normalise_choice

    hints = _hints(parser)
    actions: dict[str, argparse.Action] = {}
    for action in parser._actions:
        actions.setdefault(action.dest, action)  # the first: `--no_x` shares the name of `--x`
    names = {name for name in actions if name in hints}
    words: list[str] = []
    values: dict[str, Any] = {}
    for name, value in config.items():
        if name == "datasets":
            check_entries(value, path)
            values[name] = value
        elif name in _CHOICES:
            try:
                values[name] = normalise_choice(name, value, _CHOICES[name])
            except ValueError as error:
                raise UserError(f"{path}: {error}") from error
        elif name in names:
            values[name] = checked_value(name, value, hints[name], actions[name], path)
        elif name in launch:
            words += _launch_words(name, value, launch[name], path)
        else:
            valid = {*names, *launch, "env"}
            hint = meant(name, valid) or "; `fastpack-trl sft --help` lists the names"
            raise UserError(f"{path}: unknown key {shown(name)}{hint}")
    parser.set_defaults_with_config(**values)
    return words


def _accelerate_file(words: list[str]) -> list[str]:
    """Turn ``--accelerate_config zero2`` into ``--config_file .../zero2.yaml``; TRL's own files go by their name.

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
            raise UserError(
                f"accelerate_config {shown(value)} is neither a file nor one of {', '.join(sorted(shipped))}"
            )
        if Path(value).is_file() and not value.endswith(".json"):
            load_config(value)  # accelerate reads it after us, and says less about what is wrong
        out = ["--config_file", value if Path(value).is_file() else shipped[value], *out]
    return out


def parse(argv: Sequence[str], *, may_launch: bool = True) -> SftArguments:
    """Read the YAML and the command line.

    Args:
        may_launch: accept flags of `accelerate launch`. In the YAML they are accepted either way: the launched
            processes read the same file.

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
    with _without_rename_warning():
        return _parse(path, config, flags, may_launch)


@contextmanager
def _without_rename_warning() -> Iterator[None]:
    """Silence a warning that no user has caused, so that an error is one line."""
    with warnings.catch_warnings():
        # transformers 5.23 renames this field; TRL's SFTConfig sets it by default and documents the old name.
        warnings.filterwarnings("ignore", message="`gradient_checkpointing` is deprecated", category=FutureWarning)
        yield


@contextmanager
def _bf16_needs_a_gpu() -> Iterator[None]:
    """Name the fields behind the error of transformers, and what to set."""
    try:
        yield
    except ValueError as error:
        if "support bf16/gpu" not in str(error):
            raise
        import torch

        if torch.cuda.is_available():
            raise UserError("bf16 is on, which this GPU does not have: set bf16: false and fp16: true") from error
        raise UserError(
            "bf16 is on and there is no GPU here: set use_cpu: true and bf16: false, or run on a GPU"
        ) from error


def _check_stray(parser: Any, own: Sequence[str]) -> None:
    _, unknown = parser.parse_known_args(own)
    if not unknown:
        return
    remedy = "options start with --, e.g. --max_length 1024"
    if unknown[0].endswith((".yaml", ".yml")):
        remedy = f"did you mean --config {unknown[0]}?"
    raise UserError(f"unexpected argument {shown(unknown[0])}: {remedy}")


def _parse(path: str | None, config: dict[str, Any], flags: list[str], may_launch: bool) -> SftArguments:
    parser = make_parser()
    launch = _launch_options()
    own, launch_flags = _split_flags(flags, set(parser._option_string_actions), launch)
    if launch_flags and not may_launch:
        raise UserError(
            f"{' '.join(launch_flags)}: this process is already running, so options of `accelerate launch` have no "
            "effect here: give them to the launcher"
        )
    words = _apply_config(parser, config, str(path), launch)
    _check_stray(parser, own)  # before the values: without the YAML that was meant, those are wrong as well
    with _bf16_needs_a_gpu(), naming_keys(config):
        parsed = parser.parse_args_into_dataclasses(args=own, look_for_args_file=False)
    script, training, model, mixture = parsed
    return SftArguments(
        script=script,
        training=training,
        model=model,
        mixture=mixture,
        launch=_accelerate_file([*words, *launch_flags]),
        own=[*(["--config", path] if path is not None else []), *own],
    )
