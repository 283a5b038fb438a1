"""What the sides of `benchmarks.real_weights` have learned: the examination of a model, and the pages of the records.

``python -m benchmarks real_weights tables --add mine.jsonl`` keeps records, and writes what ``docs/accuracy.md`` and
``benchmarks/ACCURACY.md`` have between their marks, and a figure for each.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, median, stdev
from textwrap import fill
from typing import Any

from benchmarks.cases import SAME_MEMORY
from benchmarks.figure import COLORS, INK, plain, save
from benchmarks.records import REFERENCE, RESULTS, Run, line_of, read, tree_now
from benchmarks.results_page import grid
from benchmarks.tables import ROOT, between

RECORDS = RESULTS / "accuracy" / "real_weights.jsonl"
PAGE, DETAILS = ROOT / "docs/accuracy.md", ROOT / "benchmarks/ACCURACY.md"
FIGURE, CURVES = ROOT / "docs/figures/accuracy.svg", ROOT / "docs/figures/accuracy-curves.png"
MARKS = "<!-- accuracy -->", "<!-- /accuracy -->"
TRL, AGAIN, FLOAT32, LIGER = "trl", "trl again", REFERENCE, "trl liger"
"""The side that others are compared with; its seeds once more, as its own nondeterminism; in float32, as what both
sides round; with other kernels, as the drift that other rounding makes."""
DEFAULT, SDPA, FP8 = "fastpack", "fastpack sdpa", "fastpack fp8"
"""Ours; with TRL's attention; with a base that computes something else."""
SIDES = {
    TRL: "TRL", AGAIN: "TRL again", FLOAT32: "TRL in float32", LIGER: "TRL, Liger's kernels",
    SAME_MEMORY: "fastpack, recomputing as TRL", DEFAULT: "fastpack", SDPA: "fastpack, TRL's attention",
    FP8: "fastpack, FP8 base",
}  # fmt: skip
TRAININGS = {
    f"{task} {mode}": f"{title}, {how}"
    for task, title in {"names": "country names", "code": "source code"}.items()
    for mode, how in {"lora": "LoRA", "full": "all weights", "nf4": "QLoRA"}.items()
}
SINGLE = {"dpo lora": "DPO's loss (ln 2 = 0.693 if nothing is learned)", "grpo lora": "GRPO's mean reward"}
STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045,
)  # fmt: skip
"""97.5 % quantiles of Student's t distribution, for 1 to 29 degrees of freedom; the last one serves more."""
LEAST_PAIRS, FAR, BESIDE = 3, 0.1, (TRL, DEFAULT, FLOAT32)
"""Seeds of both sides below which no interval is shown; a relative difference of first gradient norms above which those
of some sides are named."""
FIGURES = {"loss": "held-out loss", "held": "names right", "unseen": "unseen right"}
EARLY = 24
"""Steps whose losses are compared by their largest difference; later the mean difference says more."""


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the mean of paired differences, and half of its 95 % interval: ``[1, 2, 3]`` -> ``(2, 2.484)``."""
    count = len(differences)
    return fmean(differences), STUDENT[min(count - 2, len(STUDENT) - 1)] * stdev(differences) / sqrt(count)


class Training:
    """All runs of one training on one GPU, versions and code, by side and seed: the rounds of a seed in turn."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self.sides: dict[str, dict[int, list[Run]]] = {}
        for run in runs:
            self.sides.setdefault(run["side"], {}).setdefault(run["seed"], []).append(run)

    def pairs(self, side: str) -> list[tuple[Run, Run]]:
        """Return the runs of a side, each with TRL's of the same seed and round."""
        ours, theirs = (self.sides.get(one, {}) for one in (side, TRL))
        return [pair for seed in sorted(ours) for pair in zip(ours[seed], theirs.get(seed, ()), strict=False)]

    def scored(self, key: str) -> Training:
        """Return the runs that have a score."""
        every = (run for seeds in self.sides.values() for runs in seeds.values() for run in runs)
        return Training(run for run in every if key in run["after"])

    def scores(self, side: str, key: str = "loss") -> dict[int, float]:
        """Return a score by seed, the mean of its rounds: ``loss``, ``float32``, ``held`` or ``unseen``."""
        seeds = self.scored(key).sides.get(side, {})
        return {seed: fmean(run["after"][key] for run in runs) for seed, runs in sorted(seeds.items())}

    def differences(self, side: str, key: str, base: str = TRL) -> list[float]:
        """Return a score less that of another side, for each seed that both have."""
        theirs = self.scores(base, key)
        return [score - theirs[seed] for seed, score in self.scores(side, key).items() if seed in theirs]

    def compared(self, side: str, key: str) -> tuple[float, float] | None:
        """Return the interval of the difference from TRL; None with fewer than `LEAST_PAIRS`."""
        found = self.differences(side, key)
        return interval(found) if len(found) >= LEAST_PAIRS else None

    def apart(self, side: str) -> tuple[float, float, float, float]:
        """Return how far a side is from TRL: first loss, first gradient norm (relative), losses early and later."""
        pairs = self.pairs(side)
        first = [abs(ours["losses"][0] - trl["losses"][0]) for ours, trl in pairs]
        norms = [abs(ours["grad_norms"][0] / trl["grad_norms"][0] - 1) for ours, trl in pairs]
        losses = [
            [abs(a - b) / max(abs(b), 1e-2) for a, b in zip(ours["losses"], trl["losses"], strict=True)]
            for ours, trl in pairs
        ]
        early, late = ([value for one in losses for value in one[part]] for part in (slice(EARLY), slice(EARLY, None)))
        return max(first), max(norms), max(early), fmean(late or early)


