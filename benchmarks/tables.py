"""README's table and figure and ``RESULTS.md`` from the records: ``python -m benchmarks tables``.

A record is one JSON object per run, a line of ``results/CASE.jsonl``. What was not measured is not shown. A test fails
if a page and its records disagree.
"""

from __future__ import annotations

import hashlib
import json
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from benchmarks import Parser
from benchmarks.records import Run, add, key_of, newest, read, tree_now
from fastpack_trl.bench.picture import COLORS as PALETTE
from fastpack_trl.bench.picture import require_matplotlib

ROOT = Path(__file__).parents[1]
FIGURE = ROOT / "docs/figures/readme.svg"
MARKS = "<!-- results -->", "<!-- /results -->"
PITCH, TABLES = ("<!-- pitch -->", "<!-- /pitch -->"), ("<!-- tables -->", "<!-- /tables -->")
IMAGES = "<!-- images -->", "<!-- /images -->"
OURS, SAME_MEMORY = "fastpack", "fastpack same memory"
TUNED = {"trl flash-attn-4": "FlashAttention-4", "trl liger": "Liger", "trl compiled": "`torch_compile`"}
KERNELS = "flash-attn-4", "flash-linear-attention"
COMPARED = 24
"""Steps whose losses are compared: later on, two runs of one side in bf16 drift apart as well."""
CEILING = 2e-3
"""Largest difference of losses that TRL's compiled layers excuse; they were seen 1.1e-3 to 5.3e-3 apart from TRL."""
ALL_WEIGHTS = 5e-3
"""Largest difference of a loss if all weights of images and text train: TRL's own rounds were 3.8e-3 apart."""
LITTLE = 1.05
LEAKS = "gpt-oss"
"""Model whose packed documents see each other under TRL, so its losses differ."""
OTHER_BATCHES = "fastpack image rows"
"""Side whose steps hold other documents than those of TRL, so that losses of one step cannot be compared."""


@dataclass(frozen=True, slots=True)
class Case:
    """What a table of RESULTS.md says above its rows.

    Attributes:
        over: sides that the others are compared with; the losses are those of the first.
        budget: largest relative difference of a logged loss; beyond it no speed is shown (but see `comparable`).
    """

    title: str
    text: str
    over: tuple[str, ...] = ("trl", "trl compiled")
    budget: float = 1e-3


