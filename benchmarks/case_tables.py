"""The records of the in-house cases as text for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastpack_trl.measure.tables import aligned, disturbances, fact_lines, interval_cell, skipped

_GIB = 1 << 30


def table(record: Mapping[str, Any], title: str) -> str:
    """Return the record for people: rates, ratio with its interval, and where a step goes."""
    rows = record["rows"]
    out = [f"{record['case']}: {title}", *fact_lines(record)]
    if not record["complete"]:
        out.append(f"INCOMPLETE: interrupted; {len(rows)} row(s) were finished")
    if record["case"] == "attention":
        return "\n".join([*out, *attention_lines(rows)])
    if record["case"] == "moe":
        return "\n".join([*out, *moe_lines(rows)])
    if record["case"] == "host_overhead":
        return "\n".join([*out, *overhead_lines(rows)])
    if record["case"] == "activation_memory":
        return "\n".join([*out, *model_lines(rows), *offload_lines(rows)])
    if any("sides" in row for row in rows):
        return "\n".join([*out, *model_lines(rows)])
    for setting in dict.fromkeys(row["setting"] for row in rows):
        chosen = [row for row in rows if row["setting"] == setting]
        cells = _rate_cells(row for row in chosen if "skipped" not in row)
        out += ["", setting, *(aligned(cells) if len(cells) > 1 else []), *skipped(chosen), *disturbances(chosen)]
    phased = [row for row in rows if "phases" in row.get("fastpack", {})]
    if phased:
        out += ["", "where a step goes (median ms)", *aligned(_phase_cells(phased))]
    return "\n".join(out)


def model_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return, per model, each side's rate, step and memory, the speed-up of fastpack, and what could not be timed."""
    out: list[str] = []
    for setting in dict.fromkeys(row["setting"] for row in rows):
        chosen = [row for row in rows if row["setting"] == setting]
        cells = [["tokens", "side", "tok/s", "ms", "peak GiB", "fastpack is", "interval", "path"]]
        notes = []
        for row in chosen:
            if "skipped" in row:
                notes.append(f"{row['tokens']:,} tokens: skipped: {row['skipped']}")
            for name, side in row["sides"].items():
                label = [f"{row['tokens']:,}", name]
                if "failed" in side:
                    notes.append(f"{row['tokens']:,} tokens, {name}: {side['failed']}")
                    continue
                ratio = row["ratios"].get(name)
                memory = side["memory"]
                cells.append(
                    [
                        *label,
                        f"{side['tokens_per_second']['median']:,.0f}",
                        f"{side['seconds']['median'] * 1000:,.1f}",
                        "-" if memory is None else f"{memory['peak_bytes'] / _GIB:.2f}",
                        "-" if ratio is None else f"{ratio['median']:.2f}x",
                        "-" if ratio is None else interval_cell(ratio),
                        side["path"],
                    ]
                )
            for side in (row.get("gate") or {}).get("sides", {}).values():
                notes += [f"{row['tokens']:,} tokens: {side['leaks']}"] if "leaks" in side else []
            if row.get("rebuild_seconds"):
                each = row["rebuild_seconds"]["median"] * 1000
                notes.append(f"{row['tokens']:,} tokens: one rebuild of metadata and mask takes {each:.3f} ms")
        out += ["", setting, *(aligned(cells) if len(cells) > 1 else []), *notes, *disturbances(chosen)]
    return out


def attention_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return, per row length and heads, forward and backward of each backend, and what could not be timed."""
    out = ["TFLOP/s count half of the squared document lengths (causal_half); 'attended' also leaves out the window"]
    for setting in dict.fromkeys(row["setting"] for row in rows):
        chosen = [row for row in rows if row["setting"] == setting]
        cells = [
            ["documents", "window", "backend", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s", "attended", "GiB"]
        ]
        notes: dict[str, None] = {}
        for row in chosen:
            label = [f"{row['documents']} ({len(row['lengths'])})", str(row["window"] or "none")]
            if "skipped" in row:
                notes[f"{' window '.join(label)}: skipped: {row['skipped']}"] = None
            for name, backend in row["backends"].items():
                reason = next((backend[key] for key in ("refused", "wrong", "failed") if backend.get(key)), None)
                if reason is not None:
                    notes[f"{name}: {reason}"] = None
                    continue
                forward, backward, memory = backend["forward"], backend["backward"], backend["memory"]
                cells.append(
                    [
                        *label,
                        name,
                        f"{forward['seconds']['median'] * 1000:.3f}",
                        f"{forward['tflops']['causal_half']['median']:.3g}",
                        f"{backward['seconds']['median'] * 1000:.3f}",
                        f"{backward['tflops']['causal_half']['median']:.3g}",
                        f"{forward['tflops']['attended']['median']:.3g}/{backward['tflops']['attended']['median']:.3g}",
                        "-" if memory is None else f"{(memory['peak_bytes'] - memory['before_bytes']) / _GIB:.2f}",
                    ]
                )
        out += ["", setting, *(aligned(cells) if len(cells) > 1 else []), *notes]
    return out


def moe_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return, per configuration, forward and backward of each side, the bytes kept for backward, and the speed-up."""
    out: list[str] = []
    head = ["tokens", "side", "forward ms", "backward ms", "tok/s", "kept MiB", "peak GiB", "fastpack is", "interval"]
    for setting in dict.fromkeys(row["setting"] for row in rows):
        chosen = [row for row in rows if row["setting"] == setting]
        cells, notes = [head], []
        for row in chosen:
            notes += [f"{row['tokens']:,} tokens: skipped: {row['skipped']}"] if "skipped" in row else []
            for name, side in row["sides"].items():
                if "failed" in side:
                    notes.append(f"{row['tokens']:,} tokens, {name}: {side['failed']}")
                    continue
                ratio, memory = row["ratios"].get(name), side["memory"]
                cells.append(
                    [
                        f"{row['tokens']:,}",
                        name,
                        f"{side['forward']['median'] * 1000:,.2f}",
                        f"{side['backward']['median'] * 1000:,.2f}",
                        f"{side['tokens_per_second']['median']:,.0f}",
                        f"{side['saved_bytes'] / (1 << 20):,.1f}",
                        "-" if memory is None else f"{(memory['peak_bytes'] - memory['before_bytes']) / _GIB:.2f}",
                        "-" if ratio is None else f"{ratio['seconds']['median']:.2f}x",
                        "-" if ratio is None else interval_cell(ratio["seconds"]),
                    ]
                )
        attention = next((row["attention"] for row in chosen if "attention" in row), "none")
        title = setting if attention == "none" else f"{setting}, {attention} attention on every side"
        out += ["", title, *(aligned(cells) if len(cells) > 1 else []), *notes, *disturbances(chosen)]
    return out


