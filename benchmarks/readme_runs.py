"""Tables of whole runs: steps and first steps beside stock, largest rows under a cap, 4-bit LoRA at equal memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.first_step import WallTimes, wall_times
from benchmarks.memory_caps import largest_of, sides_of
from benchmarks.readme_cells import grid, made_by, record_of
from benchmarks.side_table import cells, peak_cell, times, work
from benchmarks.training_rows import FIRST
from fastpack_trl.bench.views import device_of

WORK = {
    "qwen3-0.6b lora 2x4": "Qwen3-0.6B LoRA, not packed, batch size 2, 4 accumulated",
    "qwen3-8b lora 2x4": "Qwen3-8B LoRA, not packed, batch size 2, 4 accumulated",
    "gpt-oss-20b experts 4096": "gpt-oss-20b (4 of its layers), LoRA on experts, packed rows of 4,096 tokens",
}
"""By row of the case ``first_step``."""
GLANCE = (*FIRST[1:2], *FIRST[3:], FIRST[2], "qwen3-0.6b lora 2x4")
"""Rows of `benchmarks.side_by_side` in the README, in its order."""
_LONG = ("fastpack", "cold", True)


def glance(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the few rows at the top of the README: packed rows side by side, and the others of ``first_step``."""
    shown: set[str] = set()
    lines: list[str] = []
    for name, record in of_case(results, "side_by_side"):
        lines += _tokens_glance(name, record, shown)
    for name, record in of_case(results, "first_step"):
        lines += _steps_glance(name, record, shown)
    return "\n".join(lines).strip() or "Open."


def _tokens_glance(name: str, record: Mapping[str, Any], shown: set[str]) -> list[str]:
    """Return tokens per second of the rows of `GLANCE` that stock and fastpack have run; add them to `shown`."""
    lines: list[list[str]] = []
    beside: list[list[str]] = []
    found = cells(record)
    for row, sides in ((row, found[row]) for row in GLANCE if row in found):
        ours, stock = sides.get("fastpack"), sides.get("stock")
        if ours is None or stock is None or (ratio := times(row, sides, "stock", ours)) is None:
            continue
        shown.add(row)
        compiled = times(row, sides, "stock compiled", ours)
        rate = "-" if compiled is None else f"{sides['stock compiled'].rate:,.0f}"
        over = f"**{ratio:.1f}x**" + ("" if compiled is None else f", {compiled:.1f}x compiled")
        lines.append([work(record, row), f"{stock.rate:,.0f}", rate, f"{ours.rate:,.0f} ({over})"])
        whole = "-" if compiled is None else f"{ours.whole / sides['stock compiled'].whole:.1f}x"
        peaks = [f"{peak_cell(side.runs)} GiB" for side in (stock, ours)]
        beside.append([work(record, row).partition(", ")[0], f"{ours.whole / stock.whole:.1f}x", whole, *peaks])
    if not lines:
        return []
    note = (
        f"{device_of(record)}, torch {record['versions']['torch']}, transformers {record['versions']['transformers']}; "
        "LoRA of rank 16, real text, random weights, each side at its defaults in a process of its own. *stock*: "
        "`trl.SFTTrainer` as installed, with gradient checkpointing; *stock compiled*: its layers compiled by "
        f"accelerate. Tokens per second of the median of {_timed(record)} steps after the first {_warm(record)}, which "
        f"have the compiling. Stock lets documents of gpt-oss see each other and so trains on another loss."
    )
    more = (
        "fastpack keeps activations in free memory, where stock computes them again. It decides here as in a long run "
        f"and still records CUDA graphs in some of the {_timed(record)} steps, which are slow then. *peak*: the most "
        "that tensors took at a time (`max_memory_allocated`), + what CUDA graphs held beside it. "
        f"`python -m benchmarks.side_by_side`, {record_of(name, record)}."
    )
    rates = grid("training, tokens/s | >stock | >stock compiled | >fastpack", lines)
    columns = "the same steps, all together | >over stock | >over stock compiled | >peak, stock | >peak, fastpack"
    return [rates, "", note, "", grid(columns, beside), "", more, ""]


