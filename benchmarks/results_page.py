"""The tables of ``RESULTS.md``: every side of every row, with the commands that measured them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.cases import CASES, OURS, SAME_MEMORY
from benchmarks.records import REFERENCE, Run, key_of, newest
from benchmarks.sides import Side, comparable, exact_of, gpu_of, sides_of

KERNELS = "flash-attn-4", "flash-linear-attention"
LITTLE = 1.05
SUMMARY = "row", "side", "tokens/s", "speed", "peak, GiB", "loss apart", "from float32"
CAPS = "row", "side", "tokens a step", "did not fit", "tokens/s", "peak, GiB"
"""Columns of a summary, and of that of a search for the longest row."""
LEFT = "row", "side", "ms a step", "quartiles", "rounds, ms", "tokens a step", "did not fit", "tokens/s"
RIGHT = ("first step, s", "whole run, ms a step", "whole run, times", "loss apart", "from float32", "peak, GiB",
         "launches", "idle", "commit")  # fmt: skip
"""Columns of a table; between them is one for each side that the others are compared with."""
PUBLISHED = Path(__file__).with_name("published.json")


def grid(columns: str, rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; ``"side | >ms"`` names its columns, with ``>`` before those of figures."""
    names = columns.split(" | ")
    head = [name.removeprefix(">") for name in names]
    rule = ["---:" if name.startswith(">") else "---" for name in names]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def table(case: str, records: Sequence[Run], columns: Sequence[str] = ()) -> str:
    """Return the Markdown table of the rows of a case on one device, all columns or some, without the empty ones."""
    lines = [
        {"row": _title(row, side), "side": name, **dict(_cells(case, sides, name))}
        for row, sides in sides_of(records).items()
        for name, side in sorted(sides.items(), key=lambda one: _place(case, one[0]))
    ]
    for line in lines:
        over = "".join(f"times {base}" for base in CASES[case].over[:1])
        line["speed"] = line.get("whole run, times", line.get(over, "-"))
    columns = columns or (*LEFT, *(f"times {base}" for base in CASES[case].over), *RIGHT)
    shown = [name for name in columns if any(line.get(name, "-") != "-" for line in lines)]
    names = [name if name in ("row", "side", "commit") else f">{name}" for name in shown]
    return grid(" | ".join(names), [[line.get(name, "-") for name in shown] for line in lines])


def shown(records: Sequence[Run]) -> str:
    """Return the tables of some records, for people."""
    cases = dict.fromkeys(run["case"] for run in records)
    return "\n\n".join(table(case, [run for run in records if run["case"] == case]) for case in cases)


def _place(case: str, side: str) -> tuple[int, int, str]:
    """Return where a side stands: those that others are compared with first, fastpack's default last."""
    over = CASES[case].over
    return over.index(side) if side in over else len(over), side.startswith(OURS) + (side == OURS), side


def _title(row: str, side: Side) -> str:
    some, _, whole = side.runs[0].get("layers", "").partition(" of ")
    return row if some == whole else f"{row} ({some} of {whole} layers)"


def _cells(case: str, sides: Mapping[str, Side], name: str) -> Iterator[tuple[str, str]]:
    side, run, what = sides[name], sides[name].runs[0], CASES[case]
    yield "commit", ", ".join(dict.fromkeys(one["commit"][:7] for one in side.runs))
    if not side.seconds:
        yield "ms a step", "no row fits"
        return
    sides = {other: one for other, one in sides.items() if one.seconds}
    gate, good = sides.get(next(iter(what.over), "")), comparable(sides, what)
    exact = exact_of(sides, gate, what) if gate else None
    for column, other in {"loss apart": gate, "from float32": exact}.items():
        apart = side.apart(other) if other and (other is not side or len(side.runs) > 1) else None
        if apart is not None:
            yield column, f"{apart:.1e}"
    if name == REFERENCE:
        return
    yield "ms a step", f"{side.step * 1e3:,.1f}"
    if len(side.seconds) > 2:
        yield "quartiles", " to ".join(f"{second * 1e3:,.1f}" for second in side.quartiles)
    if len(side.runs) > 1:
        yield "rounds, ms", ", ".join(f"{median(run['seconds']) * 1e3:,.1f}" for run in side.runs)
    if side.tokens:
        yield "tokens a step", f"{side.tokens:,.0f}"
        if failed := [one["tokens"] for one in run.get("tries", ()) if one["failed"]]:
            yield "did not fit", f"{min(failed):,}"
        yield "tokens/s", f"{side.tokens / side.step:,.0f}"
    for base in what.over:
        if base in sides and base != name:
            times = f"{side.times(sides[base]):.2f}" if sides[base].is_steady else "unsteady"
            yield f"times {base}", times if {name, base} <= good else "losses differ"
    warmup = run.get("warmup", {})
    if run.get("run") and "seconds" in warmup:
        rounds, theirs = (one.rounds if case == "start" else [one] for one in (side, gate or side))
        yield "first step, s", ", ".join(f"{one['warmup']['first']:.1f}" for one in side.runs if one.get("warmup"))
        yield "whole run, ms a step", ", ".join(f"{one.whole * 1e3:,.1f}" for one in rounds)
        if gate not in (None, side) and name in good:
            pairs = zip(rounds, theirs, strict=False)
            yield "whole run, times", ", ".join(f"{one.times(other, whole=True):.2f}" for one, other in pairs)
    yield from _load(case, side)


