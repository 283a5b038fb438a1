"""Arguments of the commands that train: YAML keys and flags become one command line for the parsers of TRL and
accelerate.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_type_hints

from fastpack_trl.errors import UserError, did_you_mean, naming_keys, short_repr
from fastpack_trl.recipe.foreign import tool_of
from fastpack_trl.recipe.formats import DataArguments
from fastpack_trl.recipe.methods import SFT, Method
from fastpack_trl.recipe.yaml import load_config

if TYPE_CHECKING:
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments

COMMAND_OPTIONS: Mapping[str, str] = {
    "--config": "a YAML whose keys are these options; flags override it, `fastpack-trl init NAME` writes one",
    "--accelerate_config": "start several processes by a config of TRL (fsdp2, zero2, multi_gpu, ...) or a file",
    "--verbose": "show in the banner why each feature is off (also: FASTPACK_VERBOSE=1)",
    "--traceback": "show the traceback of an error that is otherwise one line (also: FASTPACK_TRACEBACK=1)",
    "--help-all": "show this text and every option of TRL",
}
"""Options of the command itself; they are fields of no dataclass."""
# Text in these is the path of a JSON file; in the other mappings it is JSON.
_PATH_OR_MAPPING = {"accelerator_config", "deepspeed", "fsdp_config"}
# These name the program to launch, which the command sets itself.
_RESERVED_LAUNCH_OPTIONS = {"help", "module", "no_python", "training_script", "training_script_args"}
_OTHER_NAMES: Mapping[str, str] = {
    "model": "model_name_or_path", "base_model": "model_name_or_path", "torch_dtype": "dtype",
    "dataset": "dataset_name", "attn": "packed_attention", "lr": "learning_rate", "epochs": "num_train_epochs",
    "batch_size": "per_device_train_batch_size", "micro_batch_size": "per_device_train_batch_size",
    "output": "output_dir", "resume": "resume_from_checkpoint", "max_seq_length": "max_length",
    "sequence_len": "max_length", "sample_packing": "packing",
}  # fmt: skip
"""Names that other tools and older versions of TRL give to an option."""


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


class _OneLine(argparse.ArgumentParser):
    """Raise `UserError` for a wrong argument: ``sft.yaml: max_length: invalid int value: 'abc'``."""

    source = "--"

    def error(self, message: str) -> NoReturn:
        text = re.sub(r"^argument --(\w+)\S*: ", lambda match: f"{self.source}{match[1]}: ", message)
        if choices := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", text):
            near = did_you_mean(choices[1], re.findall(r"[\w.-]+", choices[2]))
            text = text.replace(" (choose", f"{near} (choose")
        raise UserError(f"{text} (see `{self.prog} --help-all`)")


def parse(argv: Sequence[str], method: Method = SFT, *, may_launch: bool = True) -> Arguments:
    """Read the YAML and the command line.

    Args:
        may_launch: accept flags of `accelerate launch`. In the YAML they are accepted either way: the launched
            processes read the same file.

    Raises:
        UserError: a file, name or value that is wrong, with the nearest valid name if there is one; a launch flag
            without effect.
        ValueError: raised by the configuration classes for values that contradict each other.
    """
    paths, flags = split_off("config", argv)
    if len(paths) > 1:
        raise UserError(f"--config is given {len(paths)} times ({', '.join(paths)}): merge them into one file")
    if paths == [""]:
        raise UserError("--config needs a YAML file, e.g. --config sft.yaml")
    # Read before torch is imported: a typo shows at once, and `env` may hold what torch reads on import.
    path, config = "".join(paths), load_config(paths[0]) if paths else {}
    env = config.pop("env", {})
    if not isinstance(env, Mapping) or any(isinstance(value, list | dict) for value in env.values()):
        raise UserError(
            f"{path}: env={short_repr(env)} must be a mapping of variables, e.g. `env: {{OMP_NUM_THREADS: 1}}`"
        )
    os.environ.update({str(name): str(value) for name, value in env.items()})
    with warnings.catch_warnings():
        # transformers 5.23 renames this field; TRL's SFTConfig sets it by default and documents the old name.
        warnings.filterwarnings("ignore", message="`gradient_checkpointing` is deprecated", category=FutureWarning)
        parser, launcher = make_parser(method), _launch_parser(method)
        words = list(_words_of(config, parser, launcher, path))
        launch = _launch_options(words, parser, launcher, f"{path}: ")
        launch_flags = _launch_options(flags, parser, launcher, "--")
        if launch_flags and not may_launch:
            raise UserError(
                f"{' '.join(_as_words(launch_flags))}: this process is already running, so options of `accelerate "
                "launch` have no effect here: give them to the launcher"
            )
        try:
            with naming_keys(config):
                script, training, model, mixture, data, _ = parser.parse_args_into_dataclasses(
                    [*words, *flags], return_remaining_strings=True, look_for_args_file=False
                )
        except ValueError as error:
            if "support bf16/gpu" not in str(error):
                raise
            raise UserError(
                "bf16=True needs a GPU that has bf16: set bf16: false and, on an older GPU, fp16: true; without a GPU "
                "set use_cpu: true and bf16: false, or run on a GPU"
            ) from error
    return Arguments(method, script, training, model, mixture, data, _as_words(launch | launch_flags), [*argv])


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


def make_parser(method: Method = SFT, kinds: Sequence[Any] | None = None) -> Any:
    """Return TRL's parser over the dataclasses of a method, or over `kinds` alone."""
    from trl import TrlParser

    class Parser(_OneLine, TrlParser):
        pass

    make: Any = Parser
    parser = make(kinds or method.dataclasses(), prog=f"fastpack-trl {method.command}", allow_abbrev=False)
    parser.hints = {name: str(kind) for own in parser.dataclass_types for name, kind in get_type_hints(own).items()}
    for action in parser._actions:
        if "dict" in parser.hints.get(action.dest, ""):
            action.type = _path_or_mapping if action.dest in _PATH_OR_MAPPING else _mapping
    return parser


