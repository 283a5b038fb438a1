"""Stock and fastpack on a training run of the user's own: `compare`, for scripts and notebooks.

```python
from fastpack_trl.bench.compare import compare, table


def build(trainer_class, config_class, **changes):
    args = config_class(**(settings | changes))
    return trainer_class(model="Qwen/Qwen3-0.6B", args=args, train_dataset=dataset)


record = compare(build)
print(table(record))
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from fastpack_trl.bench.baselines import OURS, SIDES, STOCK, SideRecipe, recipe_of
from fastpack_trl.bench.compare_tables import table
from fastpack_trl.bench.environment import one_bar
from fastpack_trl.bench.parity import without_dropout
from fastpack_trl.bench.row import assemble, disagreement, part_of
from fastpack_trl.bench.side import DEFAULT_PAIRS, GATE_STEPS, WARMUP, Build, RoundPlan, Side
from fastpack_trl.bench.step_watch import StepFigures
from fastpack_trl.errors import UserError, did_you_mean
from fastpack_trl.measure.device_memory import free_memory
from fastpack_trl.measure.failures import FAILURES, attempt, describe_failure
from fastpack_trl.measure.record import OtherLoad, make_record
from fastpack_trl.measure.rounds import turn_order
from fastpack_trl.recipe.methods import SFT, Method

__all__ = ["CASE", "DEFAULT_PAIRS", "RoundPlan", "compare", "measure", "table"]

CASE = "config"
INTERLEAVED = "one process, one optimizer step of each side in turn, the order swapped from round to round"


def compare(
    build: Build,
    *,
    pairs: int = DEFAULT_PAIRS,
    warmup: int = WARMUP,
    gate_steps: int = GATE_STEPS,
    seed: int = 0,
    sides: Sequence[str] = (STOCK, OURS),
    profile: str | Path | None = None,
    peak_flops: float | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Time stock and fastpack on the same run: the trainers' own loops, one optimizer step of each in turn.

    Each side is a new trainer on the same data, from the same weights and random numbers; optimizer steps are real,
    with the batch size and the accumulation of the configuration, and the first of a long run. All sides are in memory
    together. First comes the gate: in `gate_steps` steps (with dropout off) they must be given the same tokens and
    compute the same loss.

    Args:
        build: ``build(trainer_class, config_class, **changes)`` returns a new `trainer_class` whose configuration is
            ``config_class(**(settings | changes))``, with a model that no other trainer has.
        pairs: timed steps of each side; 6 or more give an interval of 95 %.
        warmup: steps of each side before, not timed.
        gate_steps: steps of each side before these, for the gate; 0 for no gate. Without dropout it goes on through the
            warm-up: a schedule that begins at a rate of 0 changes no weight in its first step.
        seed: of the random numbers when a side is built, and at its first step.
        sides: two or more of ``stock``, ``tuned``, ``rebuild``, ``fastpack`` and ``fastpack_plan`` (`recipe_of`).
        profile: a folder that gets a Chrome trace of one step per side; the record then has its longest operators.
        peak_flops: operations per second of the device, for MFU and HFU; default: what TRL knows of it.
        progress: show a progress bar.

    Returns:
        A record (`make_record`) with one row. It has what the sides share, ``gate``, ``order`` and ``other_load``;
        ``sides``: per side seconds, phases, token rates, MFU and HFU (None where the peak is unknown), memory, idle
        share and launches (None on the CPU), host syncs and losses, or ``failed`` with the reason; ``ratios``: seconds
        of each other side / seconds of fastpack, round by round. After an interrupt it is not ``complete`` and has what
        was measured.

    Raises:
        UserError: unknown sides, another number of steps than can be timed, a `build` that does not do what it is
            asked for, two devices, or no side that could be measured.
        LossParityError: other tokens or another loss on one side; a `UserError`.
    """
    plan = RoundPlan(pairs, warmup, gate_steps, seed, None if profile is None else Path(profile), peak_flops)
    if len(set(sides)) < 2 or len(set(sides)) != len(sides):
        raise UserError(f"sides={list(sides)}: give two or more different ones of {', '.join(SIDES)}")
    for name in sides:
        if name not in SIDES:
            raise UserError(f"there is no side {name!r}{did_you_mean(name, SIDES)} (sides: {', '.join(SIDES)})")
    return record_of(plan, *in_turn(build, plan, sides, progress))


