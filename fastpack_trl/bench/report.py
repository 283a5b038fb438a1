"""``fastpack-trl bench --report``: Markdown tables and PNG plots from the JSON files of runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastpack_trl.bench.canvas import require_matplotlib, save
from fastpack_trl.bench.plots import GIB, figures
from fastpack_trl.bench.views import Ratio, RowView, SideView, device_of, headline, no_gain, rows_of
from fastpack_trl.errors import UserError

DEFAULT_FOLDER = "bench-report"
_OF_PAIRS = (
    "*Times as fast* is the median over rounds of (seconds of the other side / seconds of fastpack in the same "
    "round), with its interval and how surely that covers the true median: what slows a round slows both sides. "
    "The quotient of the two medians in the table is another number where rounds differ."
)
HASH_KEY, SOURCE_KEY = "Source-SHA256", "Source"
"""Text chunks of a PNG: sha256 of the JSON file that it was drawn from, and its name."""


def write_report(paths: Sequence[str | Path], out: str | Path = DEFAULT_FOLDER) -> list[Path]:
    """Write ``report.md`` and a PNG per figure into `out`.

    Args:
        paths: JSON files of ``fastpack-trl bench --json``, or folders with such files.
        out: folder; made where it does not exist.

    Returns:
        The files, ``report.md`` first.

    Raises:
        UserError: no file, one that is no record of a benchmark, or matplotlib is missing.
    """
    records = {file: read_record(file) for file in json_files(paths)}
    require_matplotlib()
    folder = Path(out).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {str(out)!r} cannot be made: {error.strerror or error}") from error
    written: list[Path] = []
    parts = ["# Benchmark report"]
    names: set[str] = set()
    for file, record in records.items():
        stem = file.stem
        while stem in names:  # files of one name from several folders
            stem += "_"
        names.add(stem)
        pictures = []
        for name, figure in figures(record, file.name).items():
            picture = folder / f"{stem}_{name}.png"
            save(figure, picture, source_of(file))
            pictures.append(picture)
        written += pictures
        parts.append(markdown(record, file.name, [picture.name for picture in pictures]))
    report = folder / "report.md"
    report.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return [report, *written]


def json_files(paths: Sequence[str | Path]) -> list[Path]:
    """Return the files themselves, and of folders every ``*.json`` in them, sorted.

    Raises:
        UserError: nothing is there.
    """
    found: list[Path] = []
    for path in (Path(path).expanduser() for path in paths):
        if path.is_dir():
            inside = sorted(path.glob("*.json"))
            if not inside:
                raise UserError(
                    f"no JSON file in {str(path)!r}: run fastpack-trl bench --config FILE --json FILE first"
                )
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise UserError(f"no file {str(path)!r}: give JSON files of fastpack-trl bench, or a folder with some")
    return list(dict.fromkeys(found))


def read_record(file: Path) -> dict[str, Any]:
    """Return the record in a file of ``--json``.

    Raises:
        UserError: it is none.
    """
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{str(file)!r} cannot be read as JSON: {error}") from error
    needed = {"schema", "case", "rows", "settings", "versions", "machine"}
    if not isinstance(record, dict) or needed - record.keys():
        raise UserError(f"{str(file)!r} is no record of fastpack-trl bench: it lacks case, rows or versions")
    return record


def source_of(file: Path) -> dict[str, str]:
    """Return the text chunks of a picture: one drawn from another version of the file is found out by them."""
    return {SOURCE_KEY: file.name, HASH_KEY: hashlib.sha256(file.read_bytes()).hexdigest()}


def markdown(record: Mapping[str, Any], name: str, pictures: Iterable[str] = ()) -> str:
    """Return one record: facts, a table of every side, what could not be measured, what does not help, its pictures."""
    rows = rows_of(record)
    versions = ", ".join(f"{package} {version}" for package, version in record["versions"].items())
    commit = record["source"]["commit"]
    incomplete = "" if record["complete"] else "; INCOMPLETE, interrupted"
    facts = [
        f"- case {record['case']}, `{name}`, {record['date'][:10]}{incomplete}",
        f"- {device_of(record)}, {record['machine']['threads']} threads, seed {record['seed']}",
        f"- {versions}" + (f", commit {commit[:12]}" if commit else ""),
    ]
    notes = dict.fromkeys(f"- {row.label}: {note}" for row in rows for note in row.notes)
    weak = [f"- {weak_line(row, row_ratio)}" for row, row_ratio in no_gain(record)]
    parts = [f"## {headline(record)}", "\n".join(facts), table_of(rows)]
    parts += [_OF_PAIRS] if any(row.ratios for row in rows) else []
    parts += ["No gain, or none that the interval shows:\n\n" + "\n".join(weak)] if weak else []
    parts += ["Not measured:\n\n" + "\n".join(notes)] if notes else []
    parts += [f"![{record['case']}]({picture})" for picture in pictures]
    return "\n\n".join(parts)


def weak_line(row: RowView, ratio: Ratio) -> str:
    """Return ``setting, tokens: fastpack over stock compiled 0.87 (0.84 to 0.89, 96.1%): slower``."""
    pair = f"{row.named(ratio.by)} over {row.named(ratio.over)}"
    return f"{row.label}: {pair} {ratio}: {'slower' if ratio.slower else 'not told apart'}"


def table_of(rows: Sequence[RowView]) -> str:
    """Return every side of every row in Markdown; phases that no side has are left out."""
    timed = [row for row in rows if row.sides]
    if not timed:
        return "No row has sides to compare. Cases with tables of their own are in docs/benchmarks.md."
    phases = list(dict.fromkeys(phase for row in timed for side in row.sides for phase in side.phases))
    head = ["setting", "tokens", "side", "step, ms", *(f"{phase}, ms" for phase in phases)]
    head += ["tokens/s", "peak, GiB", "times as fast"]
    lines = [f"| {' | '.join(head)} |", f"| --- | ---: | --- |{' ---: |' * (len(head) - 3)}"]
    for row in timed:
        for side in row.sides:
            lines.append(f"| {' | '.join(_cells(row, side, phases))} |")
    return "\n".join(lines)


def _cells(row: RowView, side: SideView, phases: Sequence[str]) -> list[str]:
    ratios = "; ".join(f"{row.named(ratio.by)} {ratio}" for ratio in row.ratios_over(side.key))
    return [
        row.setting,
        f"{row.tokens:,}",
        side.name,
        _milliseconds(side.seconds),
        *(_milliseconds(side.phases.get(phase)) for phase in phases),
        f"{side.rate:,.0f}",
        "-" if side.peak_bytes is None else f"{side.peak_bytes / GIB:.1f}",
        ratios or "-",
    ]


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:,.2f}"
