"""Arguments of the commands that train: YAML and flags become one command line for TRL's and accelerate's parsers."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, get_type_hints

from fastpack_trl.errors import OneLineParser, UserError, command_line, did_you_mean, is_secret, naming_keys, short_repr
from fastpack_trl.recipe.data import check_early
from fastpack_trl.recipe.foreign import OTHER_NAMES, tool_of
from fastpack_trl.recipe.formats import DataArguments
from fastpack_trl.recipe.methods import METHODS, SFT, Method
from fastpack_trl.recipe.sources import add_launch_options
from fastpack_trl.recipe.yaml import load_config

if TYPE_CHECKING:
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments

COMMAND_OPTIONS: Mapping[str, str] = {
    "--config": "a YAML whose keys are these options; flags override it, `fastpack-trl init NAME` writes one",
    "--accelerate_config": "launch several processes with one of TRL's accelerate configs (fsdp2, ...) or your file",
    "--verbose": "show in the banner why each feature is off (also: FASTPACK_VERBOSE=1)",
    "--traceback": "show the traceback of an error that is otherwise one line (also: FASTPACK_TRACEBACK=1)",
    "--help-all": "show this text and every option of TRL",
}
"""Options of the command itself; they are fields of no dataclass."""
# Text in these is the path of a JSON file; in the other mappings it is JSON.
_PATH_OR_MAPPING = {"accelerator_config", "deepspeed", "fsdp_config"}


@dataclasses.dataclass(frozen=True, slots=True)
class Arguments:
    """Everything one run needs: ``--num_processes 2 --max_steps 3`` -> ``launch=["--num_processes=2"]``."""

    method: Method
    script: ScriptArguments
    training: Any
    """The configuration of the method."""
    model: ModelConfig
    mixture: DatasetMixtureConfig
    data: DataArguments
    launch: list[str]
    """Options for `accelerate launch`, from the YAML and the command line."""
    words: list[str]
    """The command line that was parsed."""


def parse(argv: Sequence[str], method: Method = SFT, *, may_launch: bool = True, early: bool = False) -> Arguments:
    """Read the YAML and the command line; `early` checks values and paths before torch is imported.

    Flags of `accelerate launch` need `may_launch`; in the YAML they are accepted: launched processes read it too.

    Raises:
        UserError: a file, name or value that is wrong, with the nearest valid name; a launch flag without effect.
        ValueError: raised by the configuration classes for values that contradict each other.
    """
    paths, flags = split_off("config", argv)
    if len(paths) > 1 or "" in paths:
        raise UserError("--config must name one YAML file, e.g. --config sft.yaml")
    # Read before torch is imported: a typo shows at once, and `env` may hold what torch reads on import.
    path, config = "".join(paths), load_config(paths[0]) if paths else {}
    env = config.pop("env", {})
    if not isinstance(env, Mapping) or any(isinstance(value, list | dict) for value in env.values()):
        raise UserError(f"{path}: env must be a mapping of variables to single values, e.g. `OMP_NUM_THREADS: 1`")
    if tool := tool_of(config):
        raise UserError(f"{path} is a config of {tool}: `{command_line('convert', path)}` translates it")
    os.environ.update({str(name): str(value) for name, value in env.items()})
    with warnings.catch_warnings():
        # transformers 5.23 renames this field; TRL's SFTConfig sets it by default and documents the old name.
        warnings.filterwarnings("ignore", message="`gradient_checkpointing` is deprecated", category=FutureWarning)
        for quick in (True, False):  # a wrong name or value shows before torch is imported
            parser = make_parser(method, quick=quick)
            launcher = _launch_parser(parser)
            words = _words_of(config, parser, launcher, path)
            launch, launch_flags = _launch_words(words, parser, launcher, path), _launch_words(flags, parser, launcher)
            if launch_flags and not may_launch:
                fix = "options of `accelerate launch` have no effect here: give them to the launcher"
                raise UserError(f"{' '.join(launch_flags)}: this process is already running, so {fix}")
            if quick and early:
                check_early(method, parser.parse_known_args([*words, *flags])[0])
        try:
            with naming_keys(config):
                script, training, model, mixture, data, _ = parser.parse_args_into_dataclasses(
                    [*words, *flags], return_remaining_strings=True, look_for_args_file=False
                )
        except ValueError as error:
            if "support bf16/gpu" not in str(error):
                raise
            fix = "set bf16: false, on an older GPU fp16: true; without a GPU set use_cpu: true and bf16: false"
            raise UserError(f"bf16=True needs a GPU that has bf16: {fix}, or run on a GPU") from error
    return Arguments(method, script, training, model, mixture, data, [*launch, *launch_flags], [*argv])


def check(values: Mapping[str, Any], method: Method, source: str, keys: Mapping[str, str]) -> None:
    """Raise `UserError` for a value that the parser of a method refuses; `keys` has their names in `source`."""
    parser = make_parser(method, quick=True)
    launcher = _launch_parser(parser)
    for name in values.keys() - {"env"}:
        place = f"{source}: {keys[name]}" if keys.get(name, name) != name else source
        parser.source = f"{place}: "
        parser.parse_known_args(_words_of({name: values[name]}, parser, launcher, place))


def as_flags(values: Mapping[str, object]) -> list[str]:
    """Return values by name as words of a command line: ``{"seed": 1}`` -> ``["--seed", "1"]``."""
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def split_off(name: str, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the values of an option (empty text if its value is missing) and the remaining words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    spellings = {f"--{name}": None, f"--{name.replace('_', '-')}": None}
    parser.add_argument(*spellings, dest="values", action="append", nargs="?", const="", default=[])
    matches, rest = parser.parse_known_args(words)
    return matches.values, rest


def processes(launch: Sequence[str]) -> int:
    """Return the number of processes that options of `accelerate launch` ask for; 1 if they name none."""
    counts, files = (split_off(name, launch)[0][-1:] for name in ("num_processes", "config_file"))
    return int([1, *(load_config(file).get("num_processes", 1) for file in files), *counts][-1])


def make_parser(method: Method = SFT, kinds: Sequence[Any] | None = None, *, quick: bool = False) -> Any:
    """Return TRL's parser over the dataclasses of a method, or over `kinds` alone; `quick`: without importing torch."""
    from trl import TrlParser

    class Parser(OneLineParser, TrlParser):
        help_option = "--help-all"

    make: Any = Parser
    parser = make(kinds or method.dataclasses(quick), prog=f"fastpack-trl {method.command}", allow_abbrev=False)
    parser.hints = {name: str(kind) for own in parser.dataclass_types for name, kind in get_type_hints(own).items()}
    for action in parser._actions:
        if "dict" in parser.hints.get(action.dest, ""):
            action.type = _path_or_mapping if action.dest in _PATH_OR_MAPPING else _mapping
    return parser