_CAPS = """The longest row that trains (*tokens a step*), and the shortest that did not fit. *trl offload* sets
`activation_offloading=True`; fastpack offloads by default. 80 GiB is the whole card. Each side was searched once, some
by different commands, so compare lengths and not times."""
_IMAGES = """Documents with 0, 1 and 2 images in turn; *lora* is on decoder and tower. The same eight steps of each
side are timed, after 8 of TRL and 40 of fastpack, but for *fastpack image rows*.
*fastpack same memory* recomputes as TRL, *eager* without graphs. Losses of *full* (all weights, in bf16) may differ by
5e-3, since TRL's own rounds differ by up to 3.8e-3; this limit was set after the runs had been seen, and by the general
one of 1e-3 none of these sides would show a speed. *fastpack image rows* trains one row of 8,192 tokens a step, packed
across the data set, so compare its tokens/s; below the table is how long the data took to count."""
_START = "Short runs, figures by round, caches empty or *warm*."
_TEXT = "Code, one packed row a step; *2x4*: 4 batches of 2, not packed. *whole*: all layers; *experts*: LoRA on them."
_MASKS = "The mask of TRL's step is made in each layer, once per batch, or not at all (*packed kernel*)."
_BUFFERS = "Layer inputs return from host memory through one buffer (run first) or two."
_SORTS = "A layer finds the tokens of its experts in a loop over experts, or by one sort."
_PARTS = "The time of these parts alone: masks of a pass, dispatch of a layer."
_NORMS = "Gradient norms are compared, because losses hardly depend on the model."
CASES = {
    "sft": Case("SFT", _TEXT),
    "images": Case("Images and text", _IMAGES),
    "memory_caps": Case("Longest row under a memory cap", _CAPS, ()),
    "start": Case("From the first step on", _START),
    "several_gpus": Case("Two GPUs", "One packed row per GPU and step. FSDP 2 logs losses in bf16.", budget=8e-3),
    "preference": Case("Preference and online trainers", _NORMS, budget=2e-2),
    "prefixes": Case(
        "Shared prefixes", "Rows of 8,192 tokens. In *1000+200*, 1,000 shared tokens precede 100 to 300 own.",
        ("trl", "fastpack whole documents"),
    ),
    "hybrid": Case("Hybrid models", "TRL pads the documents that fastpack packs.", budget=1e-2),
    "metadata": Case("Packing metadata alone", _MASKS, ("metadata per layer",), 5e-3),
    "reload": Case("Reload of layer inputs alone", _BUFFERS, ("fastpack one buffer",)),
    "routing": Case("Routing alone", _SORTS, ("expert by expert",), 3e-2),
    "experts": Case("Experts alone", "Forward and backward of one block, or of decoder layers without the head."),
    "micro": Case("Parts alone", _PARTS, ("metadata per layer", "expert by expert")),
    "host": Case("Narrow models", "Models so narrow that a step is mostly the host's work."),
    "collate": Case("Collator", "Fetching and collating packed rows on one core.", ("trl",)),
}  # fmt: skip
"""By case, in the order of the page."""
SUMMARY = "row", "side", "tokens/s", "speed", "peak, GiB", "loss apart"
CAPS = "row", "side", "tokens a step", "did not fit", "tokens/s", "peak, GiB"
"""Columns of a summary, and of that of a search for the longest row."""
LEFT = "row", "side", "ms a step", "quartiles", "rounds, ms", "tokens a step", "did not fit", "tokens/s"
RIGHT = ("first step, s", "whole run, ms a step", "whole run, times", "loss apart", "peak, GiB", "launches", "idle",
         "commit")  # fmt: skip
"""Columns of a table; between them is one for each side that the others are compared with."""
PUBLISHED = Path(__file__).with_name("published.json")
README_ROWS = {
    "qwen3-8b lora 4096": ("Qwen3-8B LoRA", "8B\nLoRA"),
    "qwen3-14b nf4 4096": ("Qwen3-14B QLoRA", "14B\nQLoRA"),
    "qwen3-30b-a3b whole experts 4096": ("Qwen3-30B-A3B, LoRA on experts", "30B-A3B\nexperts"),
    "llama-3.2-1b full 4096": ("Llama-3.2-1B, all weights", "1B all\nweights"),
    "images qwen2.5-vl-3b lora 8": ("Qwen2.5-VL-3B LoRA, images and text", "3B VL\nimages"),
    "start qwen3-8b lora 4096, 100 steps": ("Qwen3-8B LoRA, a run of 100 steps", "8B, 100\nsteps"),
}
"""Rows of the README: the title in its table, and in its figure."""
FEW = "training | >speed over TRL | >speed, recom&shy;puting as TRL | >GiB: TRL / fastpack / recom&shy;puting"
BY_BATCH = "training | >speed over TRL, batch 4 | >batch 8 | >GiB at 8: TRL / fastpack / recom&shy;puting"
EXTREME, SHORT = "qwen3-0.6b lora 2x4", "start qwen3-0.6b lora 2048, 20 steps"
COLORS = dict(zip(("trl", "trl compiled", OURS, SAME_MEMORY), PALETTE.values(), strict=True))
INK = "#7D848F"
"""Text and lines of a figure: readable on white and on black."""