def offload_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return, per row, copies predicted and hidden, the gain of the prefetch, the largest rows, and the plan."""
    out: list[str] = []
    for row in rows:
        notes = [f"plan: {row['plan']}"] if row.get("plan") else []
        copies = row.get("copies") or {}
        for side, events in (copies.get("events") or {}).items():
            if events is not None and events["hidden"] is not None:
                seconds = f"{events['copy_seconds'] * 1000:.1f} ms of copies"
                notes.append(f"{side}: {seconds}, {events['hidden']:.1%} hidden")
        if copies.get("predicted_gain") is not None and copies["gain_over_single_buffer"] is not None:
            gain, predicted = copies["gain_over_single_buffer"], copies["predicted_gain"]
            published = copies["published_gain"]
            beside = "" if published is None else f"; published for whole models on a B200: {published:.1%}"
            notes.append(f"over single_buffer: {gain:+.1%}, predicted {predicted:+.1%}{beside}")
        for side, caps in (row.get("largest_row") or {}).items():
            fits = ", ".join(f"{cap} GiB {found['tokens'] or 0:,}" for cap, found in caps.items())
            notes.append(f"{side}: tokens that fit under {fits}")
        out += ["", f"{row['setting']}, {row['tokens']:,} tokens", *notes] if notes else []
    return out


def overhead_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return, per setting, step and overhead of each side; on CUDA also the device's work in a micro-step."""
    out: list[str] = []
    for setting in dict.fromkeys(row["setting"] for row in rows):
        chosen = [row for row in rows if row["setting"] == setting]
        cells = [["tokens", "side", "step ms", "overhead ms", "tok/s", "step ratio", "overhead of stock's"]]
        device = [["tokens", "side", "kernels", "host us", "waits", "busy us", "idle"]]
        for row in (row for row in chosen if "skipped" not in row):
            for side in ("stock", "fastpack"):
                figures, ours = row[side], side == "fastpack"
                cells.append(
                    [
                        f"{row['tokens']:,}",
                        side,
                        f"{figures['seconds']['median'] * 1000:.2f}",
                        f"{figures['overhead_seconds']['median'] * 1000:.2f}",
                        f"{figures['tokens_per_second']['median']:,.0f}",
                        f"{row['ratio']['median']:.2f}x, {interval_cell(row['ratio'])}" if ours else "-",
                        f"{row['overhead']['median']:.2f}, {interval_cell(row['overhead'])}" if ours else "-",
                    ]
                )
                gpu = figures.get("gpu")
                if gpu is not None:
                    device.append(
                        [
                            f"{row['tokens']:,}",
                            side,
                            f"{gpu['kernels_per_micro_step']:,.0f}",
                            f"{gpu['host_microseconds_per_micro_step']:,.0f}",
                            f"{gpu['waits_per_micro_step']:.1f}",
                            f"{gpu['busy_seconds_per_micro_step'] * 1e6:,.0f}",
                            f"{gpu['idle_share']:.0%}",
                        ]
                    )
        out += ["", setting, *(aligned(cells) if len(cells) > 1 else []), *skipped(chosen), *disturbances(chosen)]
        if len(device) > 1:
            out += ["", "per micro-step, host and kernels under torch.profiler", *aligned(device)]
    return out


def _rate_cells(rows: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    cells = [["tokens", "path", "stock tok/s", "fastpack tok/s", "ratio", "interval"]]
    for row in rows:
        ratio = row["ratio"]
        cells.append(
            [
                f"{row['tokens']:,}",
                row["path"],
                f"{row['stock']['tokens_per_second']['median']:,.0f}",
                f"{row['fastpack']['tokens_per_second']['median']:,.0f}",
                f"{ratio['median']:.2f}x",
                interval_cell(ratio),
            ]
        )
    return cells


def _phase_cells(rows: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    cells: list[list[str]] = []
    for row in rows:
        for side in ("stock", "fastpack"):
            phases = row[side]["phases"]
            cells = cells or [["tokens", "setting", "side", *phases]]
            cells.append(
                [f"{row['tokens']:,}", row["setting"], side, *(f"{seconds * 1000:,.1f}" for seconds in phases.values())]
            )
    return cells
