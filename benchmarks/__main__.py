"""``python -m benchmarks``, in a checkout: lists and runs what can be measured."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from benchmarks.command import COMMANDS, PROG, in_one_line, known


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m benchmarks``; return the exit code, as `fastpack_trl.cli.main.main` does."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return in_one_line(PROG, lambda: _run(arguments))


def _run(arguments: list[str]) -> int | None:
    """List the commands, or run the one that is named first, with or without ``--case`` before it."""
    name, *rest = arguments[1:] if arguments[:1] == ["--case"] else arguments or ["--list"]
    if name in ("--list", "--help", "-h"):
        width = max(map(len, COMMANDS))
        print("\n".join(f"{command.ljust(width)}  {text}" for command, text in COMMANDS.items()))
        return 0
    known("case", [name], COMMANDS)
    command = import_module(f"benchmarks.{name}")
    ended: int | None = getattr(command, "COMMAND", command).main(rest)
    return ended


if __name__ == "__main__":
    raise SystemExit(main())
