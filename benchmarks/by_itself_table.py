"""The table of a record of `benchmarks.by_itself`: gains, what was predicted, and what others have published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.arithmetic import SOUND, apart
from benchmarks.published import PUBLISHED
from benchmarks.readme_cells import SURE, grid
from fastpack_trl.bench.views import device_of

SENTENCES = {
    "metadata": "Packing metadata and mask made in each layer, or once per batch; all else is stock's (sdpa).",
    "reload": "Layer inputs fetched back from host memory one by one, or each while the layer after it runs.",
    "routing": "Tokens of each expert found expert by expert, or by one sort; the products are the same.",
}


def table(record: Mapping[str, Any]) -> str:
    """Return Markdown: a line per row, the sides that differ in the optimisation alone, and the others below."""
    name = record["settings"]["optimisation"]
    head = (
        f"**{SENTENCES[name]}** {device_of(record)}; forward, backward and step: by how much it is faster, with the "
        "interval of the step. *predicted*: from one such piece timed by itself (`benchmarks/arithmetic.py`)."
    )
    columns = "row, tokens | >off, ms | >on, ms | >forward | >backward | >step | >saved, ms | >predicted, ms"
    rows: list[list[str]] = []
    notes: list[str] = []
    for row in record["rows"]:
        title = f"{row['row']}, {row['tokens']:,}{' (tiny)' if row['tiny'] else ''}"
        if "gains" in row:
            rows.append([title, *_cells(row)])
            notes += _notes(row, title)
        else:
            why = row.get("skipped") or next(side["failed"] for side in row["sides"].values() if "failed" in side)
            rows.append([title, str(why).splitlines()[-1], *[""] * 8])
    lines = [head, "", grid(f"{columns} | >more memory | published by others", rows)]
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def _cells(row: Mapping[str, Any]) -> list[str]:
    gains = row["gains"]
    predicted = row["predicted"]["forward"] + row["predicted"]["backward"]
    known = {} if row["tiny"] else PUBLISHED
    quoted = next((one.quoted for name, one in known.items() if row["row"].startswith(name)), "-")
    return [
        *(_ms(row["sides"][row[side]]["seconds"]["median"]) for side in ("off", "on")),
        _gain(gains["forward"]["median"]), _gain(gains["backward"]["median"]),
        step_gain(row),
        _ms(row["saved_seconds"]), _ms(predicted),
        "-" if row["extra_bytes"] is None else f"{row['extra_bytes'] / 2**30:+.2f} GiB", quoted,
    ]  # fmt: skip


def step_gain(row: Mapping[str, Any]) -> str:
    """Return by how much a step is faster, with its interval: ``+3.0% (+2.7% to +3.3%)``."""
    step = row["gains"]["seconds"]
    sure = "" if step["coverage"] >= SURE else f", covers {step['coverage']:.0%}"
    return f"{_gain(step['median'])} ({_gain(step['low'])} to {_gain(step['high'])}{sure})"


def _notes(row: Mapping[str, Any], title: str) -> list[str]:
    notes = []
    predicted = row["predicted"]["forward"] + row["predicted"]["backward"]
    if not row["sound"]:
        off = apart(predicted, row["saved_seconds"])
        notes.append(f"- {title}: the prediction is off by {off:.0%}, over {SOUND:.0%}.")
    for name, side in row["sides"].items():
        if "failed" in side:
            notes.append(f"- {title}: *{name}* did not run: {str(side['failed']).splitlines()[-1]}")
        elif name not in (row["off"], row["on"]):
            taken, off = side["seconds"]["median"], row["sides"][row["off"]]["seconds"]["median"]
            notes.append(f"- {title}: *{name}* takes {_ms(taken)} ms, {off / taken:.2f} times as fast as *off*.")
    return notes


def _gain(ratio: float) -> str:
    return f"{ratio - 1:+.1%}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}"
