"""The gain of each feature by itself: everything off, one feature on, and all of them together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fastpack_trl.bench.baselines import OURS, SideRecipe
from fastpack_trl.bench.compare import bar, measure
from fastpack_trl.bench.side import Build, RoundPlan, Side
from fastpack_trl.config import _CHOICES, FastSFTConfig
from fastpack_trl.measure.tables import aligned, disturbances, interval_cell
from fastpack_trl.trainer import FastSFTTrainer

OFF, ALL = "off", "all"
_NO_FEATURES = ("verify_packing", "moe_quantize_experts")
"""Fields that are no way to run a step: a proof, and another computation."""

NEEDS: dict[str, tuple[str, ...]] = {
    "sync_free": ("packed_attention",),
    "merge_accumulation": ("packed_attention", "sync_free"),
    "layer_compile": ("packed_attention",),
    "cuda_graph": ("packed_attention", "sync_free"),
}
"""Fields that a feature cannot run without: it is compared with these on, and nothing else."""


def features() -> tuple[str, ...]:
    """Return the fields of `FastSFTConfig` that can be switched off one by one."""
    return tuple(name for name, choices in _CHOICES.items() if OFF in choices and name not in _NO_FEATURES)


def settings_of(on: Sequence[str], configured: Mapping[str, str]) -> dict[str, str]:
    """Return each feature's field: of those `on` as configured (``auto`` if that is off), of the others ``off``.

    So is the proof at the start: the gate compares losses anyway.
    """
    wanted = {name: configured.get(name, OFF) for name in on}
    asked = {name: "auto" if value == OFF else value for name, value in wanted.items()}
    return {**dict.fromkeys(features(), OFF), **asked, "verify_packing": OFF}


def ablate(
    build: Build,
    plan: RoundPlan,
    *,
    configured: Mapping[str, str] | None = None,
    save: Callable[[list[dict[str, Any]]], Any] = lambda rows: None,
) -> tuple[list[dict[str, Any]], bool]:
    """Measure one row per feature, a `FastSFTTrainer` with it beside one without, in turn; then all together over none.

    Args:
        build, plan: see `compare`; a plan per row.
        configured: the user's own values, for the features that are on.
        save: given the rows so far after each.

    Returns:
        The rows, and whether all are there. A row names its ``feature`` and what was on without it (``base``); one that
        this machine or model does not have is ``skipped`` with the feature's own reason.
    """
    rows: list[dict[str, Any]] = []
    for feature in (*features(), ALL):
        base = () if feature == ALL else NEEDS.get(feature, ())
        without = _title(base)
        sides = {without: base, OURS: features() if feature == ALL else (*base, feature)}
        recipes = {
            name: SideRecipe(FastSFTTrainer, FastSFTConfig, settings_of(on, configured or {}))
            for name, on in sides.items()
        }
        with bar(feature, plan.rounds) as progress:
            row, complete = measure(recipes, build, plan, progress, partial(_why_not, feature))
        if row is not None:
            setting = f"{row['setting']}: {feature} over {without}" if "setting" in row else f"ablation: {feature}"
            rows.append({"feature": feature, "base": list(base), **row, "setting": setting})
            save(rows)
        if not complete:
            return rows, False
    return rows, True


def _title(base: Sequence[str]) -> str:
    return " + ".join(base) if base else "all off"


def _why_not(feature: str, side: Side) -> str:
    """Return why a feature does not run here, by its own report; empty if it does."""
    report = side.trainer.fastpack_report
    if feature == ALL:
        return ""
    if feature not in report:
        return "the model has nothing that it changes"
    line = report[feature]
    return "" if line.status == "on" else line.reason or line.path


def ablation_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return, per feature, steps without and with it and the ratio with its interval; then what was not measured."""
    cells = [["feature", "over", "without, ms", "with, ms", "faster by", "interval"]]
    notes = []
    for row in rows:
        if row.get("skipped"):
            notes.append(f"{row['feature']}: skipped: {row['skipped']}")
            continue
        without = _title(row["base"])
        ratio = row["ratios"].get(without)
        if ratio is None:
            failed = {name: side["failed"] for name, side in row["sides"].items() if "failed" in side}
            notes += [f"{row['feature']}: {name}: {reason}" for name, reason in failed.items()]
            continue
        steps = [f"{row['sides'][name]['seconds']['median'] * 1000:,.1f}" for name in (without, OURS)]
        cells.append([row["feature"], without, *steps, f"{ratio['median']:.2f}x", interval_cell(ratio)])
    measured = [row for row in rows if not row.get("skipped")]
    return [*(aligned(cells) if len(cells) > 1 else []), *notes, *disturbances(measured)]
