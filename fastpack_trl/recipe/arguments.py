"""Arguments of the commands that train: TRL's parser and dataclasses, with every wrong value reported as one line.

Names are checked here, YAML values in `recipe.values`; valid values then go through TRL's own parser.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_type_hints

from fastpack_trl.errors import UserError, naming_keys, short_repr
from fastpack_trl.recipe.foreign import tool_of
from fastpack_trl.recipe.formats import DataArguments
from fastpack_trl.recipe.help import COMMAND_OPTIONS, meant, write_help
from fastpack_trl.recipe.methods import SFT, Method
from fastpack_trl.recipe.values import as_bool, check_entries, checked_value, member_types
from fastpack_trl.recipe.yaml import load_config, set_environment

if TYPE_CHECKING:
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments

# Text in these is the path of a JSON file; in the other mappings it is JSON.
_PATH_OR_MAPPING = {"accelerator_config", "deepspeed", "fsdp_config"}
_COUNTS = ("num_processes", "num_machines")
# These say which program is launched: that is ours to set.
_RESERVED_LAUNCH_OPTIONS = {"help", "module", "no_python", "training_script", "training_script_args"}


@dataclasses.dataclass(frozen=True, slots=True)
class Arguments:
    """Everything one run needs: ``--num_processes 2 --max_steps 3`` -> ``launch=["--num_processes", "2"]``."""

    method: Method
    script: ScriptArguments
    training: Any
    """The configuration of the method."""
    model: ModelConfig
    mixture: DatasetMixtureConfig
    data: DataArguments
    launch: list[str]
    """Options for `accelerate launch`, from the YAML and the command line."""
    own: list[str]
    """The command line without the flags in `launch`: what a launched process is given."""


def parse(argv: Sequence[str], method: Method = SFT, *, may_launch: bool = True) -> Arguments:
    """Read the YAML and the command line.

    Args:
        may_launch: accept flags of `accelerate launch`. In the YAML they are accepted either way: the launched
            processes read the same file.

    Raises:
        UserError: a file, name or value that is wrong, with the nearest valid name where there is one; a launch flag
            without effect.
        ValueError: raised by the configuration classes for values that do not go together.
    """
    paths, flags = split_off("config", argv)
    if len(paths) > 1:
        raise UserError(f"--config is given {len(paths)} times ({', '.join(paths)}): merge them into one file")
    if paths == [""]:
        raise UserError("--config needs a YAML file, e.g. --config sft.yaml")
    # Before torch is imported: a typing error shows at once, and `env` may hold what torch reads on import.
    config = load_config(paths[0]) if paths else {}
    path = "".join(paths)
    if "env" in config:
        set_environment(config.pop("env"), path)
    with warnings.catch_warnings():
        # transformers 5.23 renames this field; TRL's SFTConfig sets it by default and documents the old name.
        warnings.filterwarnings("ignore", message="`gradient_checkpointing` is deprecated", category=FutureWarning)
        parser = make_parser(method)
        launch = _launch_options()
        own, launch_flags = _split_flags(flags, parser, launch)
        if launch_flags and not may_launch:
            raise UserError(
                f"{' '.join(launch_flags)}: this process is already running, so options of `accelerate launch` have no "
                "effect here: give them to the launcher"
            )
        words = _apply_config(parser, config, path, launch)
        _check_stray(parser, own)  # before the values: without the YAML that was meant, those are wrong as well
        with _bf16_needs_a_gpu(), naming_keys(config):
            script, training, model, mixture, data = parser.parse_args_into_dataclasses(own, look_for_args_file=False)
    launch_words = _accelerate_file([*words, *launch_flags])
    own = [*(["--config", path] if path else []), *own]
    return Arguments(method, script, training, model, mixture, data, launch_words, own)


def as_flags(values: Mapping[str, object]) -> list[str]:
    """Return values by name as words of a command line: ``{"seed": 1}`` -> ``["--seed", "1"]``."""
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def make_parser(method: Method = SFT) -> Any:
    """Return TRL's parser over ScriptArguments, the method's configuration, ModelConfig and DatasetMixtureConfig."""
    from trl import TrlParser

    class Parser(TrlParser):
        def error(self, message: str) -> NoReturn:
            # "argument --max_steps/--max-steps: ..." names an option twice.
            said = re.sub(r"^argument (--\w+)\S*: ", r"\1: ", message)
            raise UserError(f"{said} (see `{self.prog} --help-all`)")

        def format_help(self) -> str:
            return write_help(self)

    parser = Parser(method.dataclasses(), prog=f"fastpack-trl {method.command}", allow_abbrev=False)
    hints = _hints(parser)
    for action in parser._actions:
        if {dict, str} <= member_types(hints.get(action.dest)):
            action.type = _path_or_mapping_text if action.dest in _PATH_OR_MAPPING else _mapping_text
    return parser


def _hints(parser: Any) -> dict[str, object]:
    return {name: hint for kind in parser.dataclass_types for name, hint in get_type_hints(kind).items()}


def _mapping_text(text: str) -> str:
    """Return JSON of a mapping as it is, for the configuration class to parse; refuse other text before TRL does."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{short_repr(text)} is not JSON ({error}), e.g. '{{\"key\": 1}}'") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{short_repr(text)} is not a mapping, e.g. '{{\"key\": 1}}'")
    return text


def _path_or_mapping_text(text: str) -> str:
    return _mapping_text(text) if text.startswith("{") else text  # the test that transformers makes