@dataclass(frozen=True, slots=True)
class Side:
    """All runs of one side of a row."""

    runs: Sequence[Run]

    @property
    def rounds(self) -> list[Side]:
        return [Side([run]) for run in self.runs]

    @property
    def seconds(self) -> list[float]:
        return [second for run in self.runs for second in run["seconds"]]

    @property
    def step(self) -> float:
        return median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and last quartile of three times or more."""
        low, _, high = quantiles(self.seconds, n=4)
        return low, high

    @property
    def is_steady(self) -> bool:
        return len(self.seconds) < 3 or self.quartiles[1] <= 3 * self.quartiles[0]

    @property
    def tokens(self) -> float | None:
        """Tokens of a step, without padding."""
        counts = [run["tokens"] / run["steps"] for run in self.runs if run.get("tokens")]
        return fmean(counts) if counts else None

    @property
    def whole(self) -> float:
        """Estimated seconds per step of a whole run: the measured steps as they were, and the timed ones for the rest.

        The rest takes their mean on a side of ours, the median on others: what is recorded or compiled for new lengths
        slows down some timed steps and fewer later ones, which must not count for us.
        """
        steps, first = self.runs[0].get("run"), [run.get("warmup", {}) for run in self.runs]
        if not steps or any("seconds" not in each for each in first):
            return fmean(self.seconds)
        timed = [(fmean(run["seconds"]), run["steps"]) for run in self.runs]
        later = fmean(self.seconds) if self.runs[0]["side"].startswith(OURS) else self.step
        return fmean(
            (each["seconds"] + mean * count + (steps - each["steps"] - count) * later) / steps
            for each, (mean, count) in zip(first, timed, strict=True)
        )

    @property
    def peak(self) -> float | None:
        return max((run["peak_gib"] for run in self.runs if run.get("peak_gib")), default=None)

    def times(self, other: Side, whole: bool = False) -> float:
        """Return how many times as fast as `other` this side is; per token of the timed steps if both count them."""
        share = self.tokens / other.tokens if self.tokens and other.tokens else 1.0
        return (other.whole / self.whole if whole else other.step / self.step) * share

    def apart(self, other: Side) -> float | None:
        """Return the largest relative difference of a loss of the same early step, in any round; inf with a NaN.

        It counts from the nearest of the other's rounds; if `other` is this side, from its first round. None if none
        was logged by both, or steps hold other documents. For preference trainers of a gradient norm.
        """
        if OTHER_BATCHES in (self.runs[0]["side"], other.runs[0]["side"]):
            return None
        name = "grad_norms" if self.runs[0]["case"] == "preference" else "losses"
        rounds = [run.get(name) or {} for run in other.runs[: 1 if other is self else None]]
        found = list[float]()
        for run in self.runs:
            for step, loss in (run.get(name) or {}).items():
                theirs = [losses[step] for losses in rounds if step in losses and int(step) <= COMPARED]
                apart = [abs(loss - one) / max(abs(one), 1e-2) for one in theirs]
                found += [min(one if isfinite(one) else inf for one in apart)] if apart else []
        return max(found, default=None)


def sides_of(records: Iterable[Run]) -> dict[str, dict[str, Side]]:
    """Return the sides of each row: rows of the README first, others and sides in the order of the records."""
    found: dict[str, dict[str, list[Run]]] = {}
    for run in records:
        if run.get("seconds") or run.get("largest") == 0:
            found.setdefault(run["row"], {}).setdefault(run["side"], []).append(run)
    rows = dict.fromkeys([row for row in README_ROWS if row in found] + [*found])
    return {row: {side: Side(runs) for side, runs in found[row].items()} for row in rows}


def comparable(sides: Mapping[str, Side], case: Case) -> set[str]:
    """Return the sides of a row whose speeds may be compared.

    TRL's own sides always qualify; ours if their losses are within the budget (`ALL_WEIGHTS` of images), or nearer to
    TRL's than those of TRL's compiled layers (`CEILING` at most), or if documents of the model leak in TRL.
    """
    gate, compiled = sides.get(next(iter(case.over), "")), sides.get("trl compiled")
    if gate is None:
        return {*sides}
    row = gate.runs[0]["row"]
    budget = ALL_WEIGHTS if row.startswith("images") and " full " in row else case.budget
    budget = max(budget, min(CEILING, (compiled and compiled.apart(gate)) or 0.0))
    return {
        name
        for name, side in sides.items()
        if name.startswith("trl") or LEAKS in side.runs[0]["row"] or (side.apart(gate) or 0.0) <= budget
    }


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
    if gate and (gate is not side or len(side.runs) > 1) and (apart := side.apart(gate)) is not None:
        yield "loss apart", f"{apart:.1e}"
    if side.peak:
        peaks = [float(one["peak_gib"]) for one in side.runs]
        told = peaks if side.peak > 1.1 * min(peaks) else [side.peak]
        yield "peak, GiB", ", ".join(f"{peak:.1f}" for peak in told)
    if profile := run.get("profile"):
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


def _on_gpus(records: Sequence[Run]) -> dict[str, dict[str, Side]]:
    return sides_of(run for run in newest(records) if run["machine"]["device"] == "cuda")


def readme_rows(records: Sequence[Run]) -> dict[str, dict[str, Side]]:
    """Return the sides of each row of the README that were measured on a GPU, the extreme one last."""
    sides = _on_gpus(records)
    return {row: sides[row] for row in (*README_ROWS, EXTREME) if {"trl", OURS} <= sides.get(row, {}).keys()}


def gpu_of(side: Side) -> str:
    """Return the name of a GPU in a sentence: ``H100``."""
    return str(side.runs[0]["machine"]["gpu"]).removeprefix("NVIDIA ").partition(" ")[0]


def _speed(sides: Mapping[str, Side], name: str) -> str:
    """Return how many times as fast as TRL's a whole run is: ``2.9x``."""
    if name not in sides:
        return ""
    case = CASES[sides[name].runs[0]["case"]]
    return f"{sides[name].times(sides['trl'], whole=True):.1f}x" if name in comparable(sides, case) else "losses differ"