def _launch_parser(parser: Any) -> Any:
    """Return a parser of the options of `accelerate launch`, with the errors of `parser`."""
    launcher: Any = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_launch_options(launcher)
    launcher.error = parser.error
    launcher.add_argument("--accelerate_config", "--accelerate-config")  # TRL adds this one
    return launcher


def _mapping(text: str) -> dict[str, Any]:
    try:
        if isinstance(value := json.loads(text), dict):
            return value
        problem = "is not a mapping"
    except (ValueError, RecursionError) as error:
        problem = f"is not JSON ({error})"
    raise argparse.ArgumentTypeError(f"{short_repr(text)} {problem}, e.g. '{{\"key\": 1}}'")


def _path_or_mapping(text: str) -> Any:
    return _mapping(text) if text.startswith("{") else text  # as transformers tests it


def _words_of(config: Mapping[str, Any], parser: Any, launcher: Any, path: str) -> list[str]:
    """Return the YAML as words: ``{"packing": True, "lora_target_modules": ["q", "v"]}`` ->
    ``["--packing=True", "--lora_target_modules", "q", "v"]``.

    Values that a word cannot express (`null`, mappings, other lists) become defaults of the parser, as in TRL.
    """
    from trl.scripts.utils import DatasetConfig

    options, words = launcher._option_string_actions | parser._option_string_actions, list[str]()
    for name, value in config.items():
        action, shown = options.get(f"--{name}"), f"{path}: {name}={'...' if is_secret(name) else short_repr(value)}"
        if action is None or "-" in name or name == "help":  # names with dashes are those of a command line
            _refuse_unknown(name, parser, launcher, path)
        hint = parser.hints.get(action.dest, "")
        if name == "datasets":
            try:
                parser.set_defaults(datasets=[DatasetConfig(**entry) for entry in value])
            except TypeError as error:
                raise UserError(f"{shown} must be a list of entries, each as `- path: data.jsonl`: {error}") from error
        elif value is None and "None" not in hint:
            continue  # not set
        elif action.nargs == 0:  # a switch of accelerate
            if (switch := str(value).lower()) not in ("true", "false"):
                raise UserError(f"{shown} must be true or false")
            words += [f"--{name}"] * (switch == "true")
        elif isinstance(value, list) and action.nargs == "+":
            if any(isinstance(one, list | dict) for one in value):
                raise UserError(f"{shown} must be a list of single values")
            words += [f"--{name}", *map(str, value)] if value else []
        elif value is None or name == "fsdp" or (isinstance(value, list | dict) and type(value).__name__ in hint):
            parser.set_defaults(**{action.dest: json.loads(json.dumps(value, default=str))})  # dates are text
        elif isinstance(value, list | dict):
            raise UserError(f"{shown} must be a single value")
        else:
            words.append(f"--{name}={'no' if value is False and 'no' in (action.choices or ()) else value}")
    return words


