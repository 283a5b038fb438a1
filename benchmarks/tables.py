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
from fastpack_trl.bench.picture import require_matplotlib

ROOT = Path(__file__).parents[1]
FIGURE = ROOT / "docs/figures/readme.png"
MARKS = "<!-- results -->", "<!-- /results -->"
OURS, SAME_MEMORY, FLASH = "fastpack", "fastpack same memory", "trl flash-attn-4"
COMPARED = 24
"""Steps whose losses are compared: later on, two runs of one side in bf16 drift apart as well."""
CEILING = 2e-3
"""Largest difference of losses that TRL's compiled layers excuse; they were seen 1.1e-3 to 5.3e-3 apart from TRL."""
LITTLE = 1.05
LEAKS = "gpt-oss"
"""Model whose packed documents see each other under TRL, so its losses differ."""


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


_CAPS = """*trl offload*: `activation_offloading=True`; fastpack offloads by default. 80 GiB is the whole card. One
search per side, some of different commands: compare lengths, not times."""
_IMAGES = """Documents with 0, 1 and 2 images in turn; LoRA on decoder and tower. *fastpack padded*: TRL's batches, the
tower in one attention call per layer; *fastpack image rows*: rows of up to 8,192 tokens across the data set."""
CASES = {
    "sft": Case("SFT", "Rows of real text."),
    "images": Case("Images and text", _IMAGES),
    "memory_caps": Case("Longest row under a memory cap", _CAPS, ()),
    "start": Case("From the first step on", "By round; caches empty or *warm*. On the H100 the first run was slow."),
    "several_gpus": Case("Two GPUs", "A packed row per GPU and step. FSDP 2 logs losses in bf16.", budget=8e-3),
    "preference": Case("Preference and online trainers", "Gradient norms are compared.", budget=2e-2),
    "prefixes": Case(
        "Shared prefixes", "Rows of 8,192 tokens; *1000+200*: 1,000 shared tokens before 100 to 300 own.",
        ("trl", "fastpack whole documents"),
    ),
    "hybrid": Case("Hybrid models", "TRL pads the documents that fastpack packs; forward and backward.", budget=1e-2),
    "metadata": Case("Packing metadata alone", "Made in each layer, or once per batch.", ("metadata per layer",), 5e-3),
    "reload": Case("Reload of layer inputs alone", "One buffer (ran first), or two.", ("fastpack one buffer",)),
    "routing": Case("Routing alone", "Tokens found expert by expert, or by one sort.", ("expert by expert",), 3e-2),
    "experts": Case("Experts alone", "Forward and backward of one block, or of decoder layers without the head."),
    "micro": Case("Parts alone", "Masks of a pass; dispatch of a layer.", ("metadata per layer", "expert by expert")),
    "host": Case("Narrow models", "Models so narrow that a step is mostly the host's work."),
    "collate": Case("Collator", "Fetch and collate packed rows on one core.", ("trl",)),
}  # fmt: skip
"""By case, in the order of the page."""
INTRODUCTION = """# Results

Made by `python -m benchmarks tables` from the records in `benchmarks/results/`; do not edit. Absolute times hold for
one machine; sides are compared within one command only, which runs at the commit it names. Where a row names two, an
equal machine ran further rounds later, pooled with the first. Up to four commands shared a host with
H100s, each with GPUs and cores of its own.

- *trl*: TRL's trainer as installed, with gradient checkpointing and transformers' default attention (sdpa with a mask;
  gpt-oss: eager); *trl compiled*: compiled by accelerate (experts, DDP, FlashAttention-4: launches as uncompiled).
- *fastpack*: at its defaults; *fastpack same memory*: it recomputes as TRL does; graphs need memory on top (*peak*).
- *times*: that side's time over this one's, for the same tokens; above 1 this one is faster. *unsteady*: the quartiles
  of that side are more than a factor of three apart (it compiles again and again).
- *tokens*: without padding. *peak*: reserved by torch, CUDA graphs included; by round if only some recorded graphs.
- *whole run*: estimate for 500 steps: measured steps as they were, the rest at the mean (fastpack) or median (other
  sides) of the timed ones: 12 s or more a round on GPUs (two: 2.5 s; reload: 4 steps; caps: 2; start: 10), 6 on a CPU.
- *launches*: by the host per step; a replayed graph is one. *idle*: share of a step in which the GPU waits.
- *loss apart*: largest relative difference of a logged loss in the first 24 steps from TRL's first round (beside *trl*:
  its second round); for preference and online trainers of a gradient norm, as their losses hardly depend on the model.
  fastpack's speed is shown only within 1e-3, the limit above the table, or the difference of TRL's compiled layers
  (2e-3 at most). Not checked: TRL's sides; gpt-oss (leaks)."""