def pitch(records: Sequence[Run]) -> str:
    """Return the first sentences of README and documentation, with speed and memory of the README's first row."""
    said = (
        "For everyone who fine-tunes with [TRL](https://github.com/huggingface/trl): change one import and get the same"
    )
    row, sides = next(iter(readme_rows(records).items()), ("", dict[str, Side]()))
    if SAME_MEMORY not in sides or row not in README_ROWS:
        return f"{said} loss in less time."
    gib = [f"{sides[name].peak:.0f}" for name in ("trl", OURS, SAME_MEMORY)]
    fast, lean = (_speed(sides, name) for name in (OURS, SAME_MEMORY))
    return (
        f"{said} loss in less time. On one {gpu_of(sides[OURS])}, {README_ROWS[row][0]} runs **{fast} as fast** by "
        f"default, in {gib[1]} GiB of GPU memory instead of {gib[0]}, and **{lean} as fast** in {gib[2]} GiB if it "
        "recomputes activations as TRL does. Shorter runs gain less."
    )


def readme(records: Sequence[Run]) -> str:
    """Return the results of the README: table, conditions, figure, and the extreme row with its reason."""
    rows = readme_rows(records)
    if not rows:
        return "Nothing is measured."
    lines = [_line(README_ROWS[row][0], sides) for row, sides in rows.items() if row in README_ROWS]
    first, sides = next(iter(rows.items()))
    beside = ", ".join(
        f"{sides[OURS].times(sides[other], whole=True):.1f}x ({name})"
        for other, name in TUNED.items()
        if other in sides
    )
    beside = f" Against tuned TRL, {README_ROWS[first][0]} gains {beside}." if beside and first in README_ROWS else ""
    runs = [run for row in rows.keys() & README_ROWS.keys() for side in rows[row].values() for run in side.runs]
    devices = sorted({run["machine"]["gpu"] for run in runs})
    least = min((run["warmup"]["steps"] + run["steps"] for run in runs), default=0)
    said = (
        f"Measured on one {' or '.join(devices)} for {least} or more steps and extrapolated to 500 (last row: all 100 "
        "run), start-up included. A step is one row of 4,096 tokens or 8 documents with images; adapters have rank 16, "
        f"weights are random, in bf16 or NF4. TRL runs its default, sdpa, not FlashAttention.{beside} "
        f"{_start(rows, records)}[All results](benchmarks/RESULTS.md)."
    )
    picture = f"![Speed and memory of TRL and fastpack](docs/figures/{FIGURE.name})"
    return "\n\n".join(filter(None, [grid(FEW, lines), said, picture, _extreme(rows.get(EXTREME, {}))]))


