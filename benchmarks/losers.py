"""Runs in which fastpack gains nothing and that have no interval of their own: several GPUs, graphs given back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median, quantiles
from typing import Any

from benchmarks.readme_cells import grid
from benchmarks.several_gpus import COMPILED, EAGER, LAST, SIDES, STEPS, cases_of
from benchmarks.side_table import KINDS, MODELS
from fastpack_trl.bench.views import device_of

Record = Mapping[str, Any]
_TRAINS = {"none": "full", "linear": "lora", "experts": "experts"}


def several_gpus_table(record: Record) -> str:
    """Return Markdown: a line per case in which stock and fastpack were timed."""
    lines = []
    for row in record["rows"]:
        steps = _steps(row)
        if {*SIDES} <= steps.keys():
            apart, ms = row["largest_difference"], {side: median(found) for side, found in steps.items()}
            times = [f"{ms[side] / ms[SIDES[1]]:.2f}" if side in ms else "-" for side in (SIDES[0], COMPILED)]
            memory = " / ".join(f"{_gib(row[side]):.1f}" for side in SIDES)
            shown = [f"{ms[side]:,.0f}" if side in ms else "-" for side in (SIDES[0], COMPILED, SIDES[1])]
            lines.append([_what(row), *shown, *times, memory, "-" if apart is None else f"{apart:.1e}"])
    head = (
        f"**{record['settings']['processes']} GPUs, {device_of(record)}.** Milliseconds of a step, the median of the "
        f"last {LAST} of {_steps_in_all(record)}; a packed row of 4,096 tokens per GPU. FSDP 2 hands out losses in "
        "bf16. Stock lets documents of gpt-oss see each other. ZeRO is tested on two processes of a CPU and has "
        "not run on GPUs."
    )
    columns = "case | >stock | >stock compiled | >fastpack | >over stock | >over compiled | >GiB, stock / fastpack"
    return f"{head}\n\n{grid(columns + ' | >loss from stock', lines)}"


def _steps_in_all(record: Record) -> int:
    sides = (side for row in record["rows"] for side in row.values() if isinstance(side, Mapping))
    return max((1 + len(side["step_ms"]) for side in sides if side.get("step_ms")), default=STEPS)


def _steps(row: Record) -> dict[str, list[float]]:
    """Return the last steps of each side that ran, in milliseconds."""
    sides = (SIDES[0], COMPILED, SIDES[1])
    return {side: row[side]["step_ms"][-LAST:] for side in sides if row.get(side, {}).get("step_ms")}


def _what(row: Record) -> str:
    case = cases_of("cuda")[row["name"]]
    engine = "FSDP 2" if case.fsdp else "DDP"
    layers = f" ({case.layers} of its layers)" if case.layers else ""
    eager = row.get(EAGER, {}).get("step_ms")
    captured = f", steps captured ({median(eager[-LAST:]):,.0f} ms eager)" if eager else ""
    return f"{engine}, {MODELS.get(case.shape, case.shape)}{layers} {KINDS[_TRAINS[case.lora]]}{captured}"


def _gib(side: Record) -> float:
    found = side.get("reserved_gib", side.get("peak_gib"))
    return float(max(found) if isinstance(found, list) else found)


def other_losers(results: Mapping[str, Record]) -> Iterator[str]:
    """Yield lines for the table of what does not help."""
    for record in results.values():
        found = {"several_gpus": _on_several_gpus, "captured": _given_back}.get(record["case"], lambda record: ())
        for row, beside, side, ratio, verdict in found(record):
            yield f"| {row}, {device_of(record)} | {beside} | {side} | {ratio:.2f} | {verdict} |"


def _on_several_gpus(record: Record) -> Iterator[tuple[str, str, str, float, str]]:
    """Yield cases in which the middle half of another side's steps begins at no more than the median of ours."""
    for row in record["rows"]:
        steps = _steps(row)
        for side in set(steps) - {SIDES[1]} if SIDES[1] in steps else ():
            ours, (low, _, high) = median(steps[SIDES[1]]), quantiles(steps[side], n=4)
            if low <= ours:
                verdict = "slower" if high < ours else "not told apart"
                yield _what(row), side, SIDES[1], median(steps[side]) / ours, verdict


def _given_back(record: Record) -> Iterator[tuple[str, str, str, float, str]]:
    """Yield rows whose graphs no run has kept."""
    for row in record["rows"]:
        eager, captured = (row["sides"].get(side, []) for side in ("eager", "captured"))
        if captured and all(run["report"]["features"]["cuda_graph"]["status"] == "off" for run in captured):
            times = [median(second for run in runs for second in run["step_seconds"]) for runs in (eager, captured)]
            yield row["row"], "eager", "captured", times[0] / times[1], "graphs recorded, and given back"
