"""The tables of cases whose sides take turns in one process: one for the terminal, and those of docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from benchmarks.command import COMMANDS
from benchmarks.readme_cells import grid, made_by, ratio_cell
from fastpack_trl.bench.report import table_of
from fastpack_trl.bench.views import device_of, rows_of
from fastpack_trl.measure.tables import NOISE_CORES, disturbances, fact_lines

Record = Mapping[str, Any]
_PAIR = ("stock", "fastpack")


def table(record: Record) -> str:
    """Return a record for people: every side of every row, more about some cases, and what could not be measured."""
    views = rows_of(record)
    out = [f"{record['case']}: {COMMANDS[record['case']]}", *fact_lines(record)]
    if not record["complete"]:
        out.append(f"INCOMPLETE: interrupted; {len(views)} row(s) were finished")
    out += ["", table_of(views), ""]
    for row, view in zip(record["rows"], views, strict=True):
        out += [f"{view.label}: {line}" for line in (*_MORE.get(record["case"], _nothing)(row), *view.notes)]
    return "\n".join([*dict.fromkeys(out), *disturbances(record["rows"])])


def _nothing(_row: Record) -> Iterator[str]:
    yield from ()


def _kept(row: Record) -> Iterator[str]:
    for name, side in row["sides"].items():
        if "saved_bytes" in side:
            yield f"{name}: {side['saved_bytes'] / 2**20:,.1f} MiB kept for backward"


def _hidden(row: Record) -> Iterator[str]:
    for name, events in row.get("copies", {}).get("events", {}).items():
        if events is not None and events["hidden"] is not None:
            yield f"{name}: {events['copy_seconds'] * 1000:.1f} ms of copies, {events['hidden']:.1%} hidden"


_MORE: dict[str, Callable[[Record], Iterator[str]]] = {"moe": _kept, "activation_memory": _hidden}


def _pair(sides: Record) -> list[str]:
    return [f"{sides[side]['tokens_per_second']['median']:,.0f}" for side in _PAIR]


def _ratio(row: Record) -> Any:
    """Return stock's time over ours; older records have it alone."""
    return row["ratios"]["stock"] if "ratios" in row else row["ratio"]


def collator_table(name: str, record: Record) -> str:
    """Return tokens per second of both collators by row."""
    head = "**Fetching and collating packed rows, one core, `PackingCollator` beside TRL's collator.**"
    rows = [
        [
            f"{row['tokens']:,}", *(f"{row[side]['tokens_per_second']['median'] / 1e6:,.1f} M" for side in _PAIR),
            ratio_cell(row["ratio"]),
        ] for row in record["rows"]
    ]  # fmt: skip
    columns = ">row, tokens | >TRL, tokens/s | >fastpack, tokens/s | >ratio"
    return f"{head}\n\n{grid(columns, rows)}\n\n{made_by(name, record)}"


def host_overhead_table(name: str, record: Record) -> str:
    """Return the host's work of both trainers by setting and row."""
    coverage = min(part["coverage"] for row in record["rows"] for part in (_ratio(row), row["overhead"]))
    head = (
        "**Host work of a training step outside of forward, backward, clipping and optimizer.** Both trainers' own "
        f"loops, micro-batches of one row; ratios with their intervals of at least {coverage:.0%}."
    )
    rows = [
        [
            row["setting"], f"{row['tokens']:,}",
            *(f"{1000 * row.get('sides', row)[side]['overhead_seconds']['median']:,.1f}" for side in _PAIR),
            ratio_cell(row["overhead"]), ratio_cell(_ratio(row)),
        ] for row in record["rows"]
    ]  # fmt: skip
    columns = "setting | >row, tokens | >stock, ms | >fastpack, ms | >of stock's | >whole step, ratio"
    return f"{head}\n\n{grid(columns, rows)}\n\n{made_by(name, record)}"


def moe_table(name: str, record: Record) -> str:
    """Return times and memory of stock and fastpack by configuration; below it those of the other sides."""
    timed = [row for row in record["rows"] if "stock" in row["ratios"]]
    coverage = min(row["ratios"]["stock"]["seconds"]["coverage"] for row in timed)
    head = (
        f"**Mixture-of-experts, forward and backward: `grouped_mm` and PEFT (*stock*) beside fastpack, on "
        f"{device_of(record)}.** Ratio of times with its interval of at least {coverage:.0%}; "
        "memory that a forward keeps for backward."
    )
    rows, beside = [], _noise(timed, "Other processes kept up to {:.1f} cores busy meanwhile.")
    for row in timed:
        sides, ratio = row["sides"], row["ratios"]["stock"]
        parts = [f"{ratio[part]['median']:.2f}" for part in ("forward", "backward")]
        kept = " / ".join(f"{sides[side]['saved_bytes'] / 2**20:,.0f}" for side in _PAIR)
        rows.append([row["setting"], f"{row['tokens']:,}", *_pair(sides), ratio_cell(ratio["seconds"]), *parts, kept])
        for side, found in row["ratios"].items():
            if side != "stock":
                beside += f" Over *{side}*, {row['setting']}, {row['tokens']:,} tokens: {ratio_cell(found['seconds'])}."
    columns = "configuration | >tokens | >stock, tok/s | >fastpack, tok/s | >ratio | >forward | >backward | >kept, MiB"
    return f"{head}\n\n{grid(columns, rows)}\n\n{made_by(name, record)}{beside}"


def _noise(rows: Iterable[Record], said: str) -> str:
    load = max(row.get("other_load") or 0.0 for row in rows)
    return f" {said.format(load)}" if load > NOISE_CORES else ""


def activation_table(name: str, record: Record) -> str:
    """Return times over that of the double buffer, memory and hidden copies by row."""
    timed = [row for row in record["rows"] if _ran(row, "double_buffer")]
    head = (
        f"**Checkpointed layer inputs in host memory, forward and backward on {device_of(record)}.** *checkpoint*: all "
        "on the device; *transformers*: its own offload; *single*: this package with one buffer; *double*: as "
        "installed, the next input on its way while a layer runs. Ratios: time over that of *double*."
    )
    rows = []
    for row in timed:
        others = ("checkpoint", "transformers_offload", "single_buffer")
        over = [ratio_cell(row["ratios"][other]) if other in row["ratios"] else "-" for other in others]
        peaks = " / ".join(f"{_peak(row, side) / 2**30:.1f}" for side in ("checkpoint", "double_buffer"))
        hidden = f"{row['copies']['events']['double_buffer']['hidden']:.1%}"
        rows.append([f"{row['setting']}, {row['tokens']:,}", *over, peaks, hidden])
    columns = (
        "setting, tokens | >checkpoint | >transformers | >single | >peak, GiB: checkpoint / double | >copies hidden"
    )
    return f"{head}\n\n{grid(columns, rows)}\n\n{made_by(name, record)}"


def _ran(row: Record, side: str) -> bool:
    return "seconds" in row["sides"].get(side, {})


def _peak(row: Record, side: str) -> float:
    return float(row["sides"][side]["memory"]["peak_bytes"])