def in_turn(
    build: Build, plan: RoundPlan, sides: Sequence[str], progress: bool = True, method: Method = SFT
) -> tuple[list[dict[str, Any]], bool]:
    """Return the row of `compare`, none where nothing was timed, and whether it is complete."""
    recipes = {name: recipe_of(name, method) for name in SIDES if name in sides}
    with bar("rounds", plan.rounds, progress) as shown:
        row, complete = measure(recipes, build, plan, shown)
    return [row] if row else [], complete


def record_of(
    plan: RoundPlan, rows: Sequence[Mapping[str, Any]], complete: bool, *, case: str = CASE, **settings: Any
) -> dict[str, Any]:
    """Return the rows of one call as a record."""
    rounds = {
        "pairs": plan.pairs,
        "warmup_steps": plan.warmup,
        "gate_steps": plan.gate_steps,
        "interval": "order statistics of the median; `coverage` is the least probability that they cover it",
    }
    return make_record(
        case=case,
        settings={**rounds, **settings},
        rows=rows,
        complete=complete,
        device=next((row["device"] for row in rows if "device" in row), "cpu"),
        threads=torch.get_num_threads(),
        seed=plan.seed,
    )


def bar(name: str, total: int, progress: bool = True) -> Any:
    """Return a progress bar over rounds (on a terminal)."""
    return tqdm(total=total, desc=name, unit="round", disable=None if progress else True, dynamic_ncols=True)


def check_measured(parts: Mapping[str, Any], failed: Mapping[str, str], complete: bool) -> None:
    """Raise `UserError` where no side was measured, and nobody has interrupted it."""
    if complete and not parts:
        raise UserError("no side could be measured: " + "; ".join(f"{name}: {why}" for name, why in failed.items()))


def measure(
    recipes: Mapping[str, SideRecipe],
    build: Build,
    plan: RoundPlan,
    shown: Any,
    why_not: Callable[[Side], str] | None = None,
) -> tuple[dict[str, Any] | None, bool]:
    """Measure one row: the sides' steps in turn. The ratios are over `OURS`, or the last side where that is none.

    Args:
        recipes: by name, the reference of the gate first.
        shown: a progress bar, updated once per round.
        why_not: given `OURS`, then built before the others, returns why it need not be measured; empty to go on.

    Returns:
        The row, None where nothing was timed, and whether it is complete. Where `why_not` has a reason the row is
        ``skipped``.

    Raises:
        UserError: see `compare`.
    """
    plan.check()
    row = _Row(plan, OURS if OURS in recipes else list(recipes)[-1], shown)
    complete = True
    try:
        with one_bar():
            try:
                for name in sorted(recipes, key=lambda name: why_not is not None and name != row.subject):
                    shown.set_postfix_str(f"loading {name}")
                    row.add(name, partial(Side, name, recipes[name], build, plan))
                    ours = row.sides.get(name) if name == row.subject else None
                    if why_not is not None and ours is not None and (reason := why_not(ours)):
                        return {"skipped": reason, "sides": {}, "tokens": 0}, True
                row.sides = {name: row.sides[name] for name in recipes if name in row.sides}
                row.run()
            except KeyboardInterrupt:
                complete = False
            finally:
                more = {"other_load": row.load.cores()}
                for side in row.sides.values():
                    side.close()
        return row.result(complete, **more), complete
    finally:
        row.sides.clear()
        attempt(_free_memory)