def _line(title: str, sides: Mapping[str, Side]) -> list[str]:
    """Return a row of the tables of few columns: speeds over TRL, and the peaks of memory."""
    gib = [f"{sides[name].peak:.0f}" for name in ("trl", OURS, SAME_MEMORY) if name in sides and sides[name].peak]
    return [title, f"**{_speed(sides, OURS)}**", _speed(sides, SAME_MEMORY), " / ".join(gib)]


def images(records: Sequence[Run]) -> str:
    """Return speed and memory of runs on images: a line for each model, with both batch sizes."""
    needed = {"trl", OURS, SAME_MEMORY}
    rows = {row: sides for row, sides in _on_gpus(records).items() if row.startswith("images ") and needed <= {*sides}}
    if not rows:
        return "Nothing is measured."
    lines, none = list[list[str]](), ["-"] * 4
    for model in dict.fromkeys(row.rpartition(" ")[0] for row in rows):
        _, four, lean, _ = _line("", rows[f"{model} 4"]) if f"{model} 4" in rows else none
        _, eight, leaner, gib = _line("", rows[f"{model} 8"]) if f"{model} 8" in rows else none
        lines.append([model.removeprefix("images "), f"{four} ({lean})", f"{eight} ({leaner})", gib])
    return (
        f"{grid(BY_BATCH, lines)}\n\nExtrapolated to 500 steps on one {gpu_of(next(iter(rows.values()))['trl'])} "
        "([results](../benchmarks/RESULTS.md)), TRL with sdpa; *lora* is on decoder and encoder, documents have 0 to 2 "
        "images, *full* trains all weights in bf16. In brackets: `activation_memory: checkpoint`."
    )


def _start(rows: Mapping[str, Mapping[str, Side]], records: Sequence[Run]) -> str:
    """Return what start-up costs: how much later the first step ends, and what the shortest runs gain."""
    firsts = [
        [[run["warmup"].get("first", 0) for run in sides[name].runs] for name in (OURS, "trl")]
        for sides in rows.values()
    ]
    later = max(max(ours) - min(theirs) for ours, theirs in firsts)
    said = f"First steps take up to {later:.0f} s longer. "
    if sides := _on_gpus(records).get(SHORT):
        gains = [one.times(two, whole=True) for one, two in zip(sides[OURS].rounds, sides["trl"].rounds, strict=False)]
        told = " to ".join(dict.fromkeys(f"{gain:.1f}x" for gain in sorted(gains)))
        said += f"20 steps of Qwen3-0.6B gain {told} ({gpu_of(sides[OURS])}). "
    return said


def _extreme(sides: Mapping[str, Side]) -> str:
    """Return how much faster the smallest batches are, and why."""
    profile = sides["trl"].runs[0].get("profile") if sides else None
    if not profile or _speed(sides, OURS) == "losses differ":
        return ""
    found = [one.times(two, whole=True) for one in sides[OURS].rounds for two in sides["trl"].rounds]
    return (
        f"Unpacked batches gain most. Qwen3-0.6B LoRA in 4 batches of 2 ({sides['trl'].tokens:,.0f} "
        f"tokens a step) runs {_speed(sides, OURS)} as fast on one {gpu_of(sides[OURS])} ({min(found):.0f}x to "
        f"{max(found):.0f}x by round), because TRL leaves the GPU idle "
        f"{1 - profile['busy_seconds'] / sides['trl'].step:.0%} of the time. A faster host narrows the gap."
    )


def between(text: str, marks: tuple[str, str], new: str) -> str:
    """Return a page with what stands between two marks replaced.

    Raises:
        ValueError: it lacks a mark.
    """
    before, opened, rest = text.partition(marks[0])
    _, closed, after = rest.partition(marks[1])
    if not (opened and closed):
        raise ValueError(f"the page has no {marks[0]} ... {marks[1]}")
    return f"{before}{marks[0]}\n{new}\n{marks[1]}{after}"