def made_by(run: Run) -> tuple[Any, ...]:
    """Return what two runs must share to be a pair."""
    return run["machine"].get("gpu", "CPU"), run["tree"], run.get("limit", 0), tuple(sorted(run["versions"].items()))


def trainings(records: Iterable[Run], rows: Iterable[str] = TRAININGS) -> dict[str, Training]:
    """Return the trainings of which TRL and fastpack have a pair, in the order of the page.

    Of several GPUs, versions or codes the one with most pairs, and of these the newest.
    """
    groups: dict[str, dict[tuple[Any, ...], list[Run]]] = {}
    for run in sorted(records, key=lambda run: run["date"]):
        groups.setdefault(run["row"], {}).setdefault(made_by(run), []).append(run)
    found = {}
    for row in rows:
        newest_first = map(Training, reversed(groups.get(row, {}).values()))
        best = max(newest_first, key=lambda training: len(training.pairs(DEFAULT)), default=None)
        if best is not None and best.pairs(DEFAULT):
            found[row] = best
    return found


def told(differences: Sequence[float], form: str) -> str:
    """Return an interval as text: ``-0.010 to +0.004``, one figure with few pairs, empty without any."""
    if len(differences) < LEAST_PAIRS:
        return f"{fmean(differences):{form}}" if differences else ""
    mean, half = interval(differences)
    return f"{mean - half:{form}} to {mean + half:{form}}"


def spread(values: Sequence[float], form: str) -> str:
    """Return the mean and the standard deviation as text."""
    more = f" ± {stdev(values):{form}}" if len(values) > 1 else ""
    return f"{fmean(values):{form}}{more}" if values else ""


def page(records: Sequence[Run]) -> str:
    """Return what docs/accuracy.md says of the records: the conclusion, a figure, and two single runs."""
    shown = trainings(records)
    if not shown:
        return "Nothing is measured."
    counted = {name: line for name, *line in verdict(shown)}.get(SIDES[DEFAULT], ["0 of 0", "0", "", "", "", "", ""])
    none = counted[0].startswith("0 ")
    said = (
        "**No single training differs significantly from TRL's**"
        if none
        else f"**These differ from TRL's: {counted[-1]}**"
    )
    said += f": {counted[0]} intervals over seeds exclude zero, and {counted[1]} would by chance."
    code, like = (pooled(shown, side, "code") for side in (DEFAULT, SDPA))
    if _excludes_zero(code):
        trl = fmean(score for row in shown if "code" in row for score in shown[row].scores(TRL).values())
        word = "higher" if fmean(code) > 0 else "lower"
        said += f" Over all trainings on source code together, fastpack's held-out loss of {trl:.2f} is "
        said += f"{abs(fmean(code)) / trl:.2%} {word} ({told(code, '+.5f')})"
        gone = len(like) >= LEAST_PAIRS and not _excludes_zero(like)
        said += f"; with TRL's attention the difference is gone ({told(like, '+.5f')})." if gone else "."
    picture = f"![Difference of held-out losses, with 95% intervals](figures/{FIGURE.name})"
    return "\n\n".join([fill(said, 118), picture, *_single(records)])


def _excludes_zero(differences: Sequence[float]) -> bool:
    return len(differences) >= LEAST_PAIRS and abs(interval(differences)[0]) > interval(differences)[1]


