"""Entry point of ``fastpack-trl``. Each command is imported when it is called, so that ``--help`` imports no torch."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

from fastpack_trl._version import __version__
from fastpack_trl.errors import TerminatedError, UserError, describe, did_you_mean
from fastpack_trl.recipe.methods import METHODS

PROG = "fastpack-trl"
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED, EXIT_TERMINATED = 130, 143  # 128 + SIGINT and SIGTERM, as shells report them


class Command(NamedTuple):
    """A sub-command: `module` has ``add_arguments(parser)`` and ``run(args) -> int``, except for those that train."""

    module: str
    help: str
    option: str = ""
    """What a word without an option is probably meant for."""


_TRAINS = "fastpack_trl.cli.train"
COMMANDS = {
    "init": Command("fastpack_trl.cli.init", "write one of the shipped YAML files here, or list them"),
    **{
        name: Command(_TRAINS, f"{method.what}: all options of `trl {name}`, and ours")
        for name, method in METHODS.items()
    },
    "convert": Command("fastpack_trl.cli.convert", "write a YAML of Axolotl, LLaMA-Factory or Unsloth in our names"),
    "merge": Command("fastpack_trl.cli.trained", "write a model with the adapter of a run in its weights"),
    "generate": Command(
        "fastpack_trl.cli.trained", "print what a trained model answers; for an adapter, also what its base answers"
    ),
    "verify": Command("fastpack_trl.cli.verify", "check that packed documents do not see each other", "--model"),
    "doctor": Command(
        "fastpack_trl.cli.doctor",
        "show what this machine has, and what a config would run, why, and in how much memory",
        "--config",
    ),
    "bench": Command("fastpack_trl.bench.command", "measure TRL against fastpack on this machine", "--config"),
}


class CommandParser(argparse.ArgumentParser):
    """A parser that raises `UserError` for a wrong argument instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise `UserError` with the message, and with the choice that a wrong one is near to."""
        if choices := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            message += did_you_mean(choices[1], re.findall(r"[\w.-]+", choices[2]))
        raise UserError(f"{message} (see `{self.prog} --help`)")


def _parser(chosen: str | None) -> tuple[CommandParser, CommandParser]:
    """Return the parser of all commands, and that of the chosen one, which alone has its options."""
    parser = CommandParser(
        prog=PROG,
        description="Faster fine-tuning for Hugging Face TRL, on packed rows.",
        epilog=f"`{PROG} COMMAND --help` lists the options of a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    parsers = {
        name: subparsers.add_parser(name, help=command.help, description=command.help, allow_abbrev=False)
        for name, command in COMMANDS.items()
    }
    traceback_help = "show the traceback of an error that is otherwise one line (also: FASTPACK_TRACEBACK=1)"
    for each in (parser, *parsers.values()):
        each.add_argument("--traceback", action="store_true", help=traceback_help)
    if chosen is not None:
        import_module(COMMANDS[chosen].module).add_arguments(parsers[chosen])
    return parser, parsers[chosen] if chosen else parser


def _dispatch(arguments: list[str], chosen: str | None) -> int:
    if chosen is not None and chosen in METHODS:
        # TRL's parser must see these arguments: it builds its options from dataclasses and from the YAML.
        from fastpack_trl.cli import train

        arguments.remove(chosen)
        return train.main(arguments, METHODS[chosen])
    if chosen is not None and chosen not in COMMANDS:
        if chosen == "quickstart":
            _refuse_removed(chosen)
        raise UserError(
            f"there is no command {chosen!r}{did_you_mean(chosen, COMMANDS)} (commands: {', '.join(COMMANDS)})"
        )
    parser, of_command = _parser(chosen)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        _refuse_removed(*(f"{chosen} {word.partition('=')[0]}" for word in unknown))
    if unknown and getattr(args, "config", None) is not None and hasattr(args, "more"):
        args.more, unknown = unknown, []  # `bench --config` and `doctor --config` hand them to the parser of `sft`
    if unknown:
        name, option = unknown[0], COMMANDS[chosen].option if chosen else ""
        meant = did_you_mean(name.split("=")[0], (word for word in of_command._option_string_actions if word[1] == "-"))
        meant = f"; did you mean {option} {name}?" if option and not name.startswith("-") else meant
        raise UserError(f"unknown argument {name!r}{meant} (see `{of_command.prog} --help`)")
    if chosen is None:
        parser.print_help()
        return 0
    code: int = import_module(COMMANDS[chosen].module).run(args)
    return code


def _refuse_removed(*words: str) -> None:
    from fastpack_trl.config import refuse_removed  # which imports torch

    try:
        refuse_removed(f"{PROG} {word}" for word in words)
    except ValueError as error:
        raise UserError(str(error)) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Drop notes that nobody can act on, and ``[RANK 0]``, which accelerate puts before each line of a single process.

    bitsandbytes warns on import that a CPU kernel is not on the hub; trl and peft import it for all commands.
    transformers 5.23 renamed a property that PEFT 0.21 reads from every model.
    """
    notes = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level, make = notes.level, logging.getLogRecordFactory()
    notes.setLevel(logging.ERROR)

    def without_rank(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if isinstance(record.msg, str):
            record.msg = record.msg.removeprefix("[RANK 0] ")
        return record

    if os.environ.get("WORLD_SIZE", "1") == "1":
        logging.setLogRecordFactory(without_rank)
    try:
        with warnings.catch_warnings():
            renamed = "`is_gradient_checkpointing` is deprecated"
            warnings.filterwarnings("ignore", message=renamed, category=FutureWarning)
            yield
    finally:
        logging.setLogRecordFactory(make)
        notes.setLevel(level)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code.

    0: done; 2: something the user has to change, one line on stderr; 130: interrupted; 143: terminated. Any other
    error, a bug or one raised by a training step, leaves with its traceback.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    wanted = os.environ.get("FASTPACK_TRACEBACK", "").lower() in {"1", "true", "yes", "on"}
    show_traceback = wanted or "--traceback" in arguments
    chosen = next((word for word in arguments if word != "--traceback"), None)
    chosen = None if chosen is None or chosen.startswith("-") else chosen
    name = f"{PROG} {chosen}" if chosen in COMMANDS else PROG
    # Under a launcher every process reports its own error, labeled by its rank except for rank 0.
    rank = os.environ.get("RANK", "0")
    of_rank = "" if rank == "0" else f" [rank {rank}]"
    try:
        with _quiet():
            return _dispatch(arguments, chosen)
    except (UserError, KeyboardInterrupt, TerminatedError) as error:
        if show_traceback:
            traceback.print_exc()
        if isinstance(error, UserError):
            print(f"{name}: error{of_rank}: {describe(error)}", file=sys.stderr)
            return EXIT_USER_ERROR
        interrupted = isinstance(error, KeyboardInterrupt)
        kind = "interrupted" if interrupted else "terminated"
        print(f"{name}: {kind}{of_rank} {error}".strip(), file=sys.stderr)
        return EXIT_INTERRUPTED if interrupted else EXIT_TERMINATED
    except SystemExit as exit_request:  # argparse leaves this way after --help and --version
        return exit_request.code if isinstance(exit_request.code, int) else int(bool(exit_request.code))
