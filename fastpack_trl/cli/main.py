"""Entry point of ``fastpack-trl``. Each command is imported when it is called, so that ``--help`` imports no torch."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from fastpack_trl._version import __version__
from fastpack_trl.errors import OneLineParser, TerminatedError, UserError, check_name, describe, did_you_mean
from fastpack_trl.measure.record import check_writable, write_json
from fastpack_trl.recipe.methods import METHODS

PROG = "fastpack-trl"
EXIT_USER_ERROR = 2


class Command(NamedTuple):
    """A command: its module has ``add_arguments(parser)`` and ``run(args, record) -> int``, unless it trains.

    ``--json FILE`` writes what `run` has put into `record`.
    """

    module: str
    help: str
    option: str = ""
    """The option that a word without one is probably meant for."""


_CONFIGS, _TRAIN, _TRAINED = "fastpack_trl.cli.configs", "fastpack_trl.cli.train", "fastpack_trl.cli.trained"
_ANSWERS = "print the answers of a trained model; for an adapter, also those of its base model"
_DOCTOR = "show versions and GPU; with --config, which features a run uses, why, and its memory"
COMMANDS = {
    "init": Command(_CONFIGS, "write one of the shipped YAML files here, or list them"),
    **{
        name: Command(_TRAIN, f"{method.what}: all options of `trl {name}`, plus fastpack's")
        for name, method in METHODS.items()
    },
    "convert": Command(_CONFIGS, "translate a YAML of Axolotl, LLaMA-Factory or Unsloth"),
    "merge": Command(_TRAINED, "write a full model: base plus adapter"),
    "generate": Command(_TRAINED, _ANSWERS),
    "verify": Command("fastpack_trl.cli.verify", "check that packed documents are isolated", "--model"),
    "doctor": Command("fastpack_trl.cli.doctor", _DOCTOR, "--config"),
    "bench": Command("fastpack_trl.bench.command", "measure TRL vs. fastpack on this machine", "--config"),
}


def _parser(chosen: str | None) -> tuple[OneLineParser, OneLineParser]:
    """Return the parser of all commands, and that of the chosen one, the only one with its options."""
    common = OneLineParser(add_help=False)
    traceback_help = "show the traceback of an error that is otherwise one line (also: FASTPACK_TRACEBACK=1)"
    common.add_argument("--traceback", action="store_true", help=traceback_help)
    parser = OneLineParser(prog=PROG, parents=[common], allow_abbrev=False)
    parser.description = "Faster fine-tuning for Hugging Face TRL, on packed rows."
    parser.epilog = f"`{PROG} COMMAND --help` lists the options of a command."
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    add = partial(subparsers.add_parser, allow_abbrev=False, parents=[common])
    parsers = {name: add(name, help=each.help, description=each.help) for name, each in COMMANDS.items()}
    if chosen is None:
        return parser, parser
    import_module(COMMANDS[chosen].module).add_arguments(parsers[chosen])
    if COMMANDS[chosen].module != _CONFIGS:
        parsers[chosen].add_argument("--json", metavar="FILE", help="also write all results to FILE as JSON")
    return parser, parsers[chosen]


def _dispatch(arguments: list[str], chosen: str | None) -> int:
    if chosen is not None and chosen in METHODS:
        # TRL's parser must see these arguments: it builds its options from dataclasses and from the YAML.
        from fastpack_trl.cli import train

        arguments.remove(chosen)
        return train.main(arguments, METHODS[chosen])
    if chosen is not None:
        check_name("command", chosen, COMMANDS, "commands")
    parser, of_command = _parser(chosen)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        _accept_unknown(args, unknown, of_command)
    if chosen is None:
        parser.print_help()
        return 0
    return _run(args)


def _accept_unknown(args: argparse.Namespace, words: list[str], parser: OneLineParser) -> None:
    """Keep words for the parser of the training command if there is a ``--config``; else raise `UserError`."""
    name = words[0]
    if getattr(args, "config", None) is not None and hasattr(args, "more"):
        for flag in (word.partition("=")[0] for word in words if word.startswith("--")):
            if similar := get_close_matches(flag, parser._option_string_actions, n=1, cutoff=0.85):
                raise UserError(f"unknown option {flag!r}; did you mean {similar[0]!r}?")
        args.more = [*args.more, *words]
        return
    option = COMMANDS[args.command].option if args.command else ""
    near = did_you_mean(name.split("=")[0], (word for word in parser._option_string_actions if word[1] == "-"))
    near = f"; did you mean {option} {name}?" if option and not name.startswith("-") else near
    raise UserError(f"unknown argument {name!r}{near} (see `{parser.prog} --help`)")


def _run(args: argparse.Namespace) -> int:
    """Run a command; write what it has recorded, after an error as well. Only the first process of a run writes."""
    record: dict[str, Any] = {}
    file = check_writable(args.json) if getattr(args, "json", None) else None
    try:
        code: int = import_module(COMMANDS[args.command].module).run(args, record)
    except UserError as error:
        record |= {"error": describe(error)} if record else {}
        raise
    finally:
        if file is not None and record and os.environ.get("RANK", "0") == "0":
            write_json(file, record)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code.

    0: done; 2: something the user has to change, one line on stderr; 130: interrupted; 143: terminated. Any other
    error, a bug or one raised by a training step, leaves with its traceback.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    first = next((word for word in arguments if word != "--traceback"), "-")
    chosen = None if first.startswith("-") else first
    # Under a launcher every process reports its own error, labeled by its rank except for rank 0.
    rank = os.environ.get("RANK", "0")
    of_rank = "" if rank == "0" else f" [rank {rank}]"
    # bitsandbytes, which trl and peft import, warns that a CPU kernel is not on the hub: nobody can act on that.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # `datasets` logs a bad line too, by another number: it counts from 0 in a part of the file.
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            # transformers 5.23 renamed a property that PEFT 0.21 reads from every model.
            renamed = "`is_gradient_checkpointing` is deprecated"
            warnings.filterwarnings("ignore", message=renamed, category=FutureWarning)
            return _dispatch(arguments, chosen)
    except (UserError, KeyboardInterrupt) as error:
        wanted = os.environ.get("FASTPACK_TRACEBACK", "").lower() in {"1", "true", "yes", "on"}
        if wanted or "--traceback" in arguments:
            traceback.print_exc()
        kind, code, text = "error", EXIT_USER_ERROR, f": {describe(error)}"
        if not isinstance(error, UserError):
            # 128 + SIGINT and SIGTERM, as shells report them
            kind, code = ("terminated", 143) if isinstance(error, TerminatedError) else ("interrupted", 130)
            text = f" {error}".rstrip()
        print(f"{PROG}{f' {chosen}' if chosen in COMMANDS else ''}: {kind}{of_rank}{text}", file=sys.stderr)
        return code
    except SystemExit as exit_request:  # argparse leaves this way after --help and --version
        return exit_request.code if isinstance(exit_request.code, int) else int(bool(exit_request.code))
