"""The published table as text: what was measured of each row, and what others have published about it, quoted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.published import GUIDE, PUBLISHED, ROWS
from fastpack_trl.bench.views import Ratio, rows_of

NOT_MEASURED, TUNED = "not measured yet", "tuned"
SURE = 0.95
"""Coverage from which an interval is given without it; six pairs reach that."""
_HEAD = (
    "| row | over | forward | backward | step | times as fast as | published by others |",
    "| --- | --- | ---: | ---: | ---: | --- | --- |",
)
LEGEND = (
    "*before*: what the published figure is measured against: mask and metadata made again in each layer (*rebuild*), "
    "one buffer without prefetch (*single_buffer*), one expert after the other (*loop*). forward, backward and step: "
    "by how much fastpack is faster than that, and than *tuned*, with the interval of the step. *stock*: as "
    "installed; *tuned*: stock with the packed attention of this package and layers compiled by accelerate. Published: "
    f"quoted from {GUIDE}, on other hardware and against other code than here; none of it is a figure of this package."
)


def gains_table(records: Iterable[Mapping[str, Any]], *, every_row: bool) -> str:
    """Return Markdown with a line per row of the published table.

    Args:
        records: of the case ``headline``; a later one's rows replace an earlier one's.
        every_row: also the rows that no record has, as not measured yet.
    """
    found: dict[str, tuple[Mapping[str, Any], list[Ratio]]] = {}
    for record in records:
        for row, view in zip(record["rows"], rows_of(record), strict=True):
            if row.get("gains"):
                found[row["row"]] = row, list(view.ratios)
    lines = list(_HEAD)
    for name, title in ROWS.items():
        quoted = PUBLISHED[name].quoted if name in PUBLISHED else "-"
        if name in found:
            row, ratios = found[name]
            setting = f"{row['setting']}, {row['tokens']:,} tokens"
            lines.append(f"| {' | '.join([setting, *_gain_cells(row, row['before']), _over(ratios), quoted])} |")
            if TUNED in row["gains"]:
                lines.append(f"| {' | '.join([setting, *_gain_cells(row, TUNED), '', ''])} |")
        elif every_row:
            lines.append(f"| {title} | {NOT_MEASURED} | - | - | - | - | {quoted} |")
    return "\n".join(lines)


def report_lines(record: Mapping[str, Any]) -> list[str]:
    """Return the paragraphs that a report of ``--report`` has before the table of this record."""
    return [gains_table([record], every_row=False), LEGEND] if record["case"] == "headline" else []


def gain_lines(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return, per row, the gain over its before and over stock tuned, and the published figures, for a terminal."""
    out: list[str] = []
    for row in rows:
        out += [""]
        for other in [row["before"], *([TUNED] if TUNED in row.get("gains", {}) else [])]:
            _, forward, backward, step = _gain_cells(row, other)
            out.append(f"{row['row']} over {other}: forward {forward}, backward {backward}, step {step}")
        if row["row"] in PUBLISHED:
            published = PUBLISHED[row["row"]]
            out.append(f"  published by others: {published.quoted} ({published.setting}; {published.source})")
    return out


def tiny_lines(record: Mapping[str, Any]) -> list[str]:
    """Return the warning that stands below the figures of tiny models."""
    if record["settings"].get("scale") != "tiny":
        return []
    said = (
        "Tiny models: this shows that every row and every side runs. Their figures are host time and say nothing about "
        "the public shapes, nor about what is published; --scale full on a large GPU measures those."
    )
    return ["", said]


def _gain_cells(row: Mapping[str, Any], other: str) -> list[str]:
    """Return the name of the other side; gain over it in forward, backward and step."""
    gains = row.get("gains", {}).get(other)
    if not gains:
        return [f"{other}: failed", "-", "-", "-"]
    step = gains["seconds"]
    covers = "" if step["coverage"] >= SURE else f", covers {step['coverage']:.0%}"  # fewer than six pairs
    between = f"{_percent(step['low'])} to {_percent(step['high'])}{covers}" if step["coverage"] else "one pair"
    interval = f"{_percent(step['median'])} ({between})"
    parts = [_percent(gains[part]["median"]) if part in gains else "-" for part in ("forward", "backward")]
    return [other, *parts, interval]


def _percent(ratio: float) -> str:
    return f"{ratio - 1:+.1%}"


def _over(ratios: Iterable[Ratio]) -> str:
    return "; ".join(f"{ratio.over}: {ratio.by} {ratio}" for ratio in ratios) or "-"
