"""The README's tables of training steps with LoRA and of offloaded layer inputs, and the few rows at its top."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastpack_trl.bench.readme_cells import made_by, ratio_cell
from fastpack_trl.bench.tables import NOISE_CORES
from fastpack_trl.bench.timing import median_interval
from fastpack_trl.bench.views import device_of

_LORA_COLUMNS = (
    "tokens/s: stock / compiled / fastpack / plan", "fastpack over stock", "over compiled", "plan over stock",
    "over compiled", "launches", "peak, GiB", "MFU",
)  # fmt: skip


def lora_table(name: str, record: Mapping[str, Any]) -> str:
    machine, versions, settings = record["machine"], record["versions"], record["settings"]
    timed = [row for row in record["rows"] if row.get("ratios")]
    models = " ".join(dict.fromkeys(row["model"] for row in record["rows"]))
    liger = any(_ran(row, "tuned_liger") for row in timed)
    # Beside Liger's side the other compiled one ran eager (`lora.measure`).
    compiled = "tuned_liger" if liger else "tuned"
    sides = ("stock", compiled, "fastpack", "fastpack_plan")
    head = (
        f"**Training steps with LoRA: {'; '.join(dict.fromkeys(row['setting'] for row in timed))}; "
        f"{machine.get('gpu') or machine['processor']}.** "
    )
    if liger:
        head += (
            "Again, with Liger's kernels in stock's compiled layers (`use_liger_kernel=True`): less of a layer is "
            "compiled than without them (launches)."
        )
    else:
        head += (
            "Rank 16 on all projections, random weights, packed source text, the packed attention of this package on "
            "every side. *stock*; *compiled*: stock, its layers compiled by accelerate; *fastpack*: stock's checkpoint "
            "setting, layers compiled (`layer_compile`); *plan*: fastpack, every field at its default, recompute as "
            "the memory asks. MFU: of the rate of a large bf16 product."
        )
    if not liger and any(_peak(row, compiled) > 1.05 * _peak(row, "stock") for row in timed):
        head += (
            " Where *compiled* has a higher peak than stock, its checkpoint keeps what the others compute again: torch "
            "2.11 does not recompute the autograd function of a 4-bit layer in a graph."
        )
    if any(row.get("base") == "nf4" for row in timed):
        head += (
            " Peaks are of the process: the dense copies that *fastpack* and *plan* keep of 4-bit weights are in every "
            "side's."
        )
    lines = [
        head,
        "",
        f"| tokens | {' | '.join(_LORA_COLUMNS)} |",
        "| ---: | --- | ---: | ---: | ---: | ---: | --- | --- | --- |",
    ]
    for row in timed:
        figures = [row["sides"][side] if _ran(row, side) else None for side in sides]
        cells = [
            f"{row['tokens']:,}",
            _slashed(figures, lambda side: f"{side['tokens_per_second']['median']:,.0f}"),
            *(_over(row, ours, other) for ours in sides[2:] for other in sides[:2]),
            _slashed(figures, lambda side: side["launches"] and f"{side['launches']['kernels']:,}"),
            _slashed(figures, lambda side: side["memory"] and f"{side['memory']['peak_bytes'] / 2**30:.1f}"),
            _slashed(figures, lambda side: f"{side['mfu_of_measured_matmul']:.0%}" if "tflops" in side else None),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    packages = ", ".join(f"{package} {versions[package]}" for package in ("torch", "transformers", "trl", "peft"))
    tokens = " ".join(str(row["tokens"]) for row in record["rows"])
    command = (
        f"fastpack-trl bench --case lora --device {machine['device']} --model {models} --tokens {tokens} "
        f"--pairs {settings['rounds']}{' --liger' if liger else ''}"
    )
    pairs = [len(row["sides"]["fastpack"]["seconds"]["values"]) for row in timed]
    notes = "" if min(pairs) == settings["rounds"] else f" Rounds timed: {', '.join(map(str, pairs))}."
    load = max(row.get("other_load") or 0.0 for row in timed)
    notes += f" Other processes kept up to {load:.1f} cores busy meanwhile." if load > NOISE_CORES else ""
    missing = ", ".join(f"{row['tokens']:,}" for row in record["rows"] if row.get("skipped"))
    notes += f" Not measured yet: {missing} tokens (no time was left)." if missing else ""
    return "\n".join([*lines, "", f"`{command}`: {packages}; `fastpack_trl/bench/results/{name}`.{notes}"])


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
        over = [_over(row, "double_buffer", other) for other in ("checkpoint", "transformers_offload", "single_buffer")]
        peaks = " / ".join(f"{_peak(row, side) / 2**30:.1f}" for side in ("checkpoint", "double_buffer"))
        hidden = f"{row['copies']['events']['double_buffer']['hidden']:.1%}"
        lines.append(f"| {row['setting']}, {row['tokens']:,} | {' | '.join(over)} | {peaks} | {hidden} |")
    command = f"fastpack-trl bench --case activation_memory --device {record['machine']['device']}"
    return "\n".join([*lines, "", made_by(name, record, command)])


def glance(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The longest row of each LoRA run on a GPU, as a user meets it: every field at its default."""
    lines = [
        "| whole training step, measured | tokens | faster than stock | than stock compiled |",
        "| --- | ---: | ---: | ---: |",
    ]
    for record in results.values():
        timed = [row for row in record["rows"] if record["case"] == "lora" and row.get("ratios")]
        if record["machine"]["device"] != "cuda" or not any(_ran(row, "fastpack_plan") for row in timed):
            continue
        row = max(timed, key=lambda row: int(row["tokens"]))
        if _ran(row, "tuned_liger"):
            continue
        over = [_over(row, "fastpack_plan", other) for other in ("stock", "tuned")]
        lines.append(f"| {row['setting']}; {device_of(record)} | {row['tokens']:,} | {' | '.join(over)} |")
    if len(lines) == 2:
        return "Not measured yet."
    note = (
        "Ratios of times with their intervals. Stock has this package's packed attention here, so that the rest is "
        "compared; fastpack has every field at its default and spends free memory on keeping activations. Peaks, other "
        "lengths, other features and where it does not help: [Numbers](#numbers)."
    )
    return "\n".join([*lines, "", note])


def _ran(row: Mapping[str, Any], side: str) -> bool:
    return "seconds" in row["sides"].get(side, {})


def _peak(row: Mapping[str, Any], side: str) -> float:
    memory = row["sides"][side]["memory"] if _ran(row, side) else None
    return 0.0 if memory is None else float(memory["peak_bytes"])


def _over(row: Mapping[str, Any], ours: str, other: str) -> str:
    """Times of `other` over those of `ours`, round by round."""
    if not (_ran(row, ours) and _ran(row, other)):
        return "-"
    slow, fast = (row["sides"][side]["seconds"]["values"] for side in (other, ours))
    return ratio_cell(median_interval([a / b for a, b in zip(slow, fast, strict=True)]).to_dict())


def _slashed(sides: Sequence[Mapping[str, Any] | None], cell: Callable[[Mapping[str, Any]], str | None]) -> str:
    return " / ".join(("-" if side is None else cell(side)) or "-" for side in sides)
