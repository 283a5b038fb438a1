"""The tables of a record of `benchmarks.fp8_products`: layers with the decision, errors, parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.readme_cells import grid
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
    columns = "layer, forward and dX | side | >ms | >TFLOP/s | >over bf16 | >weights of all layers, GiB | by"
    return "\n".join([*lines, "", grid(columns, [line for row in rows for line in _layer(row)])])


def _of_kind(record: Mapping[str, Any], kind: str) -> list[Mapping[str, Any]]:
    return [row for row in record["rows"] if row["kind"] == kind and not row.get("skipped")]


def table(record: Mapping[str, Any]) -> str:
    """Return Markdown: what is decided, a table of layers and one of errors; of older records also one of parts."""
    errors = [line for row in _of_kind(record, "errors") for line in _errors(row)]
    lines = [layers_table(record), "", grid("relative error, forward / dX | outliers | of | of the worst row", errors)]
    parts = [
        [
            f"{row['setting']}, {row['shape'][0]} x {row['shape'][1]}", part,
            found["failed"] if "failed" in found else f"{found['seconds']['median'] * 1e6:,.1f}",
        ]
        for row in _of_kind(record, "parts") for part, found in row["parts"].items()
    ]  # fmt: skip
    return "\n".join([*lines, *(["", grid("projection | part | >us", parts)] if parts else [])])


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


def _layer(row: Mapping[str, Any]) -> Iterator[list[str]]:
    for side, found in row["sides"].items():
        if "failed" in found:
            yield [row["setting"], side, found["failed"], *["-"] * 4]
            continue
        over = "-"
        if side in row["ratios"]:
            ratio = row["ratios"][side]
            over = f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
        gib, milliseconds = found["bytes"] * row["layers"] / 2**30, found["seconds"]["median"] * 1e3
        figures = [f"{milliseconds:.3f}", f"{found['tflops']:,.0f}", over, f"{gib:.1f}"]
        yield [row["setting"], side, *figures, found["path"]]


def _errors(row: Mapping[str, Any]) -> Iterator[list[str]]:
    for side, by_outliers in row["errors"].items():
        for outliers, ways in by_outliers.items():
            cells = [
                " / ".join(f"{ways[way][of]:.1e}" for way in ("forward", "backward")) for of in ("whole", "worst_row")
            ]
            yield [row["setting"], f"{side}, outliers {outliers}", *cells]
