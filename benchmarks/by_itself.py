"""Each published optimisation by itself, on against off, with the same trainer, model, kernels and rows on both sides.

    python -m benchmarks.by_itself metadata --json FILE

``metadata``: packing metadata and mask once per batch, not in each layer. ``reload``: layer inputs fetched back from
host memory while a layer runs, not before it. ``routing``: tokens of experts found by one sort, not expert by expert.
Beside what was saved stands what `benchmarks.arithmetic` predicts from one such piece timed by itself, and what others
have published. A file of ``--json`` grows row by row, and the same command goes on with it.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import by_itself_metadata, by_itself_reload, by_itself_routing
from benchmarks.by_itself_table import table
from benchmarks.command import CaseCommand
from benchmarks.training_side import device_here
from fastpack_trl.bench.environment import quiet
from fastpack_trl.bench.result_file import RowTask
from fastpack_trl.errors import UserError, did_you_mean

CASE = "by_itself"


@dataclass(frozen=True, slots=True)
class Optimisation:
    """Rows in public shapes, the same with tiny models for a CPU, and what measures one of them."""

    rows: Mapping[str, Any]
    tiny: Mapping[str, Any]
    measure: Callable[[Any, int, str, int, float], dict[str, Any]]


OPTIMISATIONS = {
    "metadata": Optimisation(by_itself_metadata.ROWS, by_itself_metadata.TINY, by_itself_metadata.measure_row),
    "reload": Optimisation(by_itself_reload.ROWS, by_itself_reload.TINY, by_itself_reload.measure_row),
    "routing": Optimisation(by_itself_routing.ROWS, by_itself_routing.TINY, by_itself_routing.measure_row),
}


def asked(args: Namespace) -> tuple[str, list[str]]:
    """Return the optimisation, the first name of the command line, and its rows that are asked for.

    Raises:
        UserError: an unknown optimisation or row.
    """
    name, *rows = args.rows or [""]
    if name not in OPTIMISATIONS:
        raise UserError(f"there is no {name!r}{did_you_mean(name, OPTIMISATIONS)} (known: {', '.join(OPTIMISATIONS)})")
    known = OPTIMISATIONS[name].rows
    for row in rows:
        if row not in known:
            raise UserError(f"there is no row {row!r}{did_you_mean(row, known)} (rows: {', '.join(known)})")
    return name, rows or list(known)


def tasks(args: Namespace) -> list[RowTask]:
    """Return the rows of one optimisation, each measured with all of its sides in this process, in turn."""
    name, rows = asked(args)
    which = OPTIMISATIONS[name]
    found = which.tiny if args.tiny else which.rows

    def measure(row: str, seconds: float) -> dict[str, Any]:
        with quiet():
            return which.measure(found[row], args.rounds, device_here(), args.seed, seconds)

    return [
        RowTask({"setting": row, "row": row, "tokens": tokens_of(found[row]), "tiny": args.tiny}, partial(measure, row))
        for row in rows
    ]


def settings(args: Namespace) -> dict[str, Any]:
    """Return what is switched on and off, and how often."""
    return {"optimisation": asked(args)[0], "rounds": args.rounds, "tiny": args.tiny}


def tokens_of(row: Any) -> int:
    """Return the tokens of a packed row; those of a reload are the last of a tuple."""
    return int(row[2] if isinstance(row, tuple) else row.tokens)


COMMAND = CaseCommand(
    case=CASE, help=__doc__, rows=(), default_rows=(), rounds=7, seconds=190.0, tasks=tasks,
    settings=settings, table=table,
    more=lambda parser: parser.add_argument("--tiny", action="store_true", help="tiny models: it shows that rows run"),
)  # fmt: skip

main = COMMAND.main

if __name__ == "__main__":
    raise SystemExit(COMMAND.start())