def _first_step(shown: Mapping[str, Training]) -> str:
    """Return how far losses and gradient norms of the same weights are apart; norms that are far beside float32."""
    pairs = [pair for training in shown.values() for pair in training.pairs(DEFAULT)]
    norms = [abs(ours["grad_norms"][0] / trl["grad_norms"][0] - 1) for ours, trl in pairs]
    near = [norm for norm in norms if norm <= FAR]
    said = f"In the first step losses differ by at most {max(one.apart(DEFAULT)[0] for one in shown.values()):.4f}, "
    said += f"gradient norms by {median(norms):.2%} (median) and, in {len(near)} of {len(pairs)} pairs, at most "
    said += f"{max(near, default=0.0):.1%}"
    far = [trl for norm, (_, trl) in zip(norms, pairs, strict=True) if norm > FAR]
    for row, seed in dict.fromkeys((trl["row"], trl["seed"]) for trl in far):
        runs = [(name, shown[row].sides.get(side, {}).get(seed)) for side, name in SIDES.items() if side in BESIDE]
        found = ", ".join(f"{name} {rounds[0]['grad_norms'][0]:.1f}" for name, rounds in runs if rounds)
        said += f"; {TRAININGS[row]}, seed {seed}: {found}"
    return fill(f"{said}.", 118)


def verdict(shown: Mapping[str, Training]) -> Iterator[list[str]]:
    """Yield a line per side about its intervals: how many exclude zero, by chance, bounds of the losses, and which."""
    for side, name in SIDES.items():
        every = [(row, key, training.compared(side, key)) for row, training in shown.items() for key in FIGURES]
        found = [(row, key, *interval) for row, key, interval in every if interval and side != TRL]
        outside = [f"{TRAININGS[row]}, {FIGURES[key]}" for row, key, mean, half in found if abs(mean) > half]
        if found:
            loss = max(abs(mean) + half for _, key, mean, half in found if key == "loss")
            cells = [f"{len(outside)} of {len(found)}", f"{0.05 * len(found):.1f}", f"{loss:.4f}"]
            cells += [told(pooled(shown, side, task), "+.5f") for task in ("names", "code")]
            cells.append(told(pooled(shown, side, "code", "float32"), "+.5f"))
            yield [name, *cells, "; ".join(outside)]


def pooled(shown: Mapping[str, Training], side: str, task: str, key: str = "loss", base: str = TRL) -> list[float]:
    """Return a score less that of another side, for each seed of a task's trainings."""
    return [one for row, training in shown.items() if task in row for one in training.differences(side, key, base)]


def _all_seeds(shown: Mapping[str, Training], records: Iterable[Run]) -> Iterator[str]:
    """Yield a table of what all seeds of a task say of the loss, and sentences about a cause."""
    both = {row: training for row, training in shown.items() if training.pairs(SDPA)}
    exact = {row: training.scored("float32") for row, training in shown.items()}
    lines = {
        "country names: fastpack minus TRL": pooled(shown, DEFAULT, "names"),
        "source code: fastpack minus TRL": pooled(shown, DEFAULT, "code"),
        "TRL's second run minus its first": pooled(shown, AGAIN, "code"),
        "without QLoRA: fastpack minus TRL": pooled(both, DEFAULT, "code"),
        "fastpack with TRL's attention minus TRL": pooled(both, SDPA, "code"),
        "second round in float32: fastpack minus TRL": pooled(exact, DEFAULT, "code", "float32"),
        "TRL minus TRL trained in float32": pooled(exact, TRL, "code", base=FLOAT32),
        "fastpack minus TRL trained in float32": pooled(exact, DEFAULT, "code", base=FLOAT32),
    }
    yield grid("held-out loss | >95 % interval", [[name, told(one, "+.5f")] for name, one in lines.items() if one])
    said, pairs = "", [pair for training in both.values() for pair in training.pairs(SDPA)]
    if pairs and all(ours["losses"][:2] == theirs["losses"][:2] for ours, theirs in pairs):
        said = "With TRL's attention the losses before any update are equal to TRL's as logged. "
    cpu = trainings(run for run in records if "gpu" not in run["machine"] and run.get("limit", 0) > 1)
    if apart := [abs(one) for one in pooled(cpu, DEFAULT, "code")]:
        steps = max(run["limit"] for training in cpu.values() for run, _ in training.pairs(DEFAULT))
        said += f"In float32 on a CPU, after {steps} steps, losses are {max(apart):.0e} apart. "
    yield fill(said, 118)


