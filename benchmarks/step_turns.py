"""Whole optimizer steps of several trainers in one process, in turn: a row as `fastpack_trl.bench.compare` makes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastpack_trl.bench.baselines import SideRecipe, recipe_of
from fastpack_trl.bench.compare import bar, measure
from fastpack_trl.bench.side import Build, RoundPlan
from fastpack_trl.config import FastSFTConfig
from fastpack_trl.trainer import FastSFTTrainer

STOCK, OURS = "stock", "fastpack"
PAIR = {STOCK: recipe_of(STOCK), OURS: SideRecipe(FastSFTTrainer, FastSFTConfig)}
"""Stock as installed, and ours at its defaults."""
GATE_STEPS = 1


def steps_in_turn(
    recipes: Mapping[str, SideRecipe], build: Build, *, rounds: int, warmup: int, seed: int, host_clock: bool = False
) -> dict[str, Any]:
    """Return the row of sides whose steps take turns, without what its label says.

    Args:
        recipes: by side, the reference of the gate first.
        build: see `compare`.
        rounds: timed steps of each side.
        warmup: steps before, behind those of the gate.
        seed: of weights and order.
        host_clock: time what the host does; it waits for the device between two steps only.

    Raises:
        LossParityError: ours was given other rows, or computes something else.
        KeyboardInterrupt: it was interrupted; such a row is measured again.
    """
    plan = RoundPlan(rounds, warmup, GATE_STEPS, seed, host_clock=host_clock)
    with bar("steps", plan.rounds, progress=False) as shown:
        row, complete = measure(recipes, build, plan, shown)
    if row is None or not complete:
        raise KeyboardInterrupt
    return {key: value for key, value in row.items() if key not in ("setting", "model", "tokens")}