def _launch_parser(method: Method) -> _OneLine:
    """Return a parser of the options of `accelerate launch` and of ``--accelerate_config``, which TRL adds."""
    from accelerate.commands.launch import launch_command_parser

    parser = _OneLine(prog=f"fastpack-trl {method.command}", add_help=False, allow_abbrev=False)
    parser.add_argument("--accelerate_config", "--accelerate-config", action="append", default=argparse.SUPPRESS)
    for action in launch_command_parser()._actions:
        if action.option_strings and action.dest not in _RESERVED_LAUNCH_OPTIONS:
            name = next(option[2:] for option in action.option_strings if option.startswith("--"))
            how: dict[str, Any] = {"action": "append", "type": action.type, "choices": action.choices}
            how = {"action": "store_true"} if action.nargs == 0 else how
            parser.add_argument(*action.option_strings, dest=name, default=argparse.SUPPRESS, **how)
    return parser


def _mapping(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{short_repr(text)} is not JSON ({error}), e.g. '{{\"key\": 1}}'") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{short_repr(text)} is not a mapping, e.g. '{{\"key\": 1}}'")
    return value


def _path_or_mapping(text: str) -> Any:
    return _mapping(text) if text.startswith("{") else text  # as transformers tests it


def _words_of(config: Mapping[str, Any], parser: Any, launcher: _OneLine, path: str) -> Iterator[str]:
    """Yield the YAML as words: ``{"packing": True, "lora_target_modules": ["q", "v"]}`` ->
    ``--packing=True --lora_target_modules q v``.

    What a word cannot express, `null` and lists of fields that are single options, becomes a default of the parser,
    as TRL does it.
    """
    # Reversed so that the first action wins: `--no_x` has the same name as `--x`.
    actions = {action.dest: action for action in reversed(parser._actions)}
    for name in config:
        if name not in actions and f"--{name}" not in launcher._option_string_actions:
            _refuse_unknown(name, config, parser, launcher, path)
    for name, value in config.items():
        action, hint = actions.get(name), parser.hints.get(name, "")
        if name == "datasets":
            _check_datasets(value, path)
            parser.set_defaults(datasets=value)
        elif value is None and "None" not in hint:
            pass  # not set
        elif isinstance(value, dict) and "dict" in hint:
            yield f"--{name}={json.dumps(value, default=str)}"
        elif isinstance(value, list) and action is not None and action.nargs == "+":
            if any(isinstance(item, list | dict) for item in value):
                raise UserError(f"{path}: {name}={short_repr(value)} must be a list of single values")
            yield from (f"--{name}", *map(str, value)) if value else ()
        elif value is None or name == "fsdp" or (isinstance(value, list) and ("list" in hint or "tuple" in hint)):
            parser.set_defaults(**{name: value})
        elif isinstance(value, list | dict):
            raise UserError(f"{path}: {name}={short_repr(value)} must be a single value")
        elif action is None and launcher._option_string_actions[f"--{name}"].nargs == 0:
            if not isinstance(value, bool):
                raise UserError(f"{path}: {name}={short_repr(value)} must be true or false")
            yield from [f"--{name}"] * value
        else:
            yield f"--{name}={'no' if value is False and action and 'no' in (action.choices or ()) else value}"


