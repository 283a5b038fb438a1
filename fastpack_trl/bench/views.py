"""One view of every case's record: rows, their sides, and how much faster fastpack is. Tables and plots read this."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from fastpack_trl.measure.intervals import Interval, median_interval

OURS, PLAN = "fastpack", "fastpack_plan"
NAMES_OF_OURS = (OURS, PLAN, "double_buffer")
_NAMES = {
    "stock": "stock",
    "tuned": "stock compiled",
    "rebuild": "stock, rebuilt in each layer",
    OURS: "fastpack (same memory)",
    PLAN: "fastpack",
}
"""Key in a record -> name. *Same memory*: it recomputes as `gradient_checkpointing` says, as stock does."""
COMPILED_OPTION = "stock_compiled"
"""How ``--baseline`` names the key ``tuned``, which it takes too."""


def side_names(keys: Iterable[str]) -> dict[str, str]:
    """Return the name of each side of a row for people: ``{"tuned": "stock compiled", "fastpack": "fastpack"}``.

    One side of ours is *fastpack*; of two, the one at its defaults is. A key without a name is its own.
    """
    names = {key: _NAMES.get(key, key) for key in keys}
    return names if PLAN in names or OURS not in names else names | {OURS: "fastpack"}


@dataclass(frozen=True, slots=True)
class Ratio(Interval):
    """Seconds of the side `over` / seconds of `by`, a side of ours, in a round: above 1 `by` is faster."""

    over: str
    by: str

    @property
    def slower(self) -> bool:
        """Return whether the whole interval lies below 1."""
        return self.high < 1

    @property
    def helps(self) -> bool:
        """Return whether the whole interval lies above 1."""
        return self.low > 1

    def __str__(self) -> str:
        """Return ``2.31 (2.20 to 2.40, 96.1%)``: the median, its interval, and how surely that covers the true one."""
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f}, {self.coverage:.1%})"


@dataclass(frozen=True, slots=True)
class SideView:
    """One side of a row; every figure is a median over its steps.

    Attributes:
        key: as the record names it.
        name: for people.
        seconds: of one step; None where the case times no step (collator).
        phases: seconds by name, in order; empty where the case has none.
        rate: tokens per second.
        peak_bytes, before_bytes: device memory that torch held at most (allocated, in records that know no more), and
            what was allocated before the step; None on the CPU.
    """

    key: str
    name: str
    seconds: float | None
    phases: dict[str, float]
    rate: float
    peak_bytes: int | None
    before_bytes: int | None


@dataclass(frozen=True, slots=True)
class RowView:
    """One row: `setting` names model, dtype and checkpoint policy where the case has them; `notes` the sides that could
    not be measured, with the reason; `names` has those for people by the sides' keys."""

    setting: str
    tokens: int
    sides: tuple[SideView, ...]
    ratios: tuple[Ratio, ...]
    notes: tuple[str, ...]
    names: Mapping[str, str]

    @property
    def label(self) -> str:
        """Return setting and row length."""
        return self.setting if f"{self.tokens:,} tokens" in self.setting else f"{self.setting}, {self.tokens:,} tokens"

    def ratios_over(self, key: str) -> list[Ratio]:
        """Return how much faster each side of ours is than the side `key`."""
        return [ratio for ratio in self.ratios if ratio.over == key]

    def named(self, key: str) -> str:
        """Return the name of a side for people."""
        return self.names.get(key, key)

    @property
    def gain(self) -> Ratio | None:
        """How much faster than stock fastpack is, at its defaults where that was measured; None where it was not."""
        found = {ratio.by: ratio for ratio in self.ratios_over("stock")}
        return found.get(PLAN) or next(iter(found.values()), None)


def rows_of(record: Mapping[str, Any]) -> list[RowView]:
    """Return every timed row of a record, whichever case made it; none of a record that compares losses only."""
    return [_row(row) for row in record["rows"] if {"setting", "tokens"} <= row.keys()]


def device_of(record: Mapping[str, Any]) -> str:
    """Return the device that was measured, as its vendor names it."""
    machine = record["machine"]
    return str(machine.get("gpu") or machine["processor"])


def no_gain(record: Mapping[str, Any]) -> Iterator[tuple[RowView, Ratio]]:
    """Yield the rows in which a side of ours is slower than another's, or in which the interval leaves that open."""
    for row in rows_of(record):
        for ratio in row.ratios:
            if not ratio.helps:
                yield row, ratio