def pages(records: Sequence[Run]) -> dict[Path, str]:
    """Return the pages that hold figures of records, as they should be."""
    made = {MARKS: readme(records), PITCH: pitch(records), TABLES: page(records), IMAGES: images(records)}
    found = {}
    for name, parts in {
        "README.md": (PITCH, MARKS),
        "docs/index.md": (PITCH,),
        "docs/images.md": (IMAGES,),
        "benchmarks/RESULTS.md": (TABLES,),
    }.items():
        found[ROOT / name] = (ROOT / name).read_text(encoding="utf-8")
        for marks in parts:
            found[ROOT / name] = between(found[ROOT / name], marks, made[marks])
    return found


def drawn_from(records: Sequence[Run]) -> str:
    """Return a hash of the figures that the picture shows, which it holds as its text."""
    figures = [
        (row, *sides, *((s.whole, s.peak) for s in sides.values())) for row, sides in readme_rows(records).items()
    ]
    return hashlib.sha256(json.dumps(figures).encode()).hexdigest()[:16]


def save(figure: Any, file: Path, description: str) -> None:
    """Write a picture for phones, and for light and dark pages: text stays text, the background is clear."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fastpack"}):
        figure.savefig(file, metadata={"Description": description, "Date": None}, transparent=True)


def plain(axes: Any, title: str) -> None:
    """Give axes a title, and the color of text; leave them only the lower line."""
    axes.set_title(title, loc="left", fontsize=9, color=INK)
    axes.tick_params(labelsize=8.5, colors=INK, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(INK)


def draw(records: Sequence[Run], file: Path) -> None:
    """Draw README's rows: speed over TRL as bars that point up, and memory below them."""
    require_matplotlib()
    from matplotlib.figure import Figure

    rows = {row: sides for row, sides in readme_rows(records).items() if row in README_ROWS}
    figure, bars = Figure(figsize=(5.2, 4.6), layout="constrained"), dict[str, Any]()
    speed, memory = figure.subplots(nrows=2)
    for place, sides in enumerate(rows.values()):
        good = [name for name in COLORS if name in sides and _speed(sides, name) != "losses differ"]
        for axes, names in ((speed, good), (memory, [name for name in good if sides[name].peak])):
            for index, name in enumerate(names):
                at = place + 0.21 * (index - (len(names) - 1) / 2)
                value = sides[name].times(sides["trl"], whole=True) if axes is speed else sides[name].peak
                bars[name] = axes.bar(at, value, 0.19, color=COLORS[name])
                told, above = f"{value:.{int(axes is speed)}f}", {"xytext": (0, 2), "textcoords": "offset points"}
                axes.annotate(told, (at, value), ha="center", fontsize=8, color=INK, **above)
    for axes, title in ((speed, "speed, TRL = 1 (higher is faster)"), (memory, "peak memory, GiB")):
        plain(axes, title)
        axes.set_xticks(range(len(rows)), [README_ROWS[row][1] for row in rows])
        axes.set_yticks([])
        axes.margins(y=0.14)
    names = [name.replace("trl", "TRL").replace(" same memory", ", recomputing as TRL") for name in bars]
    figure.legend(
        bars.values(), names, ncols=2, loc="outside upper center", fontsize=8.5, frameon=False, labelcolor=INK
    )
    save(figure, file, drawn_from(records))


def parse(words: Sequence[str]) -> Namespace:
    """Return the options."""
    parser = Parser("tables", __doc__)
    parser.add_argument("--add", metavar="FILE", nargs="+", default=[], type=Path, help="take over records of `run`")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    """Write README's table and figure and RESULTS.md; say how many rows are of other code."""
    args = parse(words)
    if args.add:
        add(read(*args.add))
    records = read()
    for file, text in pages(records).items():
        file.write_text(text, encoding="utf-8")
    draw(records, FIGURE)
    rows = {key_of(run): run["tree"] for run in records}
    old = sum(tree != tree_now() for tree in rows.values())
    print(f"{old} of {len(rows)} rows were measured on other code of the package")
    return 0