def _single(records: Sequence[Run]) -> Iterator[str]:
    """Yield a sentence each about DPO and GRPO, of all seeds."""
    for row, training in trainings(records, SINGLE).items():
        ours, theirs = zip(*training.pairs(DEFAULT), strict=True)
        courses = dict.fromkeys((_course(theirs), _course(ours)))
        both = (
            f"{next(iter(courses))} in both" if len(courses) == 1 else "{} in TRL and {} in fastpack".format(*courses)
        )
        yield f"{SINGLE[row]} went {both}, {'in one run each' if len(ours) == 1 else f'means of {len(ours)} seeds'}."


def _course(runs: Sequence[Run]) -> str:
    """Return how curves go on average: from the loss of a step or the reward of ten to the last ten."""
    curves = [(run["rewards"], 10) if run["rewards"] else (run["losses"], 1) for run in runs]
    first, last = zip(*((fmean(curve[:count]), fmean(curve[-10:])) for curve, count in curves), strict=True)
    return f"from {fmean(first):.3f} to {fmean(last):.2f}"


def details(records: Sequence[Run]) -> str:
    """Return the tables of ACCURACY.md: every side, all seeds, drift, and what measured it."""
    learned, apart = list[list[str]](), list[list[str]]()
    for row, training in trainings(records).items():
        before = training.pairs(TRL)[0][0]["before"]
        base = [f"{before[key]:.4g}" if key in before else "" for key in FIGURES]
        learned.append([TRAININGS[row], "base", "", "", *itertools.chain(*((cell, "") for cell in base))])
        for side, name in SIDES.items():
            pairs = training.pairs(side)
            if not pairs:
                continue
            graphs = [(ours["report"] or {}).get("cuda_graph", "") == "on: captured" for ours, _ in pairs]
            learned.append([TRAININGS[row], name, str(len(pairs)), str(sum(graphs)) if pairs[0][0]["report"] else ""])
            for key, form in zip(FIGURES, (".4f", ".1f", ".1f"), strict=True):
                less = "" if side == TRL else told(training.differences(side, key), f"+{form}")
                learned[-1] += [spread([*training.scores(side, key).values()], form), less]
            if side != TRL:
                loss, norm, early, late = training.apart(side)
                cells = [f"{loss:.1e}", f"{norm:.1e}", f"{early:.1e}", f"{late:.1e}"]
                apart.append([TRAININGS[row], name, str(len(pairs)), *cells])
    columns = "training | side | >pairs | >captured" + "".join(f" | >{name} | >minus TRL" for name in FIGURES.values())
    sources = "\n".join(dict.fromkeys(map(_source, records)))
    first = ">first loss | >first gradient norm, relative | >largest early | >mean later"
    drift = grid(f"training | side | >pairs | {first}", apart)
    heads = "side | >exclude zero | >by chance | >largest"
    heads += " | >names, pooled | >source code, pooled | >scored in float32 | which"
    table = grid(heads, verdict(trainings(records)))
    parts = [grid(columns, learned), "## All seeds of a task", *_all_seeds(trainings(records), records)]
    parts += ["## All intervals of a side", table, "## Drift over steps", drift, _first_step(trainings(records))]
    return "\n\n".join(filter(None, [*parts, "## Sources", sources]))


def _source(run: Run) -> str:
    packages = ", ".join(f"{name} {run['versions'][name]}" for name in ("torch", "transformers", "trl", "peft"))
    device = run["machine"].get("gpu", "CPU")
    note = f" ({run['note']})" if "note" in run else ""
    code = f"commit {run['commit'][:7]}{note}, code {run['tree']}"
    return f"- `{run['command']}`: {run['date'][:10]}, {device}, {packages}; {code}"


def drawn_from(records: Sequence[Run]) -> str:
    """Return a hash of the curves in the figure, which it holds as its text."""
    curves = [(run["row"], run["side"], run["seed"], run["losses"], run["grad_norms"]) for run in records]
    return hashlib.sha256(json.dumps(curves).encode()).hexdigest()[:16]