def _timed(record: Mapping[str, Any]) -> int:
    return max(len(run["step_seconds"]) for run in record["rows"] if "step_seconds" in run)


def _warm(record: Mapping[str, Any]) -> int:
    return max(int(run["warmup_steps"]) for run in record["rows"] if "step_seconds" in run)


def _steps_glance(name: str, record: Mapping[str, Any], shown: set[str]) -> list[str]:
    """Return milliseconds of a step of the rows that are not in `shown`."""
    lines = []
    for row in record["rows"]:
        if row["row"] in shown:
            continue
        stock, ours = _run(row, ("stock", "cold", False)), _run(row, _LONG)
        ratio = stock["step_seconds"] / ours["step_seconds"]
        walls = {(wall.side, wall.cache): wall.measured.get(100) for wall in wall_times(row["runs"], [100])}
        begun = " / ".join(f"{walls[side, 'cold'] or math.nan:.0f} s" for side in ("stock", "fastpack"))
        steps = [_ms(stock), "not measured yet", _ms(ours), f"{ratio:.1f}x"]
        peaks = " / ".join(peak_cell([run]) for run in (stock, ours))
        lines.append([WORK[row["row"]], *steps, begun, f"{peaks} GiB"])
    note = (
        f"{device_of(record)}, sides as above. A step is the mean of steps 51 to 100 of a long run, with "
        "layers compiled and steps replayed as CUDA graphs. *100 steps*: a run of just these, from `train()` to its "
        f"end, with empty compile caches. {record_of(name, record)}."
    )
    columns = "one optimizer step | >stock | >stock compiled | >fastpack | >over stock | >100 steps | >peak"
    return [grid(columns, lines), "", note, ""] if lines else []


def first_step_table(name: str, record: Mapping[str, Any]) -> str:
    """Return the seconds from ``train()`` on, by row and side."""
    steps = record["settings"]["steps"]
    head = (
        f"**From `train()` on, {device_of(record)}.** Seconds to the end of a step, in a process of its own. The "
        "caches of Inductor and Triton were empty, or filled by the run before. Layers are compiled in the second "
        "step, in a run that is long enough for it. Of fastpack, the first two steps and *a step* are of a run that "
        "decides as a long one does; each column between them is of another run, of so many steps, and decides for "
        "these: its end can come before the second step of the other. *~*: not run; from the longest measured run and "
        "the time of its last 50 steps."
    )
    columns = " | >".join(["work | side", "first step", "second step", *(f"{count} steps" for count in steps)])
    lines = [
        [WORK[row["row"]], *_wall_cells(wall, row, steps)]
        for row in record["rows"]
        for wall in wall_times(row["runs"], steps)
    ]
    apart = ", ".join(f"{_loss_difference(row):.1e}" for row in record["rows"])
    said = (
        f" Largest relative difference of a logged loss from stock's, in runs of as many steps: {apart}; stock's "
        "packed documents of gpt-oss see each other."
    )
    return f"{head}\n\n{grid(f'{columns} | >a step, ms', lines)}\n\n{made_by(name, record)}{said}"


def _loss_difference(row: Mapping[str, Any]) -> float:
    """Return the largest relative difference of a loss, of runs of one length: they have one schedule of the rate."""
    stock = _run(row, ("stock", "cold", False))
    whole = [run for run in row["runs"] if run["side"] != "stock" and not run["long"]]
    ours = next(run for run in whole if run["steps"] == stock["steps"])
    pairs = zip(ours["losses"], stock["losses"], strict=True)
    return max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)


def _wall_cells(times: WallTimes, row: Mapping[str, Any], steps: Sequence[int]) -> Iterator[str]:
    stock = times.side == "stock"
    longest = _run(row, ("stock", "cold", False) if stock else ("fastpack", times.cache, True))
    yield "stock" if stock else f"fastpack, {'empty' if times.cache == 'cold' else 'filled'} caches"
    first, second = longest["seconds"]["1"], longest["seconds"]["2"]
    yield f"{first:.1f}"
    yield f"{second - first:.1f}"
    for count in steps:
        if count in times.measured:
            yield f"{times.measured[count]:.1f}"
        else:
            yield f"~{times.beyond[count]:,.0f}" if count in times.beyond else "-"
    yield f"{1000 * longest['step_seconds']:,.0f}"