def _refuse_unknown(word: str, parser: Any, launcher: Any, path: str) -> NoReturn:
    """Raise `UserError` for a key of the YAML `path`, or for a word of the command line."""
    if not path and not word.startswith("-"):
        remedy = f"did you mean --config {word}?" if word.endswith((".yaml", ".yml")) else "options start with --"
        raise UserError(f"unexpected argument {short_repr(word)}: {remedy}")
    source, dashes = (f"{path}: ", "") if path else ("", "--")
    name = word.lstrip("-").partition("=")[0].replace("-", "_")
    known = {"env", *(action.dest for each in (parser, launcher) for action in each._actions)}
    known |= set() if path else {option[2:] for option in COMMAND_OPTIONS}
    hint = f"; did you mean '{dashes}{other}'?" if (other := OTHER_NAMES.get(name)) in known else ""
    owners = [method.command for method in METHODS.values() if name in method.options()]
    hint = hint or (f"; it is an option of {', '.join(owners)}: leave it out" if owners else "")
    hint = hint or did_you_mean(dashes + name, (dashes + one for one in known))
    hint = hint or f"; `{parser.prog} --help-all` lists the names"
    raise UserError(f"{source}unknown {'key' if path else 'option'} {short_repr(word.partition('=')[0])}{hint}")


def _launch_words(words: Sequence[str], parser: Any, launcher: Any, path: str = "") -> list[str]:
    """Return the options of `accelerate launch` among the words of a YAML or of the command line, checked."""
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    parser.source = f"{path}: " if path else "--"
    names, rest = split_off("accelerate_config", parser.parse_known_args(words)[1])
    _, *files = resolve_accelerate_config_argument(["--accelerate_config", names[-1]]) if names else [""]
    launch = [*(f"--config_file={file}" for file in files), *rest]
    options, unknown = launcher.parse_known_args(launch)
    if unknown:
        _refuse_unknown(unknown[0], parser, launcher, path)
    for name in ("num_processes", "num_machines"):
        if (count := getattr(options, name)) is not None and count < 1:  # accelerate silently trains in one process
            raise UserError(f"{parser.source}{name}={count} must be >= 1")
    return launch
