"""Records: one JSON object per run, a line of a file; those that are kept lie in ``results/CASE.jsonl``."""

from __future__ import annotations

import hashlib
import json
import shlex
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fastpack_trl.errors import UserError
from fastpack_trl.measure.code_hash import BENCHMARKS, code_hashes
from fastpack_trl.measure.record import date_now, machine, source, versions

Run = Mapping[str, Any]
RESULTS = Path(__file__).parent / "results"
REFERENCE = "trl float32"
"""Side whose losses alone are read, so it may be measured by a command of its own."""
APART = {BENCHMARKS, "cli", "recipe", "quickstart.py"}  # no measured step runs them: they read commands and YAML


def read(*files: Path) -> list[dict[str, Any]]:
    """Return the records of some files, of all in `RESULTS` by default.

    Raises:
        UserError: a file is missing, or no file of records.
    """
    try:
        lines = [line for file in files or sorted(RESULTS.glob("*.jsonl")) for line in file.read_text().splitlines()]
        return [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the records: {error}") from error


def newest(records: Iterable[Run]) -> list[Run]:
    """Return the records of the newest command that measured each row, on each device; `REFERENCE` counts by itself.

    Under a cap each side does.
    """
    last: dict[tuple[str, ...], str] = {}
    found = [
        ((*key_of(run), run["side"] if "cap_gib" in run or run["side"] == REFERENCE else ""), run) for run in records
    ]
    for key, run in found:
        last[key] = max(last.get(key, ""), _begun(run))
    return [run for key, run in found if _begun(run) == last[key]]


def _begun(run: Run) -> str:
    """Return when a command was started, also if it was continued later."""
    return str(run.get("begun", run["date"]))


def key_of(run: Run) -> tuple[str, str, str]:
    """Return what a newer record replaces: case, row and GPU; all CPUs count as one."""
    return run["case"], run["row"], run["machine"].get("gpu", "CPU")


def append(file: Path | None, run: Run) -> None:
    """Append a record to a file, if there is one."""
    if file is not None:
        with file.open("a", encoding="utf-8") as stream:
            stream.write(line_of(run))


def line_of(run: Run) -> str:
    """Return the line of a record in a file, its floats with seven digits."""
    few = json.loads(json.dumps(run), parse_float=lambda digits: short(float(digits)))
    return json.dumps(few, separators=(",", ":")) + "\n"


def add(records: Sequence[Run], folder: Path = RESULTS) -> None:
    """Write records into the files of their cases, in place of older ones of the same rows; each one once.

    A report that equals that of another round is left out of the later one.
    """
    for case in dict.fromkeys(run["case"] for run in records):
        file = folder / f"{case}.jsonl"
        new = [run for run in records if run["case"] == case and "failed" not in run]
        kept = newest([*(read(file) if file.exists() else ()), *new])
        lines, told = list[str](), set[tuple[str, ...]]()
        for run in {line_of(run): run for run in kept}.values():
            side = (*key_of(run), run["side"], _begun(run), json.dumps(run.get("report")))
            lines.append(line_of({**run, "report": None} if run.get("report") and side in told else run))
            told.add(side)
        file.write_text("".join(dict.fromkeys(lines)), encoding="utf-8")


def short(value: float | None, digits: int = 7) -> float | None:
    """Return a number with few digits, as records hold it."""
    return None if value is None else float(f"{value:.{digits}g}")


def facts_of(args: Namespace, done: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what all records of a command share."""
    here = source()
    edited = {"note": f"with changes {here['changes']} that are in no commit"} if here.get("changes") else {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    words = (Path(word).name if word.startswith("/") else word for word in args.words)
    return {
        "command": f"python -m benchmarks {shlex.join(words)}",
        "date": date_now(), **({"begun": _begun(done[-1])} if done else {}),
        "commit": (here["commit"] or "unknown")[:12], "tree": tree_now(), **edited, "versions": versions(),
        "machine": {**machine(device), "threads": args.threads},
    }  # fmt: skip


def tree_now() -> str:
    """Return one hash of the package's code that measured steps run, without comments and docstrings."""
    rooms = {room: found for room, found in sorted(code_hashes().items()) if room not in APART}
    return hashlib.sha256(json.dumps(rooms).encode()).hexdigest()[:12]
