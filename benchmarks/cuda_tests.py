"""The tests marked ``cuda`` as a record: how many passed, with the commit, the versions and the machine.

``python -m benchmarks.cuda_tests --workers 14 --json FILE``, in a checkout, on a machine with a GPU. What follows
``--`` goes to pytest as it is.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.command import CaseCommand
from fastpack_trl.bench.result_file import ResultFile
from fastpack_trl.bench.views import device_of
from fastpack_trl.errors import UserError
from fastpack_trl.measure.record import make_record

CASE, MARKER = "cuda_tests", "cuda"


def run_tests(workers: int, arguments: Sequence[str], marker: str = MARKER) -> dict[str, Any]:
    """Run the tests with `marker`, show what pytest prints, and count.

    Args:
        workers: processes; 0 runs them in one, without pytest-xdist.

    Returns:
        ``passed``, ``failed``, ``skipped``: how many. ``seconds``: wall time. ``failures``: the tests. ``skips``: the
        tests with the reason.

    Raises:
        UserError: pytest did not run.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="fastpack-tests-") as folder:
        report = Path(folder) / "report.xml"
        spread = ["-n", str(workers)] if workers else []
        command = [sys.executable, "-m", "pytest", "-q", "-m", marker, *spread, f"--junitxml={report}", *arguments]
        done = subprocess.run(command, cwd=Path(__file__).parents[1])
        if not report.exists():
            raise UserError(f"pytest ended with exit code {done.returncode} and no report; it says why above")
        cases = list(ElementTree.parse(report).iter("testcase"))  # noqa: S314 - pytest has just written it
    failures = [_name(case) for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skips = {
        _name(case): str(left_out.get("message")) for case in cases if (left_out := case.find("skipped")) is not None
    }
    return {
        "passed": len({_name(case) for case in cases} - {*failures, *skips}),
        "failed": len(set(failures)),
        "skipped": len(skips),
        "seconds": time.perf_counter() - start,
        "failures": sorted(set(failures)),
        "skips": skips,
    }


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"


def said(name: str, record: Mapping[str, Any]) -> str:
    """Return one paragraph for a page: the counts, the machine, the versions and the commit.

    Args:
        record: with one row of `run_tests`.
    """
    row, versions, source = record["rows"][0], record["versions"], record["source"]
    commit = source["commit"] or source.get("tree") or "unknown"
    failed = f", **{row['failed']} failed** ({', '.join(row['failures'])})" if row["failed"] else ", none failed"
    return (
        f"**Tests on a GPU.** {row['passed']} passed{failed}, {row['skipped']} left out, {device_of(record)}, "
        f"torch {versions['torch']}, transformers {versions['transformers']}, commit {commit[:7]}. "
        f"Record: `benchmarks/results/{name}`; `{command(record)}`."
    )


def command(record: Mapping[str, Any]) -> str:
    """Return the command line that makes such a record."""
    settings = record["settings"]
    given = " ".join(["", "--", *settings["pytest"]]) if settings["pytest"] else ""
    return f"python -m benchmarks.cuda_tests --workers {settings['workers']} --json FILE{given}"


def _record(args: Namespace, file: ResultFile | None) -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        raise UserError("torch sees no CUDA device here; make test runs the rest")
    settings = {"marker": MARKER, "workers": args.workers, "pytest": args.rows}
    return make_record(
        case=CASE, settings=settings, rows=[run_tests(args.workers, args.rows)], complete=True, device="cuda",
        threads=torch.get_num_threads(), seed=0,
    )  # fmt: skip


def table(record: Mapping[str, Any]) -> str:
    """Return the counts and seconds of the tests."""
    (row,) = record["rows"]
    return f"{row['passed']} passed, {row['failed']} failed, {row['skipped']} skipped in {row['seconds']:.0f} s"


def add_options(parser: ArgumentParser) -> None:
    """Add the number of processes."""
    parser.add_argument("--workers", type=int, default=0, help="processes; needs pytest-xdist (default: one)")


COMMAND = CaseCommand(case=CASE, help=__doc__, rows=(), record=_record, table=table, more=add_options)

if __name__ == "__main__":
    raise SystemExit(COMMAND.start())
