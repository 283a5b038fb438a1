"""In-house measurements, run in a checkout: ``python -m benchmarks --help``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import NoReturn

from fastpack_trl.errors import UserError, did_you_mean
from fastpack_trl.measure.record import check_writable


class Parser(ArgumentParser):
    """The parser of a command; a wrong option is one line."""

    def __init__(self, command: str, description: str | None, epilog: str = "") -> None:
        super().__init__(
            prog=f"python -m benchmarks {command}", description=description,
            epilog="\n\n".join(fill(part, 110) for part in epilog.split("\n\n")),
            formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False,
        )  # fmt: skip

    def measurement(self, words: Sequence[str], threads: int) -> Namespace:
        """Add the options of all measurements, and return those that were given.

        Raises:
            UserError: a wrong option; a file that cannot be written.
        """
        add = self.add_argument
        add("--threads", type=int, default=threads, help="of torch (default: %(default)s)")
        add("--seed", type=int, default=0, help="of weights, data and order (default: 0)")
        add("--json", type=Path, metavar="FILE", help="append each record to FILE, one JSON object a line")
        args = self.parse_args(words)
        args.words = [self.prog.rpartition(" ")[2], *words]
        if args.json is not None:
            check_writable(args.json)
        return args

    def error(self, message: str) -> NoReturn:
        """Raise `UserError` with the message."""
        raise UserError(f"{message} (see `{self.prog} --help`)")


def known_names(kind: str, asked: Sequence[str], known: Iterable[str]) -> list[str]:
    """Return the names that were asked for, and for the beginning of some names all of these.

    Raises:
        UserError: there is no such name.
    """
    names, found = list(known), dict[str, None]()
    for one in asked:
        matches = [one] if one in names else [name for name in names if name.startswith(f"{one} ")]
        if not matches:
            raise UserError(f"{kind} {one!r} is unknown{did_you_mean(one, names)}; --help lists all {kind}s")
        found |= dict.fromkeys(matches)
    return list(found)
