"""Tables of whole runs: first steps beside stock, largest rows under a cap, 4-bit LoRA at equal memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.first_step import WallTimes, wall_times
from benchmarks.memory_caps import largest_of, sides_of
from benchmarks.readme_cells import grid, made_by
from fastpack_trl.bench.views import device_of

WORK = {
    "qwen3-0.6b lora 2x4": "Qwen3-0.6B LoRA, not packed, batch size 2, 4 accumulated",
    "qwen3-8b lora 2x4": "Qwen3-8B LoRA, not packed, batch size 2, 4 accumulated",
    "gpt-oss-20b experts 4096": "gpt-oss-20b (4 of its layers), LoRA on experts, packed rows of 4,096 tokens",
}
"""By row of the case ``first_step``."""
_LONG = ("fastpack", "cold", True)


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
