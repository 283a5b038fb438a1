"""Each published optimisation by itself, on against off, with the same trainer, model, kernels and rows on both sides.

    python -m benchmarks.by_itself metadata --json FILE

``metadata``: packing metadata and mask once per batch, not in each layer. ``reload``: layer inputs fetched back from
host memory while a layer runs, not before it. ``routing``: tokens of experts found by one sort, not expert by expert.
Beside what was saved stands what `benchmarks.arithmetic` predicts from one such piece timed by itself, and what others
have published. A file of ``--json`` grows row by row, and the same command goes on with it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks import by_itself_metadata, by_itself_reload, by_itself_routing
from benchmarks.by_itself_table import table
from benchmarks.one_line import in_one_line, record_of
from fastpack_trl.bench.environment import quiet
from fastpack_trl.bench.result_file import ResultFile, RowTask, run_rows
from fastpack_trl.errors import UserError, did_you_mean
from fastpack_trl.measure.record import check_writable

CASE = "by_itself"
ROUNDS, SECONDS = 7, 190.0


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


def measure(
    name: str, rows: Sequence[str] | None = None, *, tiny: bool = False, rounds: int = ROUNDS, seconds: float = SECONDS,
    seed: int = 0, file: ResultFile | None = None, progress: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Measure the rows of one optimisation, each with all of its sides in this process, in turn.

    Args:
        name: of `OPTIMISATIONS`.
        rows: of it; all by default.
        tiny: with tiny models of the same families: it shows that every row runs.
        rounds: timed passes of each side; 6 or more give an interval of 95 %.
        seconds: for all rows; each may use an equal share of what is left.
        seed: of weights, data and order.
        file: written after every row.
        progress: show a bar, and name failures on stderr.

    Raises:
        UserError: an unknown optimisation or row; `file` holds another run.
    """
    if name not in OPTIMISATIONS:
        raise UserError(f"there is no {name!r}{did_you_mean(name, OPTIMISATIONS)} (known: {', '.join(OPTIMISATIONS)})")
    which = OPTIMISATIONS[name]
    known = which.tiny if tiny else which.rows
    for row in rows or ():
        if row not in known:
            raise UserError(f"there is no row {row!r}{did_you_mean(row, known)} (rows: {', '.join(known)})")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tasks = [
        RowTask(
            {"setting": row, "row": row, "tokens": tokens_of(known[row]), "tiny": tiny},
            partial(which.measure, known[row], rounds, device, seed), empty={},
        )
        for row in rows or known
    ]  # fmt: skip
    with quiet():
        return run_rows(
            tasks, case=CASE, settings={"optimisation": name, "rounds": rounds, "tiny": tiny},
            apart={"seconds": seconds}, seconds=seconds, device=device, threads=torch.get_num_threads(), seed=seed,
            file=file, progress=progress,
        )  # fmt: skip


def tokens_of(row: Any) -> int:
    """Return the tokens of a packed row; those of a reload are the last of a tuple."""
    return int(row[2] if isinstance(row, tuple) else row.tokens)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``python -m benchmarks.by_itself``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.by_itself", description=__doc__)
    parser.add_argument("name", choices=list(OPTIMISATIONS))
    parser.add_argument("--rows", nargs="+", help="of the optimisation (default: all)")
    parser.add_argument("--tiny", action="store_true", help="tiny models: it shows that every row runs")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="timed passes of each side (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all rows (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the record to FILE; the same command goes on with it")
    parser.add_argument("--again", action="store_true", help="measure anew what FILE has")
    parser.add_argument("--report", metavar="FILE", help="print the table of a record and stop")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    if args.report is not None:
        print(table(record_of(args.report, CASE)))
        return
    file = None if args.json is None else ResultFile(check_writable(args.json), again=args.again)
    record = measure(
        args.name, args.rows, tiny=args.tiny, rounds=args.rounds, seconds=args.seconds, seed=args.seed, file=file
    )
    if file is not None:
        file.save(record)
    print(table(record))


if __name__ == "__main__":
    raise SystemExit(in_one_line("python -m benchmarks.by_itself", main))
