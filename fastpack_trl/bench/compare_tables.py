"""A comparison of trainers as text for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastpack_trl.bench.gaps import gap_cells
from fastpack_trl.bench.names import side_names
from fastpack_trl.bench.step_watch import PHASES
from fastpack_trl.measure.tables import aligned, disturbances, interval_cell

_GIB = 1 << 30


def table(record: Mapping[str, Any]) -> str:
    """Return the record of `compare` for people: rates and ratios, where a step goes, what the device did."""
    rows = record["rows"]
    out = [] if record["complete"] else [f"INCOMPLETE: interrupted; {len(rows)} row(s) have something to show"]
    for row in rows:
        out += ["", *row_lines(row)]
    return "\n".join(out)


def row_lines(row: Mapping[str, Any]) -> list[str]:
    """Return one row: its setting, a table of the sides, one of their phases, and what could not be measured."""
    names = side_names(row["sides"])
    good = {name: side for name, side in row["sides"].items() if "failed" not in side}
    phases = [name for name in PHASES if any(name in side["phases"] for side in good.values())]
    out = [*_setting(row), *aligned(_side_cells(row, good))]
    out += ["", "tokens per second (loss: those that are learned; capacity: every position, padding included)"]
    out += aligned(_rate_cells(names, good))
    out += ["", "where a step goes (median ms)"]
    out += aligned(
        [["side", *phases]]
        + [
            [names[name], *(f"{side['phases'].get(each, 0) * 1000:,.1f}" for each in phases)]
            for name, side in good.items()
        ]
    )
    work = [["side", "MFU", "HFU", "peak GiB", "pinned GiB", "idle", "kernels", "host syncs"]]
    work += [[names[name], *_work(side)] for name, side in good.items()]
    out += [
        "",
        "what it costs (kernels per step; host syncs per micro-step without a log; -: none or unknown)",
    ]
    out += aligned(work)
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
    found = f"largest difference in the timed steps {row['loss_difference']:.1e}"
    if gate is None:
        return [*out, f"losses were not compared before; {found}", ""]
    steps = len(gate["steps"])
    if row["loss_difference"] > gate["tolerance"]:
        found += ": they drift apart" + (" (dropout draws other numbers)" if gate["dropout"] != "none" else "")
    return [
        *out,
        f"losses agree within {gate['tolerance']:.0e} ({gate['dtype']}) over {steps} steps before; {found}",
        "",
    ]


def _side_cells(row: Mapping[str, Any], good: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    names = side_names(row["sides"])
    subject = names[row["subject"]]
    cells = [["side", "step ms", "interval", f"{subject} is", "interval"]]
    for name, side in good.items():
        ratio, seconds = row["ratios"].get(name), side["seconds"]
        cells.append(
            [
                names[name],
                f"{seconds['median'] * 1000:,.1f}",
                f"{seconds['low'] * 1000:,.1f} to {seconds['high'] * 1000:,.1f} ({seconds['coverage']:.1%})",
                "-" if ratio is None else f"{ratio['median']:.2f}x",
                "-" if ratio is None else interval_cell(ratio),
            ]
        )
    return cells


def _rate_cells(names: Mapping[str, str], good: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    cells = [["side", "loss", "non-padding", "capacity"]]
    for name, side in good.items():
        rates = side["token_rates"]
        cells.append([names[name], *("-" if rate is None else f"{rate['median']:,.0f}" for rate in rates.values())])
    return cells


def _work(side: Mapping[str, Any]) -> list[str]:
    memory, syncs, launches = side["memory"], side["host_syncs"], side["launches"]
    return [
        "-" if side["mfu"] is None else f"{side['mfu']:.1%}",
        "-" if side["hfu"] is None else f"{side['hfu']:.1%}",
        "-" if memory is None else f"{memory.get('reserved_bytes', memory['peak_bytes']) / _GIB:.2f}",
        "-" if memory is None else f"{memory['pinned_bytes'] / _GIB:.2f}",
        "-" if side["idle_share"] is None else f"{side['idle_share']:.0%}",
        "-" if launches is None else f"{launches['kernels']:,}",
        "-" if syncs is None else f"{syncs['per_micro_step']:g}",
    ]


def _profile_lines(name: str, side: Mapping[str, Any]) -> list[str]:
    profile = side["profile"]
    if profile is None or "trace" not in profile:
        return []
    out = ["", f"{name}: largest gaps in the timeline of one step ({profile['timeline']}); {profile['trace']}"]
    out += aligned(gap_cells(profile["gaps"]))
    operators: Sequence[Mapping[str, Any]] = profile["operators"]
    cells = [["operator of the host", "own us", "calls"]]
    cells += [[entry["name"][:60], f"{entry['microseconds']:,.0f}", str(entry["calls"])] for entry in operators]
    return [*out, "", *aligned(cells)]
