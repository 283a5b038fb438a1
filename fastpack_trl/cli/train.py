"""``fastpack-trl sft``, ``dpo`` and the like: training from a YAML or flags, with every option of TRL's and ours.

The steps are those of ``trl/scripts/sft.py`` and its siblings. What differs: the trainer is ours, ``dataset_name`` may
be a local file, and settings and data are checked before the model is loaded.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from argparse import SUPPRESS
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastpack_trl.errors import UserError, preparing
from fastpack_trl.recipe.arguments import COMMAND_OPTIONS, Arguments, make_parser, parse, split_off
from fastpack_trl.recipe.formats import DataArguments
from fastpack_trl.recipe.make_trainer import check_settings
from fastpack_trl.recipe.methods import SFT, Method
from fastpack_trl.report import enable_verbose

# Set for the processes that we launch, which ignore the launch options of the YAML.
_LAUNCHED = "FASTPACK_LAUNCHED"
_QUANTIZATION = {"load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "use_bnb_nested_quant"}


def main(argv: Sequence[str], method: Method = SFT) -> int:
    """Run the command of `method` with these arguments; return the exit code."""
    if {"-h", "--help", "--help-all"} & set(argv):
        _print_help(method, whole="--help-all" in argv)
        return 0
    words = [word for word in argv if word not in ("--traceback", "--verbose")]
    if not words:
        options = "--model_name_or_path and --dataset_name; --help-all lists all options"
        raise UserError(f"no settings: give --config FILE ('fastpack-trl init' writes one), or {options}")
    if "--verbose" in argv:
        enable_verbose()
    # Read before anything is imported: configuration classes set such variables themselves.
    launched = under_launcher()
    with preparing():
        arguments = parse(words, method, may_launch=not launched or _LAUNCHED in os.environ, early=True)
        launches = not launched and (bool(arguments.launch) or _launches_by_default())
        if launches:
            check_settings(arguments)  # once and here, not once per process
    if launches:
        return launch(arguments, ["--traceback"] * ("--traceback" in argv))
    if arguments.launch and _LAUNCHED not in os.environ and os.environ.get("RANK", "0") == "0":
        unused = " ".join(arguments.launch)
        note = f"fastpack-trl {method.command}: note: a launcher started this process; ignored: {unused}"
        print(note, file=sys.stderr)
    from fastpack_trl.recipe.train import train_parsed

    if train_parsed(arguments).is_world_process_zero() and (commands := _what_next(arguments)):
        print(f"next: {commands}")
    return 0


def _print_help(method: Method, *, whole: bool) -> None:
    """Print our options, or all: those of the command, of our configuration and of the data come first."""
    parser = make_parser(method, None if whole else [method.settings, DataArguments])
    options = parser.add_argument_group("options of the command")
    for name, text in COMMAND_OPTIONS.items():
        value: dict[str, Any] = {"metavar": "FILE"} if name.endswith("config") else {"action": "store_true"}
        options.add_argument(name, help=text, default=SUPPRESS, **value)
    parser.usage = f"{parser.prog} --config FILE [--OPTION VALUE ...]"
    parser.description = f"{method.what}, with every option of `trl {method.command}` and of `accelerate launch`."
    parser.epilog = "" if whole else f"--help-all also lists the options of `trl {method.command}`."
    parser.print_help()


def _what_next(arguments: Arguments) -> str:
    """Return the commands that load the files of a run; empty if they cannot load them."""
    folder, model = Path(str(arguments.training.output_dir)), arguments.model
    adapter, whole = ((folder / f"{name}config.json").is_file() for name in ("adapter_", ""))
    if adapter == whole:  # nothing, or left by two runs: the commands would load the adapter
        return ""
    words, (config, flags) = [str(folder)], split_off("config", arguments.words)
    given = {word[2:].partition("=")[0].replace("-", "_") for word in flags if word.startswith("--")}
    if config and (model.load_in_4bit or model.load_in_8bit) and given.isdisjoint(_QUANTIZATION):
        words += ["--config", *config, "--base", str(model.model_name_or_path)]  # merged as it was in training
    elif model.load_in_4bit:
        words += ["--load_in_4bit"]
    answers = arguments.method.command != "reward"
    commands = ["fastpack-trl generate {} --prompt 'Hello'"] * answers + ["fastpack-trl merge {}"] * adapter
    return " or ".join(commands).replace("{}", shlex.join(words))


def under_launcher() -> bool:
    """Return True if `accelerate launch`, `torchrun` or the like started this process.

    `accelerate launch` sets no WORLD_SIZE for a single process, but always ACCELERATE_DYNAMO_USE_FULLGRAPH, which
    nobody sets by hand (unlike ACCELERATE_USE_CPU or ACCELERATE_MIXED_PRECISION).
    """
    names = (_LAUNCHED, "WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_DYNAMO_USE_FULLGRAPH")
    return any(name in os.environ for name in names)


def _launches_by_default() -> bool:
    # TRL launches always. One process without accelerate defaults behaves the same in this process and saves a second
    # import of everything; several devices or a defaults file need the launcher to behave as under TRL.
    import torch
    from accelerate.commands.config.config_args import default_config_file

    return torch.cuda.device_count() > 1 or Path(default_config_file).is_file()


def launch(arguments: Arguments, extra: Sequence[str] = ()) -> int:
    """Start ``python -m fastpack_trl`` by `accelerate launch`, `extra` after its words; return the exit code."""
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    words = [*arguments.launch, "--module", "fastpack_trl", arguments.method.command, *arguments.words, *extra]
    os.environ[_LAUNCHED] = "1"
    try:
        with preparing():
            launch_command(launch_command_parser().parse_args(words))
        return 0
    except subprocess.CalledProcessError as error:  # the process has reported its error itself
        code = error.returncode
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
    finally:
        os.environ.pop(_LAUNCHED, None)
    return code if code > 0 else 128 - code  # a negative code is the signal that ended it