def _load(case: str, side: Side) -> Iterator[tuple[str, str]]:
    """Yield memory, launches and idle time."""
    if side.peak:
        peaks = [float(one["peak_gib"]) for one in side.runs]
        told = peaks if side.peak > 1.1 * min(peaks) else [side.peak]
        yield "peak, GiB", ", ".join(f"{peak:.1f}" for peak in told)
    if profile := side.runs[0].get("profile"):
        yield "launches", f"{profile['launches']:,.0f}"
        idle = 1 - profile["busy_seconds"] / side.step
        if idle >= 0 and case != "images":  # there, and if below 0, the profiled step is not like the others
            yield "idle", f"{idle:.0%}"


def page(records: Sequence[Run]) -> str:
    """Return the tables of RESULTS.md."""
    parts = list[str]()
    for case, what in CASES.items():
        of_case = [run for run in newest(records) if run["case"] == case]
        for device in dict.fromkeys(run["machine"].get("gpu", "CPU") for run in of_case):
            found = [run for run in of_case if run["machine"].get("gpu", "CPU") == device]
            apart = f" Largest difference allowed: {what.budget:g}." if 1e-3 < what.budget < 1 else ""
            slow = " The host was slow in its first run." if case == "start" and "H100" in device else ""
            parts += [f"## {what.title}, {device}", what.text + slow + apart]
            parts.append(table(case, found, SUMMARY if what.over else CAPS))
            parts.append("<details><summary>All columns and the commands</summary>")
            parts += [table(case, found), "\n".join(_sources(found)), "</details>"]
    if losers := list(little(records)):
        said = f"In these rows fastpack is at most {LITTLE} times as fast as TRL or as the side without the part."
        parts += ["## Where it does not help", said, grid("row | device | side | other side | >times", losers)]
    others = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    if beside := list(published(records, others["figures"])):
        columns = "training | others, tokens/s | their batch | >fastpack: default / recomputing | source"
        parts += ["## Published figures of others", others["text"], grid(columns, beside)]
    return "\n\n".join(parts)


def published(records: Iterable[Run], figures: Iterable[Mapping[str, str]]) -> Iterator[list[str]]:
    """Yield figures that others have published, beside that of our row of the same model and adapters."""
    found = sides_of(run for run in newest(records) if run["machine"]["device"] == "cuda")
    for one in figures:
        if ours := [found[one["row"]][name] for name in (OURS, SAME_MEMORY) if name in found.get(one["row"], {})]:
            speeds = " / ".join(f"{(side.tokens or 0) / side.step:,.0f}" for side in ours)
            told = f"{speeds} ({one['row']}, {gpu_of(ours[0])})"
            yield [one["training"], one["others"], one["setting"], told, one["source"]]


def _sources(records: Sequence[Run]) -> list[str]:
    """Return a line per command: what measured it, where, when, and of which code."""
    found: dict[str, None] = {}
    more = dict[str, dict[str, None]]()
    for run in records:
        counted = (run.get("report") or {}).get("image rows")
        told = {"image rows:": counted} | {name: run.get(name.replace("-", "_")) for name in KERNELS}
        more.setdefault(run["command"], {}).update({f", {name} {fact}": None for name, fact in told.items() if fact})
    for run in records:
        machine, versions = run["machine"], run["versions"]
        where = "" if "gpu" in machine else f"{machine['processor']}, threads: {machine['threads']}, "
        packages = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "trl", "peft"))
        packages += "".join(more.get(run["command"], ()))
        note = f" ({run['note']})" if "note" in run else ""
        code = f"commit {run['commit'][:7]}{note}, code {run['tree']}"
        found[f"- `{run['command']}`: {run['date'][:10]}, {where}{packages}; {code}"] = None
    return list(found)


def little(records: Iterable[Run]) -> Iterator[list[str]]:
    """Yield the rows in which a side of ours is hardly faster than another one, or slower."""
    rows: dict[tuple[str, str, str], list[Run]] = {}
    for run in newest(records):
        rows.setdefault(key_of(run), []).append(run)
    for (case, row, device), runs in rows.items():
        sides = {name: side for name, side in sides_of(runs).get(row, {}).items() if side.seconds}
        good = comparable(sides, CASES[case])
        ours = {name: side for name, side in sides.items() if name.startswith(OURS) and name not in CASES[case].over}
        for name, side in ours.items():
            for base in CASES[case].over:
                if base in sides and {name, base} <= good:
                    whole = bool(runs[0].get("run"))
                    times = min(side.times(sides[base]), side.times(sides[base], whole=whole))
                    if times < LITTLE:
                        yield [row, device, name, base, f"{times:.2f}"]
