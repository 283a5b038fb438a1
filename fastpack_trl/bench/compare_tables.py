"""A comparison of trainers as text for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastpack_trl.bench.parity import GRADIENT_NORM
from fastpack_trl.bench.step_watch import PHASES
from fastpack_trl.bench.views import side_names
from fastpack_trl.measure.tables import aligned, disturbances, interval_cell

_GIB = 1 << 30


def table(record: Mapping[str, Any]) -> str:
    """Return the record of `compare` for people: rates and ratios, where a step goes, what the device did."""
    rows = record["rows"]
    out = [] if record["complete"] else [f"INCOMPLETE: interrupted; {len(rows)} row(s) have something to show"]
    return "\n".join([*out, *(line for row in rows for line in ("", *_row_lines(row)))])


def _row_lines(row: Mapping[str, Any]) -> list[str]:
    names = side_names(row["sides"])
    good = {name: side for name, side in row["sides"].items() if "failed" not in side}
    phases = [name for name in PHASES if any(name in side["phases"] for side in good.values())]

    def lines(head: Sequence[str], cells: Callable[[Mapping[str, Any]], Sequence[str]]) -> list[str]:
        return aligned([["side", *head], *([names[name], *cells(side)] for name, side in good.items())])

    out = [*_setting(row), *aligned(_side_cells(row, names, good))]
    out += ["", "tokens per second (loss: those that are learned; capacity: every position, padding included)"]
    out += lines(["loss", "non-padding", "capacity"], _rates)
    computed = [(names[name], side.get("computed", 1)) for name, side in good.items()]  # older records do not say
    out += [f"{name}: tokens computed: {share:.0%} of the documents' tokens" for name, share in computed if share < 1]
    out += ["", "where a step goes (median ms)"]
    out += lines(phases, lambda side: [f"{side['phases'].get(each, 0) * 1000:,.1f}" for each in phases])
    out += ["", "what it costs (kernels per step; host syncs per micro-step without a log; -: none or unknown)"]
    out += lines(["MFU", "HFU", "peak GiB", "pinned GiB", "idle", "kernels", "host syncs"], _work)
    for name, side in good.items():
        out += _profile_lines(names[name], side)
    out += [f"{names[name]}: {side['failed']}" for name, side in row["sides"].items() if "failed" in side]
    out += [f"{names[name]}: {note}" for name, side in good.items() for note in side["notes"]]
    for name, side in good.items():
        if side["checkpointing"] != row["checkpointing"]:
            out.append(f"{names[name]} recomputes otherwise than the others: {side['checkpointing']}")
    return [*out, *disturbances([row])]


def _setting(row: Mapping[str, Any]) -> list[str]:
    documents, gate = row["documents"], row["gate"]
    count = row["micro_batches"]
    batches = f"{count} micro-batch{'es' * (count != 1)} of {row['tokens']:,} tokens per step"
    lengths = f"{documents['shortest']:,} to {documents['longest']:,} tokens, median {documents['median']:,g}"
    out = [row["setting"], f"{batches}; documents of {lengths}", row["isolation"]]
    if made_up := row.get("made_up"):
        out.append(f"the learner alone: {made_up} are made up, nothing is generated")
    found = f"largest difference in the timed steps {row['loss_difference']:.1e}"
    if gate is None:
        return [*out, f"losses were not compared before; {found}", ""]
    if row["loss_difference"] > gate["tolerance"]:
        found += ": they drift apart" + (" (dropout draws other numbers)" if gate["dropout"] != "none" else "")
    figures = "gradient norms" if gate.get("figure") == GRADIENT_NORM else "losses"  # older records do not say
    agree = f"{figures} agree within {gate['tolerance']:.0e} ({gate['dtype']}) over {len(gate['steps'])} steps before"
    return [*out, f"{agree}; {found}", ""]


def _side_cells(
    row: Mapping[str, Any], names: Mapping[str, str], good: Mapping[str, Mapping[str, Any]]
) -> list[list[str]]:
    cells = [["side", "step ms", "interval", f"{names[row['subject']]} is", "interval"]]
    for name, side in good.items():
        ratio, seconds = row["ratios"].get(name), side["seconds"]
        low, high = seconds["low"] * 1000, seconds["high"] * 1000
        step = [f"{seconds['median'] * 1000:,.1f}", f"{low:,.1f} to {high:,.1f} ({seconds['coverage']:.1%})"]
        gain = ["-", "-"] if ratio is None else [f"{ratio['median']:.2f}x", interval_cell(ratio)]
        cells.append([names[name], *step, *gain])
    return cells


def _rates(side: Mapping[str, Any]) -> list[str]:
    return [_cell(rate and rate["median"], ",.0f") for rate in side["token_rates"].values()]


def _work(side: Mapping[str, Any]) -> list[str]:
    memory, launches, syncs = side["memory"] or {}, side["launches"] or {}, side["host_syncs"] or {}
    peak = memory.get("reserved_bytes", memory.get("peak_bytes"))
    return [
        _cell(side["mfu"], ".1%"),
        _cell(side["hfu"], ".1%"),
        _cell(peak and peak / _GIB, ".2f"),
        _cell(memory.get("pinned_bytes", 0) / _GIB if memory else None, ".2f"),
        _cell(side["idle_share"], ".0%"),
        _cell(launches.get("kernels"), ","),
        _cell(syncs.get("per_micro_step"), "g"),
    ]


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _profile_lines(name: str, side: Mapping[str, Any]) -> list[str]:
    profile = side["profile"]
    if profile is None or "trace" not in profile:
        return []
    operators: Sequence[Mapping[str, Any]] = profile["operators"]
    cells = [["operator of the host", "own us", "calls"]]
    cells += [[entry["name"][:60], f"{entry['microseconds']:,.0f}", str(entry["calls"])] for entry in operators]
    return ["", f"{name}: the timeline of one step is in {profile['trace']}", *aligned(cells)]