def split_off(name: str, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the values of an option, empty text for one that lacks its value, and the other words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    spellings = {f"--{name}": None, f"--{name.replace('_', '-')}": None}
    parser.add_argument(*spellings, dest="values", action="append", nargs="?", const="", default=[])
    found, rest = parser.parse_known_args(words)
    return found.values, rest


def _launch_options() -> dict[str, argparse.Action]:
    """Return the options of `accelerate launch` by name without dashes; ``accelerate_config`` is TRL's addition."""
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    parser.add_argument("--accelerate_config", "--accelerate-config")
    return {
        name.removeprefix("--"): action
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--") and action.dest not in _RESERVED_LAUNCH_OPTIONS
    }


def _split_flags(
    argv: Sequence[str], parser: Any, launch: Mapping[str, argparse.Action]
) -> tuple[list[str], list[str]]:
    """Split flags into ours and launch options: ``(["--packing"], ["--num_processes", "2"])``."""
    from fastpack_trl.config import removal

    known = set(parser._option_string_actions)
    own: list[str] = []
    launched: list[str] = []
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if not word.startswith("--") or name in known:
            own.append(word)  # a value, or one of our options
            continue
        action = launch.get(name[2:])
        if action is None:
            if gone := removal(name[2:].replace("-", "_")):
                raise UserError(gone)
            command = (option.partition(" ")[0] for option in COMMAND_OPTIONS)
            near = meant(name, {*known, *command, *(f"--{option}" for option in launch)})
            raise UserError(
                f"unknown option {short_repr(name)}{near or f'; `{parser.prog} --help-all` lists the options'}"
            )
        launched.append(word)
        if action.nargs != 0 and not equals:
            value = next(words, "")
            if not value:
                raise UserError(f"option {short_repr(name)} needs a value")
            launched.append(value)
        _check_count(name, name, value)
    return own, launched


def _check_count(said: str, name: str, value: str) -> None:
    """Refuse no process and no machine: accelerate trains on one then, without a word."""
    if name.removeprefix("--").replace("-", "_") in _COUNTS and re.fullmatch(r"0|-\d+", value):
        raise UserError(f"{said} {value} is below 1: give 1 or more, or leave it out")


def _launch_words(name: str, value: object, action: argparse.Action, path: str) -> list[str]:
    """Turn a YAML key of `accelerate launch` into flags: ``num_processes: 2`` -> ``["--num_processes", "2"]``."""
    if isinstance(value, list | dict):
        raise UserError(
            f"{path}: {name}: {short_repr(value)} is not a single value: give one, as for `accelerate launch --{name}`"
        )
    if value is None:
        return []
    if action.nargs != 0:
        _check_count(f"{path}: {name}", name, str(value))
        return [f"--{name}", str(value)]
    # TRL passes "--multi_gpu True", which accelerate reads as the name of the script to launch.
    wanted = as_bool(value)
    if wanted is None:
        raise UserError(f"{path}: {name}: {short_repr(value)} is not true or false")
    return [f"--{name}"] if wanted else []


def _apply_config(parser: Any, config: dict[str, Any], path: str, launch: Mapping[str, argparse.Action]) -> list[str]:
    """Check the YAML values and make them the parser's defaults; return the options for `accelerate launch`."""
    from fastpack_trl.config import _CHOICES, normalise_choice, removal

    hints = _hints(parser)
    # Reversed, so that the first one stays: `--no_x` shares the name of `--x`.
    actions = {action.dest: action for action in reversed(parser._actions) if action.dest in hints}
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
        elif name in actions:
            values[name] = checked_value(name, value, hints[name], actions[name], path)
        elif name in launch:
            words += _launch_words(name, value, launch[name], path)
        else:
            if tool := tool_of(config):
                raise UserError(f"{path} is a YAML of {tool}: `fastpack-trl convert {path}` writes it in our names")
            if gone := removal(name):
                raise UserError(f"{path}: {gone}")
            hint = meant(name, {*actions, *launch, "env"}) or f"; `{parser.prog} --help-all` lists the names"
            raise UserError(f"{path}: unknown key {short_repr(name)}{hint}")
    parser.set_defaults_with_config(**values)
    return words


def _accelerate_file(words: list[str]) -> list[str]:
    """Turn ``--accelerate_config zero2`` into ``--config_file .../zero2.yaml``; TRL's own files go by their name."""
    names, rest = split_off("accelerate_config", words)
    if not names:
        return rest
    name = names[-1]  # a flag comes after the YAML and wins
    if Path(name).is_file():
        if not name.endswith(".json"):
            load_config(name)  # accelerate reads it after us, and says less about what is wrong
        return ["--config_file", name, *rest]
    shipped = {Path(str(file)).stem: str(file) for file in files("trl.accelerate_configs").iterdir()}
    shipped.pop("__init__", None)
    if name not in shipped:
        raise UserError(
            f"accelerate_config {short_repr(name)} is neither a file nor one of {', '.join(sorted(shipped))}"
        )
    return ["--config_file", shipped[name], *rest]


def _check_stray(parser: Any, own: Sequence[str]) -> None:
    _, unknown = parser.parse_known_args(own)
    if not unknown:
        return
    remedy = "options start with --, e.g. --max_length 1024"
    if unknown[0].endswith((".yaml", ".yml")):
        remedy = f"did you mean --config {unknown[0]}?"
    raise UserError(f"unexpected argument {short_repr(unknown[0])}: {remedy}")


@contextmanager
def _bf16_needs_a_gpu() -> Iterator[None]:
    """Name the fields behind the error of transformers, and what to set."""
    try:
        yield
    except ValueError as error:
        if "support bf16/gpu" not in str(error):
            raise
        import torch

        said = "bf16 is on and there is no GPU here: set use_cpu: true and bf16: false, or run on a GPU"
        if torch.cuda.is_available():
            said = "bf16 is on, which this GPU does not have: set bf16: false and fp16: true"
        raise UserError(said) from error