def draw(records: Sequence[Run], file: Path) -> None:
    """Draw the differences of held-out losses, of each training and of all on source code, with their intervals."""
    from matplotlib.figure import Figure

    shown, panels = trainings(records), dict[str, dict[str, tuple[float, float]]]()
    for task in ("names", "code"):
        pairs: dict[str, tuple[str, str]] = {TRAININGS[row]: (row, DEFAULT) for row in shown if task in row}
        if task == "code":
            pairs |= {"source code, all": ("code", DEFAULT), "all, TRL's attention": ("code", SDPA)}
        for title, (row, side) in pairs.items():
            found = pooled(shown, side, row)
            scores = [score for name in shown if row in name for score in shown[name].scores(TRL).values()]
            if len(found) >= LEAST_PAIRS:
                mean, half = (100 * one / fmean(scores) for one in interval(found))
                panels.setdefault(task, {})[title] = mean, half
    figure = Figure(figsize=(5.2, 3.6), layout="constrained")
    sizes = [len(rows) for rows in panels.values()]
    axes: Any = figure.subplots(len(panels) or 1, squeeze=False, height_ratios=sizes or None)[:, 0]
    for one, rows in zip(axes, panels.values(), strict=False):
        means, halves = zip(*rows.values(), strict=True)
        one.errorbar(means, range(len(rows)), xerr=halves, fmt="o", color=COLORS[DEFAULT], markersize=5, capsize=3)
        one.axvline(0, color=INK, linewidth=1)
        plain(one, "")
        one.set_yticks(range(len(rows)), [*rows])
        one.set_ylim(len(rows) - 0.5, -0.5)
        one.margins(x=0.1)
    axes[-1].set_xlabel("held-out loss, fastpack minus TRL, % (line: 95 % interval)", fontsize=8.5, color=INK)
    save(figure, file, drawn_from(records))


def draw_curves(records: Sequence[Run], file: Path) -> None:
    """Draw pairs of runs: TRL's losses and gradient norms below ours, and the differences of the losses."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    shown = trainings(records)
    figure = Figure(figsize=(11, 0.8 + 1.7 * len(shown)), dpi=100)
    axes = figure.subplots(len(shown), 3, squeeze=False)
    gray, orange = COLORS[TRL], COLORS[DEFAULT]
    for (row, training), (losses, norms, less) in zip(shown.items(), axes, strict=True):
        for ours, trl in training.pairs(DEFAULT):
            for one, key in ((losses, "losses"), (norms, "grad_norms")):
                one.plot(trl[key], color=gray, alpha=0.6, linewidth=2.2)
                one.plot(ours[key], color=orange, linewidth=0.6)
        for side, color in ((DEFAULT, orange), (LIGER, "#0072B2"), (AGAIN, "#000000")):
            for ours, trl in training.pairs(side):
                apart = [a - b for a, b in zip(ours["losses"], trl["losses"], strict=True)]
                less.plot(apart, color=color, linewidth=0.6)
        for one, title in zip((losses, norms, less), ("loss", "gradient norm", "loss minus TRL's"), strict=True):
            one.set_title(f"{TRAININGS[row]}: {title}", loc="left", fontsize=8)
            one.tick_params(which="both", labelsize=6.5)
            one.spines[["top", "right"]].set_visible(False)
        norms.set_yscale("log")
    for one in axes[-1]:
        one.set_xlabel("step", fontsize=7.5)
    named = {TRL: (gray, 2.2), DEFAULT: (orange, 1), LIGER: ("#0072B2", 1), AGAIN: ("#000000", 1)}
    named = {side: how for side, how in named.items() if any(side in training.sides for training in shown.values())}
    lines = [Line2D([], [], color=color, linewidth=width) for color, width in named.values()]
    labels = [SIDES[side] for side in named]
    figure.legend(lines, labels, ncols=len(lines), loc="upper center", fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.3 / figure.get_figheight()))
    figure.savefig(file, metadata={"Description": drawn_from(records)})


def add(records: Iterable[Run], file: Path = RECORDS) -> None:
    """Keep records, each one once: more of the same row, side and seed are rounds."""
    runs = [*(read(file) if file.exists() else ()), *records]
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(dict.fromkeys(map(line_of, runs))), encoding="utf-8")


def pages(records: Sequence[Run]) -> dict[Path, str]:
    """Return both pages, as they should be."""
    made = {PAGE: page(records), DETAILS: details(records)}
    return {file: between(file.read_text(encoding="utf-8"), MARKS, text) for file, text in made.items()}


def write(files: Sequence[Path] = ()) -> None:
    """Keep the records of some files; write both pages and figures from all that are kept."""
    if files:
        add(read(*files))
    records = read(RECORDS)
    for file, text in pages(records).items():
        file.write_text(text, encoding="utf-8")
    draw(records, FIGURE)
    draw_curves(records, CURVES)
    old = sum(run["tree"] != tree_now() for run in records)
    print(f"{old} of {len(records)} runs were measured on other code of the package")