class _Row:
    """The sides of one row while they are measured, and what was found of them together."""

    def __init__(self, plan: RoundPlan, subject: str, shown: Any) -> None:
        self.plan, self.subject, self.shown = plan, subject, shown
        self.load = OtherLoad()
        self.sides: dict[str, Side] = {}
        self.failed: dict[str, str] = {}
        self._order: list[str] = []
        self._dropout = False

    def add(self, name: str, make: Callable[[], Side]) -> None:
        """Make a side and let it begin; out of memory it is one that failed, as is a baseline that cannot run here."""
        try:
            self.sides[name] = side = make()
            _check_same_weights(next(iter(self.sides.values())), side)
            side.begin()
            return
        except UserError:
            raise
        except FAILURES as error:
            reason = describe_failure(error)
            if not isinstance(error, torch.OutOfMemoryError) and name in (STOCK, self.subject):
                raise UserError(f"{name} cannot be trained: {reason}") from error
        if "OutOfMemory" in reason and len(self.sides) > 1:
            reason += "; all sides are in memory together: measure in one process each (--isolate)"
        self._drop(name, reason)

    def _drop(self, name: str, reason: str) -> None:
        self.failed[name] = reason
        if name in self.sides:
            self.sides.pop(name).close()
        _free_memory()

    def run(self) -> None:
        """Run the gate, the warm-up and the timed rounds, of which the order is kept, then the untimed extra steps."""
        with without_dropout([side.trainer.model for side in self.sides.values()]) as self._dropout:
            self._rounds("gate", range(-self.plan.untimed, -self.plan.warmup))
        self._rounds("warm-up", range(-self.plan.warmup, 0))
        self._order.clear()
        self.load.restart()
        self._rounds("timing", range(self.plan.pairs))
        for side in self.sides.values():
            side.run_extras()

    def _rounds(self, kind: str, indices: range) -> None:
        self.shown.set_postfix_str(kind)
        for index in indices:
            steps: dict[str, StepFigures] = {}
            for name in turn_order(list(self.sides), index):
                step, failure = attempt(self.sides[name].step, (UserError,))
                if step is None:
                    self._drop(name, failure or "")
                    continue
                steps[name] = step
                self._order.append(name)
            self.shown.update(1)
            self._check(index + self.plan.untimed + 1, steps)

    def _check(self, number: int, steps: Mapping[str, StepFigures]) -> None:
        """Check the tokens of every round, and the losses of the gate's and, without dropout, the warm-up's."""
        first, *others = [name for name in self.sides if name in steps] or [""]  # the reference, first in turn or not
        for name in others:
            found = {each: self.sides[each].compared(steps[each]) for each in (first, name)}
            dtype, figure = self.sides[first].dtype, self.sides[first].recipe.compares
            reason = disagreement(
                number, found, self.plan, dtype=dtype, dropout=self._dropout, figure=figure, subject=self.subject
            )
            if reason:
                self._drop(name, reason)

    def result(self, complete: bool, **more: Any) -> dict[str, Any] | None:
        """Return the row; None where an interrupt came before the first timed step."""
        good = {name: side for name, side in self.sides.items() if len(side.steps) > self.plan.untimed}
        check_measured(good, self.failed, complete)
        rounds = min((len(side.steps) for side in good.values()), default=0)
        parts = {name: part_of(side, rounds, self._dropout) for name, side in good.items()}
        more |= {"isolation": INTERLEAVED, "order": self._order}
        return assemble(parts, self.failed, self.subject, self.plan, **more) if parts else None


def _free_memory() -> None:
    free_memory("cuda" if torch.cuda.is_available() else "cpu")


def _check_same_weights(first: Side, second: Side) -> None:
    """Raise `UserError` unless what is trained starts equal on both sides, and is not one and the same."""
    if first is second:
        return
    before = {name: p for name, p in first.trainer.model.named_parameters() if p.requires_grad}
    for name, parameter in second.trainer.model.named_parameters():
        other = before.get(name)
        if not parameter.requires_grad or other is None or other.shape != parameter.shape:
            continue
        if other.data_ptr() == parameter.data_ptr():
            raise UserError(
                f"build gave {first.name} and {second.name} the same model: load or copy it inside of build, so that "
                "one side does not train the other's weights"
            )
        if not torch.equal(other, parameter):
            raise UserError(
                f"{first.name} and {second.name} start from different weights ({name}): build must load the same "
                "model each time; random numbers are seeded before each call"
            )