def headline(record: Mapping[str, Any], *, speed: bool = True) -> str:
    """Return what a record says in one line: ``Qwen3-8B LoRA, 4,096 tokens: 2.9 times stock``.

    Args:
        speed: with the gain; without it, what was measured.
    """
    rows = [row for row in rows_of(record) if row.sides]
    if not rows:
        return str(record["case"])
    work = _work(record, rows)
    gains = [row.gain for row in rows if row.gain is not None]
    if not speed or not gains:
        return work
    if len(gains) == 1 and rows[0].gain is not None and not rows[0].gain.helps and not rows[0].gain.slower:
        return f"{work}: no difference from stock shown"
    ends = dict.fromkeys(f"{end(gain.median for gain in gains):.1f}" for end in (min, max))
    return f"{work}: {' to '.join(ends)} times stock"


def _work(record: Mapping[str, Any], rows: list[RowView]) -> str:
    """Return the model, how it is trained, and the row length: what the rows have in common."""
    config = record["settings"].get("config")
    if isinstance(config, Mapping) and config.get("model_name_or_path"):
        adapter = "" if not config.get("use_peft") else " QLoRA" if config.get("load_in_4bit") else " LoRA"
        name = f"{str(config['model_name_or_path']).rpartition('/')[2]}{adapter}"
    else:
        models = sorted({str(row["model"]) for row in record["rows"] if row.get("model") and row.get("sides")})
        name = " and ".join(models) if 1 <= len(models) <= 2 else str(record["case"]).replace("_", " ")
        if " LoRA" not in name and all(" LoRA" in row.setting for row in rows):
            name += " LoRA"
    lengths = sorted({row.tokens for row in rows})
    shown = f"{lengths[0]:,}" if len(lengths) == 1 else f"{lengths[0]:,} to {lengths[-1]:,}"
    return f"{name}, {shown} tokens" if lengths[-1] else name


def _row(row: Mapping[str, Any]) -> RowView:
    found = row.get("sides") or {name: row[name] for name in ("stock", OURS) if name in row}
    reasons = {key: str(side.get("failed") or "") for key, side in found.items()}
    names, tokens = side_names(found), int(row["tokens"])
    notes = [f"skipped: {row['skipped']}"] if row.get("skipped") else []
    return RowView(
        str(row["setting"]),
        tokens,
        tuple(_side(key, names[key], side, tokens) for key, side in found.items() if not reasons[key]),
        tuple(_ratios(row)),
        (*notes, *(f"{names[key]}: {reason}" for key, reason in reasons.items() if reason)),
        names,
    )


def _side(key: str, name: str, side: Mapping[str, Any], tokens: int) -> SideView:
    halves = {part: float(side[part]["median"]) for part in ("forward", "backward") if part in side}
    taken = side.get("seconds")  # the case `collator` has a list
    whole = float(median(taken) if isinstance(taken, list) else taken["median"]) if taken else None
    seconds = whole or sum(halves.values()) or None
    memory = side.get("memory") or {}
    rate = side["tokens_per_second"]["median"] if "tokens_per_second" in side else tokens / (seconds or 1.0)
    return SideView(
        key,
        name,
        seconds,
        {phase: float(value) for phase, value in side.get("phases", halves).items()},
        float(rate),
        memory.get("reserved_bytes", memory.get("peak_bytes")),
        memory.get("before_bytes"),
    )


def _ratios(row: Mapping[str, Any]) -> Iterator[Ratio]:
    found = dict(row.get("ratios") or {})
    if "ratio" in row:
        found["stock"] = row["ratio"]
    sides = row.get("sides", {})
    ours = row.get("subject") or next((name for name in NAMES_OF_OURS if name in sides), OURS)
    plan = sides.get(PLAN, {}).get("seconds") if ours == OURS else None
    for over, ratio in found.items():
        if over == PLAN:
            continue  # ours too: a choice between two settings, no gain over somebody else
        values = ratio.get("seconds", ratio)  # the case `moe` has one per part of the step
        yield Ratio(values["median"], values["low"], values["high"], values["coverage"], over, ours)
        if plan is not None:
            pairs = zip(sides[over]["seconds"]["values"], plan["values"], strict=True)
            yield Ratio(**median_interval([theirs / mine for theirs, mine in pairs]).to_dict(), over=over, by=PLAN)
