"""The tables of a record of `benchmarks.fp8_products`: layers with the decision, errors, parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fastpack_trl.bench.views import device_of

BF16 = "bf16"


def layers_table(record: Mapping[str, Any]) -> str:
    """Return Markdown: what is decided, and a table of layers."""
    rows = _of_kind(record, "layer")
    made_by = f"{device_of(record)}, torch {record['versions']['torch']}"
    head = f"**FP8 products of frozen weights beside bf16's, {made_by}.**"
    lines = [head, "", *(decision(row, record["settings"]["worth"]) for row in rows)]
    if not record["complete"] or any(row.get("skipped") for row in record["rows"]):
        lines.append("Seconds ran out: later rows are open.")
    lines += ["", "| layer, forward and dX | side | ms | TFLOP/s | over bf16 | weights of all layers, GiB | by |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: | --- |")
    for row in rows:
        lines += [f"| {row['setting']} | {side} | {cells} |" for side, cells in _layer(row)]
    return "\n".join(lines)


def _of_kind(record: Mapping[str, Any], kind: str) -> list[Mapping[str, Any]]:
    return [row for row in record["rows"] if row["kind"] == kind and not row.get("skipped")]


def table(record: Mapping[str, Any]) -> str:
    """Return Markdown: what is decided, a table of layers and one of errors; of older records also one of parts."""
    lines = [layers_table(record)]
    lines += ["", "| relative error, forward / dX | outliers | of | of the worst row |", "| --- | --- | --- | --- |"]
    for row in _of_kind(record, "errors"):
        lines += list(_errors(row))
    parts = _of_kind(record, "parts")
    lines += ["", "| projection | part | us |", "| --- | --- | ---: |"] if parts else []
    for row in parts:
        for part, found in row["parts"].items():
            time = found["failed"] if "failed" in found else f"{found['seconds']['median'] * 1e6:,.1f}"
            lines.append(f"| {row['setting']}, {row['shape'][0]} x {row['shape'][1]} | {part} | {time} |")
    return "\n".join(lines)


def best(row: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """Return the fastest side of a layer in FP8 and its ratio; None where none ran."""
    return max(row["ratios"].items(), key=lambda pair: pair[1]["median"], default=None)


def decision(row: Mapping[str, Any], worth: float) -> str:
    """Return the line that says whether the products of a layer are worth a feature."""
    found = best(row)
    if found is None:
        return f"{row['setting']}: at least {worth:g}x: no (nothing ran)  "
    side, ratio = found
    answer = "yes" if ratio["median"] >= worth else "no"
    return (
        f"{row['setting']}: at least {worth:g}x: {answer} ({side}: {ratio['median']:.2f}, {ratio['low']:.2f} to "
        f"{ratio['high']:.2f})  "
    )


def _layer(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for side, found in row["sides"].items():
        if "failed" in found:
            yield side, f"{found['failed']} | - | - | - | -"
            continue
        over = "-"
        if side in row["ratios"]:
            ratio = row["ratios"][side]
            over = f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
        gib = found["bytes"] * row["layers"] / 2**30
        milliseconds = found["seconds"]["median"] * 1e3
        yield side, f"{milliseconds:.3f} | {found['tflops']:,.0f} | {over} | {gib:.1f} | {found['path']}"


def _errors(row: Mapping[str, Any]) -> Iterator[str]:
    for side, by_outliers in row["errors"].items():
        for outliers, ways in by_outliers.items():
            cells = [
                " / ".join(f"{ways[way][of]:.1e}" for way in ("forward", "backward")) for of in ("whole", "worst_row")
            ]
            yield f"| {row['setting']} | {side}, outliers {outliers} | {' | '.join(cells)} |"
