"""Whole training as a user would start it, every side in a process of its own, on the same rows of real text.

A side is a trainer at its defaults: nothing of this package is in the others. A run is the beginning of a long one. Its
first steps are left out, six at least, and for fastpack until all that pays back in a long run is on; twelve are timed,
each to the end of the device's work, and two are profiled. Tokens are counted by TRL, without padding. Losses of the
same steps are compared with stock's before times are believed. Public shapes with random weights. A file of ``--json``
grows run by run, and the same command goes on with it.
"""

from __future__ import annotations

import math
import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks import unsloth_run
from benchmarks.case_command import CaseCommand, known
from benchmarks.side_plot import figure
from benchmarks.side_table import table
from benchmarks.training_rows import FIRST, ROWS, layers_of
from benchmarks.training_side import OURS, SIDES, device_here, train_side
from fastpack_trl.bench.result_file import ResultFile, run_rows
from fastpack_trl.bench.training_run import OwnProcess, in_turn
from fastpack_trl.errors import UserError

CASE = "side_by_side"
TIMEOUT = 400
UNSLOTH = "unsloth"
"""Runs in an environment of its own, whose Python ``--unsloth`` names."""
DEFAULT_SIDES = ("stock", "stock compiled", OURS)
WATCHED = {"warmup": 6, "settling": 6, "longest_warmup": 48, "timed": 12, "profiled": 2, "multiple": 6}
"""Of `RunWatch`. Graphs are made for rows of other lengths in the first steps after all is decided; the warm-up ends
and the timed steps end at a log, so that tokens and losses are those of the timed steps."""


def measure_side(row: Mapping[str, Any], side: str, *, seed: int) -> dict[str, Any]:
    """Train one side in this process; return its figures."""
    logged = WATCHED["multiple"]
    trainer, watch = train_side(ROWS[row["row"]], SIDES[side], seed, WATCHED, logging_steps=logged)
    return watch.figures(trainer)


def measure(
    rows: Sequence[str], sides: Sequence[str], *, rounds: int, seed: int, seconds: float = math.inf,
    file: ResultFile | None = None, progress: bool = True, unsloth: str = "", timeout: float = TIMEOUT,
    case: str = CASE,
) -> dict[str, Any]:  # fmt: skip
    """Measure sides of rows, each run in a process of its own; a run that fails is an entry with its error.

    Args:
        rows, sides: of `ROWS` and `SIDES`, and `UNSLOTH`.
        rounds: runs of each side.
        seed: of weights and order.
        seconds: for all runs; none begins in less time than the longest so far took.
        file: written after every run; what it has of this very measurement is taken over.
        progress: show a bar, and name failures on stderr.
        unsloth: path of the Python of the side `UNSLOTH`.
        timeout: seconds after which a run is ended; its entry says so.
        case: of the record.

    Raises:
        UserError: an unknown row or side; no Python, or none that runs, for a side that needs one; `file` holds
            another run.
    """
    known(rows, ROWS)
    known(sides, (*SIDES, UNSLOTH), "side")
    if (UNSLOTH in sides) != bool(unsloth):
        raise UserError(f"{UNSLOTH} has an environment of its own: give --unsloth PYTHON and --sides {UNSLOTH}")
    if unsloth and shutil.which(unsloth) is None:
        raise UserError(f"--unsloth {unsloth!r} is no program: name the Python of an environment with {UNSLOTH}")
    here = OwnProcess("benchmarks.side_by_side:measure_side", {"seed": seed}, timeout=timeout)

    def launch(row: Mapping[str, Any], side: str) -> dict[str, Any]:
        return unsloth_run.run(row, seed, WATCHED, unsloth, timeout) if side == UNSLOTH else here(row, side)

    labels = [{"row": row, "tokens": ROWS[row].tokens, "layers": layers_of(row)} for row in rows]
    settings = {
        "warmup": WATCHED["warmup"] + WATCHED["settling"],
        **{name: WATCHED[name] for name in ("timed", "profiled", "longest_warmup")},
    }
    return run_rows(
        list(in_turn(labels, sides, rounds=rounds, launcher=launch)), case=case, settings=settings, seconds=seconds,
        device=device_here(), threads=torch.get_num_threads(), seed=seed, file=file, alike=True, progress=progress,
    )  # fmt: skip


def measure_asked(args: Namespace, file: ResultFile | None) -> dict[str, Any]:
    """Measure what the command line asks for."""
    return measure(
        args.rows, args.sides, rounds=args.rounds, seed=args.seed, seconds=args.seconds, file=file,
        unsloth=args.unsloth, timeout=args.timeout,
    )  # fmt: skip


def add_options(parser: ArgumentParser) -> None:
    """Add the options that other cases do not have."""
    add = parser.add_argument
    add("--unsloth", metavar="PYTHON", default="", help=f"of an environment with it, for the side {UNSLOTH}")
    add("--timeout", type=float, default=TIMEOUT, help="of one run, seconds (default: %(default)s)")


COMMAND = CaseCommand(
    case=CASE, help=__doc__, rows=ROWS, default_rows=FIRST, sides=(*SIDES, UNSLOTH), default_sides=DEFAULT_SIDES,
    rounds=2, measure=measure_asked, table=table, figure=figure, more=add_options,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(COMMAND.main())
