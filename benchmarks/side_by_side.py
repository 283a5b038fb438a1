"""Whole training as a user would start it, every side in a process of its own, on the same rows of real text.

A side is a trainer at its defaults: nothing of this package is in the others. A run is the beginning of one of 500
steps. Its first steps are left out, six at least, and for fastpack until all that pays back in such a run is on; sixty
are timed (twenty-four of models from 8B on), each to the end of the device's work, and two are profiled. The seconds of
the whole run are those that were measured, and the mean of the timed steps for the rest. Tokens are counted by TRL,
without padding. Losses of the same steps are compared with stock's before times are believed. Public shapes with random
weights. A file of ``--json`` grows run by run, and the same command goes on with it.
"""

from __future__ import annotations

import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from typing import Any

from benchmarks import unsloth_run
from benchmarks.command import CaseCommand
from benchmarks.side_table import WHOLE_RUN, figure, table
from benchmarks.training_rows import FIRST, ROWS, layers_of
from benchmarks.training_side import OURS, SIDES, train_side
from fastpack_trl.bench.training_run import OwnProcess, TrainingRun, in_turn
from fastpack_trl.errors import UserError

CASE = "side_by_side"
TIMEOUT = 400
UNSLOTH = "unsloth"
"""Runs in an environment of its own, whose Python ``--unsloth`` names."""
DEFAULT_SIDES = ("stock", "stock compiled", OURS)
WATCHED = {"warmup": 6, "settling": 6, "longest_warmup": 48, "timed": 60, "profiled": 2, "multiple": 6}
"""Of `RunWatch`. Graphs are made for rows of other lengths in the first steps after all is decided; the warm-up ends
and the timed steps end at a log, so that tokens and losses are those of the timed steps."""
LARGE, TIMED_OF_LARGE = ("qwen3-8b", "qwen3-14b", "qwen3-30b-a3b", "qwen3-32b"), 24


def watched(row: str) -> dict[str, Any]:
    """Return the arguments of `RunWatch` for a row."""
    return WATCHED | ({"timed": TIMED_OF_LARGE} if ROWS[row].model in LARGE else {})


def measure_side(row: Mapping[str, Any], side: str, *, seed: int) -> dict[str, Any]:
    """Train one side in this process; return its figures."""
    steps: dict[str, Any] = {"logging_steps": WATCHED["multiple"], "max_steps": WHOLE_RUN}
    trainer, watch = train_side(ROWS[row["row"]], SIDES[side], seed, watched(row["row"]), **steps)
    return watch.figures(trainer)


def tasks(args: Namespace) -> list[TrainingRun]:
    """Return the runs, each in a process of its own.

    Raises:
        UserError: no Python, or none that runs, for a side that needs one.
    """
    python = args.unsloth
    if (UNSLOTH in args.sides) != bool(python):
        raise UserError(f"{UNSLOTH} has an environment of its own: give --unsloth PYTHON and --sides {UNSLOTH}")
    if python and shutil.which(python) is None:
        raise UserError(f"--unsloth {python!r} is no program: name the Python of an environment with {UNSLOTH}")
    here = OwnProcess("benchmarks.side_by_side:measure_side", {"seed": args.seed}, timeout=args.timeout)

    def launch(row: Mapping[str, Any], side: str) -> dict[str, Any]:
        if side == UNSLOTH:
            return unsloth_run.run(row, args.seed, watched(row["row"]), python, args.timeout)
        return here(row, side)

    labels = [{"row": row, "tokens": ROWS[row].tokens, "layers": layers_of(row)} for row in args.rows]
    return list(in_turn(labels, args.sides, rounds=args.rounds, launcher=launch))


def settings(args: Namespace) -> dict[str, Any]:
    """Return which steps are left out, timed and profiled, and those of a whole run."""
    kept = {name: WATCHED[name] for name in ("timed", "profiled", "longest_warmup")}
    kept |= {"timed_of_large": TIMED_OF_LARGE, "run": WHOLE_RUN}
    return {"warmup": WATCHED["warmup"] + WATCHED["settling"], **kept}


def add_options(parser: ArgumentParser) -> None:
    """Add the options that other cases do not have."""
    add = parser.add_argument
    add("--unsloth", metavar="PYTHON", default="", help=f"of an environment with it, for the side {UNSLOTH}")
    add("--timeout", type=float, default=TIMEOUT, help="of one run, seconds (default: %(default)s)")


COMMAND = CaseCommand(
    case=CASE, help=__doc__, rows=ROWS, default_rows=FIRST, sides=(*SIDES, UNSLOTH), default_sides=DEFAULT_SIDES,
    rounds=2, tasks=tasks, settings=settings, table=table, alike=True, figure=figure, more=add_options,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(COMMAND.start())
