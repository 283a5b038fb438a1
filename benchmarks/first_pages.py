"""What README, the first page of the documentation and the one on images say of the records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.cases import CASES, OURS, README_ROWS, SAME_MEMORY
from benchmarks.records import REFERENCE, Run, newest
from benchmarks.results_page import grid
from benchmarks.sides import Side, comparable, gpu_of, sides_of

FIGURE_NAME = "readme.svg"
TUNED = {"trl flash-attn-4": "FlashAttention-4", "trl liger": "Liger", "trl compiled": "`torch_compile`"}
FEW = "training | >speed over TRL | >speed, recom&shy;puting as TRL | >GiB: TRL / fastpack / recom&shy;puting"
BY_BATCH = "training | >speed over TRL, batch 4 | >batch 8 | >GiB at 8: TRL / fastpack / recom&shy;puting"
EXTREME, SHORT = "qwen3-0.6b lora 2x4", "start qwen3-0.6b lora 2048, 20 steps"


def _on_gpus(records: Sequence[Run]) -> dict[str, dict[str, Side]]:
    """Return the sides of each row on the GPU that measured it last."""
    found = [run for run in newest(records) if run["machine"]["device"] == "cuda"]
    timed = sorted((run for run in found if run["side"] != REFERENCE), key=lambda run: str(run["date"]))
    last = {run["row"]: run["machine"]["gpu"] for run in timed}
    return sides_of(run for run in found if run["machine"]["gpu"] == last.get(run["row"]))


def readme_rows(records: Sequence[Run]) -> dict[str, dict[str, Side]]:
    """Return the sides of each row of the README that were measured on a GPU, the extreme one last."""
    sides = _on_gpus(records)
    return {row: sides[row] for row in (*README_ROWS, EXTREME) if {"trl", OURS} <= sides.get(row, {}).keys()}


def speed_of(sides: Mapping[str, Side], name: str) -> str:
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
    fast, lean = (speed_of(sides, name) for name in (OURS, SAME_MEMORY))
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
    drawn = [rows[row] for row in rows.keys() & README_ROWS.keys()]
    runs = [run for sides in drawn for name, side in sides.items() if name != REFERENCE for run in side.runs]
    devices = sorted({run["machine"]["gpu"] for run in runs})
    least = min((run["warmup"]["steps"] + run["steps"] for run in runs), default=0)
    said = (
        f"Measured on one {' or '.join(devices)} for {least} or more steps and extrapolated to 500 (last row: all 100 "
        "run), start-up included. A step is one row of 4,096 tokens or 8 documents with images; adapters have rank 16, "
        f"weights are random, in bf16 or NF4. TRL runs its default, sdpa, not FlashAttention.{beside} "
        f"{_start(rows, records)}[All results](benchmarks/RESULTS.md)."
    )
    picture = f"![Speed and memory of TRL and fastpack](docs/figures/{FIGURE_NAME})"
    return "\n\n".join(filter(None, [grid(FEW, lines), said, picture, _extreme(rows.get(EXTREME, {}))]))


def _line(title: str, sides: Mapping[str, Side]) -> list[str]:
    """Return a row of the tables of few columns: speeds over TRL, and the peaks of memory."""
    gib = [f"{sides[name].peak:.0f}" for name in ("trl", OURS, SAME_MEMORY) if name in sides and sides[name].peak]
    return [title, f"**{speed_of(sides, OURS)}**", speed_of(sides, SAME_MEMORY), " / ".join(gib)]


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
        "([results](../benchmarks/RESULTS.md)) from random weights, TRL with sdpa; *lora* is on decoder and encoder, "
        "documents have 0 to 2 images, *full* trains all weights in bf16. In brackets: `activation_memory: checkpoint`."
        " *losses differ*: by more than its limit there."
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
    if not profile or speed_of(sides, OURS) == "losses differ":
        return ""
    found = [one.times(two, whole=True) for one in sides[OURS].rounds for two in sides["trl"].rounds]
    return (
        f"Unpacked batches gain most. Qwen3-0.6B LoRA in 4 batches of 2 ({sides['trl'].tokens:,.0f} "
        f"tokens a step) runs {speed_of(sides, OURS)} as fast on one {gpu_of(sides[OURS])} ({min(found):.0f}x to "
        f"{max(found):.0f}x by round), because TRL leaves the GPU idle "
        f"{1 - profile['busy_seconds'] / sides['trl'].step:.0%} of the time. A faster host narrows the gap."
    )