def _check_datasets(entries: Any, path: str) -> None:
    from trl.scripts.utils import DatasetConfig

    known = [field.name for field in dataclasses.fields(DatasetConfig)]
    for entry in entries if isinstance(entries, list) else [entries]:
        for key in entry if isinstance(entry, dict) else ():
            if key not in known:
                near = did_you_mean(key, known)
                raise UserError(f"{path}: datasets: unknown key {short_repr(key)}{near} ({', '.join(known)})")
        if not isinstance(entry, dict) or not isinstance(entry.get("path"), str) or entry is entries:
            raise UserError(
                f"{path}: datasets={short_repr(entries)} must be a list of entries, each as `- path: data.jsonl`"
            )


def _refuse_unknown(name: str, config: Mapping[str, Any], parser: Any, launcher: _OneLine, path: str = "") -> NoReturn:
    """Raise `UserError` for a key of the YAML `path`, or for a word of the command line."""
    from fastpack_trl.config import removal

    if tool := tool_of(config):
        raise UserError(f"{path} is a YAML of {tool}: `fastpack-trl convert {path}` writes it in our names")
    if not path and not name.startswith("-"):
        remedy = f"did you mean --config {name}?" if name.endswith((".yaml", ".yml")) else "options start with --"
        raise UserError(f"unexpected argument {short_repr(name)}: {remedy}")
    source, dashes, plain = f"{path}: " * bool(path), "--" * (not path), name.lstrip("-").replace("-", "_")
    if gone := removal(plain):
        raise UserError(source + gone)
    known = {"env", *(action.dest for each in (parser, launcher) for action in each._actions)}
    known |= set() if path else {option[2:] for option in COMMAND_OPTIONS}
    hint = f"; did you mean '{dashes}{other}'?" if (other := _OTHER_NAMES.get(plain)) in known else ""
    hint = hint or did_you_mean(dashes + plain, (dashes + one for one in known))
    hint = hint or f"; `{parser.prog} --help-all` lists the names"
    raise UserError(f"{source}unknown {'key' if path else 'option'} {short_repr(name)}{hint}")


def _launch_options(words: Sequence[str], parser: Any, launcher: _OneLine, source: str) -> dict[str, Any]:
    """Return the options of `accelerate launch` among words, by name; `source` begins the lines of errors."""
    parser.source = launcher.source = source
    options, unknown = launcher.parse_known_args(parser.parse_known_args(words)[1])
    if unknown:
        _refuse_unknown(unknown[0].partition("=")[0], {}, parser, launcher)
    for name in ("num_processes", "num_machines"):
        if (count := getattr(options, name, [1])[-1]) < 1:  # accelerate silently trains in one process for these
            raise UserError(f"{source}{name}={count} must be >= 1")
    return vars(options)


def _as_words(options: Mapping[str, Any]) -> list[str]:
    """Return options of `accelerate launch` as words, TRL's own accelerate configs by their path:
    ``{"accelerate_config": ["zero2"], "multi_gpu": True}`` -> ``--config_file=.../zero2.yaml --multi_gpu``.
    """
    words = []
    for name, values in options.items():
        words += [f"--{name}"] if values is True else [f"--{name}={value}" for value in values]
    if "accelerate_config" not in options:
        return words
    name = options["accelerate_config"][-1]
    shipped = {
        file.name[:-5]: str(file) for file in files("trl.accelerate_configs").iterdir() if file.name.endswith(".yaml")
    }
    if Path(name).is_file():
        if not name.endswith(".json"):
            load_config(name)  # its errors are clearer than those of accelerate, which reads it later
    elif name not in shipped:
        raise UserError(
            f"accelerate_config={short_repr(name)} is neither a file nor one of {', '.join(sorted(shipped))}"
        )
    words = [word for word in words if not word.startswith("--accelerate_config")]
    return [f"--config_file={name if Path(name).is_file() else shipped[name]}", *words]