def memory_caps_table(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return one table of the largest row of each side under each cap, of all records of the case."""
    records = dict(of_case(results, "memory_caps"))
    if not records:
        return []
    devices = ", ".join(dict.fromkeys(map(device_of, records.values())))
    head = (
        f"**The largest packed row under a cap of device memory, {devices}.** Torch's allocator has what a device of "
        "that size leaves beside CUDA's context. Stock trains with gradient checkpointing, fastpack by its plan. "
        "Rates are of three steps; *at stock's row*: fastpack's at the largest row of stock, in a long run. *plan*: "
        "predicted / measured GiB of activations."
    )
    columns = "model | >GiB | >stock: tokens | >tokens/s | >fastpack: tokens | >tokens/s | >at stock's row | >plan"
    lines = [
        cells for record in records.values() for model, sides in sides_of(record).items()
        for cells in _cap_cells(model, sides)
    ]  # fmt: skip
    made = [line for name, record in records.items() for line in (made_by(name, record), *caps_not_reached(record))]
    return ["\n".join([head, "", grid(columns, lines), "", *made])]


def caps_not_reached(record: Mapping[str, Any]) -> Iterator[str]:
    """Say which caps a side has no row for because its time was over."""
    missing: dict[str, list[str]] = {}
    for model, sides in sides_of(record).items():
        for side, found in sides.items():
            known = {float(cap) for cap in largest_of(found)}
            caps = {one["cap_gib"] for one in found["rows"] if one.get("skipped")} - known - {None}
            if caps:
                listed = ", ".join(f"{cap:g}" for cap in sorted(caps))
                missing.setdefault(model, []).append(f"{side} at {listed} GiB")
    if missing:
        listed = "; ".join(f"{model}: {', '.join(each)}" for model, each in missing.items())
        yield f"Not measured within the {record['settings']['seconds']:g} s of a side: {listed}."


def _cap_cells(model: str, sides: Mapping[str, Any]) -> Iterator[list[str]]:
    stock, ours = sides["stock"], sides["fastpack"]
    for cap, tokens in largest_of(ours).items():
        theirs = largest_of(stock).get(cap)
        best = _cap_row(ours, cap, tokens)
        plan = best["plan"]
        yield [
            model, cap, f"{theirs:,}" if theirs else "none fits",
            f"{_cap_row(stock, cap, theirs)['tokens_per_second']:,.0f}" if theirs else "-", f"{tokens:,}",
            f"{best['tokens_per_second']:,.0f}", _beside(ours, cap, theirs),
            f"{plan['predicted_gib']:.1f} / {plan['measured_gib']:.1f}",
        ]  # fmt: skip


def _cap_row(side: Mapping[str, Any], cap: str, tokens: int | None, long: bool = False) -> Mapping[str, Any]:
    found = [
        row
        for row in side["rows"]
        if row["cap_gib"] == float(cap) and row["tokens"] == tokens and ("settings" in row) == long
        and row.get("tokens_per_second")
    ]  # fmt: skip
    return found[-1] if found else {}


def _beside(ours: Mapping[str, Any], cap: str, tokens: int | None) -> str:
    row = _cap_row(ours, cap, tokens, long=True)
    return f"{row['tokens_per_second']:,.0f}" if row else "-"


def of_case(results: Mapping[str, Mapping[str, Any]], case: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield name and record of each run of a case on a GPU."""
    for name, record in results.items():
        if record["case"] == case and record["machine"]["device"] == "cuda":
            yield name, record


def _run(row: Mapping[str, Any], key: tuple[str, str, bool]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(run for run in row["runs"] if (run["side"], run["cache"], run["long"]) == key)
    return found


def _ms(run: Mapping[str, Any]) -> str:
    return f"{1000 * run['step_seconds']:,.0f} ms"
