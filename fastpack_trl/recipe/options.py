"""The option that several commands of ``fastpack-trl`` share; imports nothing heavy."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path


def add_json(parser: ArgumentParser, what: str) -> None:
    """Add ``--json FILE``: also write `what` to FILE."""
    parser.add_argument("--json", metavar="FILE", help=f"also write {what} to FILE")


def json_file(args: Namespace) -> Path | None:
    """Return the file of ``--json``; None without it.

    Raises:
        UserError: nothing can be written there. Ask before any work is done.
    """
    from fastpack_trl.measure.record import check_writable

    return check_writable(args.json) if args.json else None
