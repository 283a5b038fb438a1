"""The tables of training steps with LoRA and of offloaded layer inputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.readme_cells import made_by, ratio_cell
from fastpack_trl.bench.views import device_of, rows_of
from fastpack_trl.measure.tables import NOISE_CORES

_LORA_COLUMNS = (
    "tokens", "tokens/s", "forward, ms", "backward, ms", "fastpack over stock", "over compiled", "plan over stock",
    "over compiled", "launches", "peak, GiB", "MFU",
)  # fmt: skip
_KEPT_COPIES = re.compile(r"([\d.]+) GiB of frozen weights kept")


def lora_table(name: str, record: Mapping[str, Any]) -> str:
    """Return one line per model and row length."""
    machine, versions, settings = record["machine"], record["versions"], record["settings"]
    found = _timed(record)
    timed = [row for row, _ in found]
    liger = any(_ran(row, "tuned_liger") for row in timed)
    sides = ("stock", "tuned_liger" if liger else "tuned", "fastpack", "fastpack_plan")
    setting = "; ".join(dict.fromkeys(row["setting"] for row in timed))
    peak = settings.get("measured_matmul_tflops")
    head = (
        f"**Training steps with LoRA: {setting}; {machine.get('gpu') or machine['processor']}.** Rank 16 on all "
        "projections, random weights, packed source text, the packed attention of this package on every side. Four "
        f"values are: *stock* / *compiled* (stock, its layers compiled by accelerate{', with Liger' * liger}) / "
        "*fastpack* (stock's checkpoint setting, layers compiled) / *plan* (fastpack, every field at its default, "
        "recompute as the memory asks)."
    )
    if peak is not None:
        head += f" MFU: of the data sheet; a large bf16 product reached {peak:,.0f} TFLOP/s here."
    if any(row.get("base") == "nf4" for row in timed):
        head += (
            " Peaks leave out the dense copies of 4-bit weights that the other sides of the process kept, which the "
            "plan could not use."
        )
        if any(_peak(row, sides[1]) > 1.05 * _peak(row, "stock") for row in timed):
            head += (
                f" *compiled* keeps more than stock: torch {versions['torch']} does not compute again in a graph what "
                "the autograd function of a 4-bit layer made, checkpoint or not."
            )
    rule = ["---:", *["---"] * 3, *["---:"] * 4, *["---"] * 3]
    lines = [head, "", f"| {' | '.join(_LORA_COLUMNS)} |", f"| {' | '.join(rule)} |"]
    for row, over in found:
        figures = [row["sides"][side] if _ran(row, side) else None for side in sides]
        cells = [
            f"{row['tokens']:,}",
            _slashed(figures, lambda side: f"{side['tokens_per_second']['median']:,.0f}"),
            _slashed(figures, lambda side: f"{1000 * side['phases']['forward']:,.0f}"),
            _slashed(figures, lambda side: f"{1000 * side['phases']['backward']:,.0f}"),
            *(over.get((ours, other), "-") for ours in sides[2:] for other in sides[:2]),
            _slashed(figures, lambda side: side["launches"] and f"{side['launches']['kernels']:,}"),
            " / ".join(f"{_peak(row, side) / 2**30:.1f}" if _peak(row, side) else "-" for side in sides),
            _slashed(figures, lambda side: f"{side['mfu_of_data_sheet']:.0%}" if "tflops" in side else None),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    rounds = ", ".join(str(len(row["sides"]["fastpack"]["seconds"]["values"])) for row in timed)
    notes = f" Rounds timed: {rounds}, after {settings['warmup_steps']} of warm-up."
    load = max(row.get("other_load") or 0.0 for row in timed)
    notes += f" Other processes, torch's compilers among them, kept up to {load:.1f} cores busy." * (load > NOISE_CORES)
    return "\n".join([*lines, "", made_by(name, record) + notes])


def activation_table(name: str, record: Mapping[str, Any]) -> str:
    timed = [row for row in record["rows"] if _ran(row, "double_buffer")]
    head = (
        f"**Checkpointed layer inputs in host memory, forward and backward on {device_of(record)}.** *checkpoint*: all "
        "on the device; *transformers*: its own offload; *single*: this package with one buffer; *double*: as "
        "installed, the next input on its way while a layer runs. Ratios: time over that of *double*."
    )
    lines = [
        head,
        "",
        "| setting, tokens | checkpoint | transformers | single | peak, GiB: checkpoint / double | copies hidden |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in timed:
        others = ("checkpoint", "transformers_offload", "single_buffer")
        over = [ratio_cell(row["ratios"][other]) if other in row["ratios"] else "-" for other in others]
        peaks = " / ".join(f"{_peak(row, side) / 2**30:.1f}" for side in ("checkpoint", "double_buffer"))
        hidden = f"{row['copies']['events']['double_buffer']['hidden']:.1%}"
        lines.append(f"| {row['setting']}, {row['tokens']:,} | {' | '.join(over)} | {peaks} | {hidden} |")
    return "\n".join([*lines, "", made_by(name, record)])


def _ran(row: Mapping[str, Any], side: str) -> bool:
    return "seconds" in row["sides"].get(side, {})


def _peak(row: Mapping[str, Any], side: str) -> float:
    """Return the bytes, without the dense copies of 4-bit weights that the other sides kept in the same process."""
    memory = row["sides"][side]["memory"] if _ran(row, side) else None
    if memory is None:
        return 0.0
    return float(memory["peak_bytes"]) - sum(_copies(row, other) for other in row["sides"] if other != side)


def _copies(row: Mapping[str, Any], side: str) -> float:
    report = row["sides"][side].get("report", {"features": {}})["features"]
    kept = _KEPT_COPIES.match(report.get("cache_dequantized", {}).get("reason", ""))
    return float(kept[1]) * 2**30 if kept else 0.0


def _timed(record: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], dict[tuple[str, str], str]]]:
    """Return the rows that were measured, each with the cells of its ratios by side of ours and other side."""
    found = zip(record["rows"], rows_of(record), strict=True)
    return [
        (row, {(ratio.by, ratio.over): ratio_cell(asdict(ratio)) for ratio in view.ratios})
        for row, view in found
        if row.get("ratios")
    ]


def _slashed(sides: Sequence[Mapping[str, Any] | None], cell: Callable[[Mapping[str, Any]], str | None]) -> str:
    return " / ".join(("-" if side is None else cell(side)) or "-" for side in sides)