NOT_RUN = """- TRL with FlashAttention-2 or 3: no wheel. More rows of TRL with FlashAttention-4 or Liger and of
  *fastpack flash-attn-4*, whole gpt-oss-20b and 30B-A3B, 4-bit experts, speed over an FP8 base, KTO, Reward, RLOO, caps
  of other models, *trl offload* under other caps than 24 GiB, second rounds of caps: device time.
- Decoder layers with experts in *Parts alone*, 8,192 tokens: TRL's mask of gpt-oss does not fit 80 GB.
- All 500 steps of a run: 48 or more are measured on an H100 (reload: 15; caps: 4; start: 20). GRPO: no generation.
- GRPO, recomputing as TRL: fastpack recomputes there by default, since its rows may have any length.
- Other cards than H100, more than two GPUs: no such machine. DeepSpeed, FSDP 1: most features are off."""
LEFT = "row", "side", "ms a step", "quartiles", "rounds, ms", "tokens a step", "did not fit", "tokens/s"
RIGHT = ("first step, s", "whole run, ms a step", "whole run, times", "loss apart", "peak, GiB", "launches", "idle",
         "commit")  # fmt: skip
"""Columns of a table; between them is one for each side that the others are compared with."""
README_ROWS = {
    "qwen3-8b lora 4096": "Qwen3-8B LoRA",
    "qwen3-14b nf4 4096": "Qwen3-14B QLoRA",
    "gpt-oss-20b experts 4096": "gpt-oss-20b (4 of its layers), LoRA on experts",
    "llama-3.2-1b full 4096": "Llama-3.2-1B, all weights",
    "qwen3-0.6b lora 2x4": "Qwen3-0.6B LoRA, not packed, 4 batches of 2 a step",
}
COLORS = {"trl": "#999999", "trl compiled": "#56B4E9", SAME_MEMORY: "#E69F00", OURS: "#D55E00"}


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

        None if none was logged by both. For preference and online trainers of a gradient norm.
        """
        name = "grad_norms" if self.runs[0]["case"] == "preference" else "losses"
        theirs = other.runs[0].get(name) or {}
        found = [
            abs(loss - theirs[step]) / max(abs(theirs[step]), 1e-2)
            for run in self.runs
            for step, loss in (run.get(name) or {}).items()
            if step in theirs and int(step) <= COMPARED
        ]
        return max((one if isfinite(one) else inf for one in found), default=None)


def sides_of(records: Iterable[Run]) -> dict[str, dict[str, Side]]:
    """Return the sides of each row, both in the order of the records."""
    found: dict[str, dict[str, list[Run]]] = {}
    for run in records:
        if run.get("seconds") or run.get("largest") == 0:
            found.setdefault(run["row"], {}).setdefault(run["side"], []).append(run)
    return {row: {side: Side(runs) for side, runs in sides.items()} for row, sides in found.items()}


def comparable(sides: Mapping[str, Side], case: Case) -> set[str]:
    """Return the sides of a row whose speeds may be compared.

    TRL's own sides always qualify; ours if their losses are within the budget, or nearer to TRL's than those of TRL's
    compiled layers and within `CEILING`, or if documents of the model leak under TRL.
    """
    gate, compiled = sides.get(next(iter(case.over), "")), sides.get("trl compiled")
    if gate is None:
        return {*sides}
    budget = max(case.budget, min(CEILING, (compiled and compiled.apart(gate)) or 0.0))
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


def table(case: str, records: Sequence[Run]) -> str:
    """Return the Markdown table of the rows of a case on one device, without its empty columns."""
    lines = [
        {"row": _title(row, side), "side": name, **dict(_cells(case, sides, name))}
        for row, sides in sides_of(records).items()
        for name, side in sorted(sides.items(), key=lambda one: _place(case, one[0]))
    ]
    columns = (*LEFT, *(f"times {base}" for base in CASES[case].over), *RIGHT)
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
        if idle >= 0:  # else the profiled steps were longer than the others
            yield "idle", f"{idle:.0%}"


def page(records: Sequence[Run]) -> str:
    """Return the text of RESULTS.md."""
    parts = [INTRODUCTION]
    for case, what in CASES.items():
        of_case = [run for run in newest(records) if run["case"] == case]
        for device in dict.fromkeys(run["machine"].get("gpu", "CPU") for run in of_case):
            found = [run for run in of_case if run["machine"].get("gpu", "CPU") == device]
            apart = f" Largest difference allowed: {what.budget:g}." if 1e-3 < what.budget < 1 else ""
            parts += [f"## {what.title}, {device}", what.text + apart, table(case, found), "\n".join(_sources(found))]
    if losers := list(little(records)):
        said = f"Rows in which fastpack is under {LITTLE} times as fast as another side."
        parts += ["## Where it does not help", said, grid("row | device | side | other side | >times", losers)]
    if records:
        parts += ["## What was not run", NOT_RUN]
    return "\n\n".join(parts) + "\n"


def _sources(records: Sequence[Run]) -> list[str]:
    """Return a line per command: what measured it, where, when, and of which code."""
    found: dict[str, None] = {}
    more = {run["command"]: f", flash-attn-4 {run['flash_attn_4']}" for run in records if "flash_attn_4" in run}
    for run in records:
        machine, versions = run["machine"], run["versions"]
        where = "" if "gpu" in machine else f"{machine['processor']}, threads: {machine['threads']}, "
        packages = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "trl", "peft"))
        packages += more.get(run["command"], "")
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


def readme_rows(records: Sequence[Run]) -> dict[str, dict[str, Side]]:
    """Return the sides of each row of the README that were measured on a GPU."""
    runs = [run for run in newest(records) if run["case"] == "sft" and run["machine"]["device"] == "cuda"]
    sides = sides_of(runs)
    return {row: sides[row] for row in README_ROWS if {"trl", OURS} <= sides.get(row, {}).keys()}


def readme(records: Sequence[Run]) -> str:
    """Return what stands at the top of the README: table, conditions in one line, and figure."""
    rows, lines, devices = readme_rows(records), [], dict[str, None]()
    if not rows:
        return "Nothing is measured."
    for row, sides in rows.items():
        trl = sides["trl"]
        devices[trl.runs[0]["machine"]["gpu"]] = None
        good = comparable(sides, CASES["sft"])
        speeds = [(OURS, "trl", "**{:.1f}x**"), (OURS, "trl compiled", "{:.1f}x"), (SAME_MEMORY, "trl", "{:.1f}x")]
        times = [
            form.format(sides[one].times(sides[other], whole=True)) if {one, other} <= good else "losses differ"
            if {one, other} <= sides.keys() else ""
            for one, other, form in speeds
        ]  # fmt: skip
        peaks = [f"{sides[name].peak:.1f}" if name in sides else "" for name in ("trl", SAME_MEMORY, OURS)]
        lines.append([README_ROWS[row], *times, *peaks])
    measured = ((README_ROWS[row], sides[FLASH], sides[OURS]) for row, sides in rows.items() if FLASH in sides)
    flash = ", ".join(f"{ours.times(side, whole=True):.1f}x in {title}" for title, side, ours in measured)
    columns = "training | >speed over TRL | >over TRL compiled | >speed, recomputing as TRL"
    columns += " | >GiB, TRL | >GiB, recomputing as TRL | >GiB, fastpack"
    said = (
        f"{', '.join(devices)}; runs of 500 steps, start included, estimated from 48 or more; packed rows of "
        "4,096 tokens, code, rank-16 LoRA, random bf16 weights. TRL uses default attention (speed over "
        f"FlashAttention-4: {flash or 'not run'}); in gpt-oss its documents see each other. fastpack uses free GPU "
        'memory; *recomputing as TRL*: `activation_memory="checkpoint"`. '
        f"{'Empty cells were not measured. ' * any('' in line for line in lines)}"
        "[All results](benchmarks/RESULTS.md). [Accuracy with pretrained weights](docs/accuracy.md)."
    )
    picture = f"![time and memory of TRL and fastpack](docs/figures/{FIGURE.name})"
    stock, own = (sides[name].runs[0].get("profile") for name in ("trl", OURS))
    idle, few = 1 - stock["busy_seconds"] / trl.step if stock else 0.0, own and f"{own['launches']:,.0f}"
    found = [one.times(two, whole=True) for one in sides[OURS].rounds for two in trl.rounds]
    why = (
        f"In the last row ({trl.tokens:,.0f} tokens; {min(found):.0f}x to {max(found):.0f}x by round) TRL's host makes "
        f"{stock['launches']:,.0f} launches a step, and the GPU idles {idle:.0%}; fastpack makes {few}, "
        "a graph counting as one. A faster host narrows the gap."
    ) if stock and own and trl.tokens and idle > 0.5 else ""  # fmt: skip
    return "\n\n".join(filter(None, [grid(columns, lines), said, picture, why]))


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


def drawn_from(records: Sequence[Run]) -> str:
    """Return a hash of the figures that the picture shows, which it holds as its text."""
    figures = [
        (row, *sides, *((s.whole, s.peak) for s in sides.values())) for row, sides in readme_rows(records).items()
    ]
    return hashlib.sha256(json.dumps(figures).encode()).hexdigest()[:16]


def draw(records: Sequence[Run], file: Path) -> None:
    """Draw time, as a share of TRL's, and peak memory of README's rows."""
    require_matplotlib()
    from matplotlib.figure import Figure

    rows, at = readme_rows(records), 0.0
    figure = Figure(figsize=(8.4, 0.8 + 0.13 * sum(len(sides) + 2 for sides in rows.values())), dpi=150)
    time, memory = figure.subplots(ncols=2, sharey=True, width_ratios=(1.25, 1))
    shown: dict[str, Any] = {}
    for row, sides in rows.items():
        time.text(0, at, README_ROWS[row], va="center", fontsize=7.5, fontweight="bold")
        for name, color in COLORS.items():
            if name in comparable(sides, CASES["sft"]) and sides[name].peak:
                at += 1
                times, gib = sides[name].times(sides["trl"], whole=True), sides[name].peak or 0.0
                for axes, value, label in ((time, 1 / times, f"{times:.1f}x"), (memory, gib, f"{gib:.1f} GiB")):
                    shown[name] = axes.barh(at, value, 0.86, color=color)
                    axes.annotate(label, (value, at), (3, 0), textcoords="offset points", va="center", fontsize=7)
        at += 1.4
    for axes, label in ((time, "time, TRL = 1 (shorter is faster)"), (memory, "peak memory, GiB")):
        axes.set(ylim=(at - 0.6, -0.8), yticks=[])
        axes.set_xlim(0, axes.get_xlim()[1] * 1.12)
        axes.set_title(label, loc="left", fontsize=7.8)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    names = [name.replace("trl", "TRL").replace(" same memory", ", recomputing as TRL") for name in shown]
    figure.legend(shown.values(), names, ncols=len(names), loc="upper center", fontsize=7.5, frameon=False)
    figure.subplots_adjust(0.016, 0.07, 0.99, 0.88, wspace=0.04)
    figure.savefig(file, metadata={"Description": drawn_from(records)})


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
    records, text = read(), (ROOT / "README.md").read_text(encoding="utf-8")
    (ROOT / "README.md").write_text(between(text, MARKS, readme(records)), encoding="utf-8")
    (ROOT / "benchmarks/RESULTS.md").write_text(page(records), encoding="utf-8")
    draw(records, FIGURE)
    rows = {key_of(run): run["tree"] for run in records}
    old = sum(tree != tree_now() for tree in rows.values())
    print(f"{old} of {len(rows)} rows were measured on other code of the package")
    return 0
