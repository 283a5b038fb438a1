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

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from fastpack_trl.bench.baselines import OURS, SIDES, STOCK, SideRecipe, recipe_of
from fastpack_trl.bench.compare_tables import table
from fastpack_trl.bench.environment import one_bar
from fastpack_trl.bench.parity import check_batches, check_loss, gate_of, without_dropout
from fastpack_trl.bench.row import assemble, part_of
from fastpack_trl.bench.side import DEFAULT_PAIRS, GATE_STEPS, WARMUP, Build, RoundPlan, Side
from fastpack_trl.bench.step_watch import StepFigures
from fastpack_trl.errors import UserError, did_you_mean
from fastpack_trl.measure.device_memory import free_memory
from fastpack_trl.measure.failures import FAILURES, attempt, describe_failure
from fastpack_trl.measure.record import OtherLoad, make_record
from fastpack_trl.measure.rounds import take_turns

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
        profile: a folder that gets a Chrome trace of one step per side; the record then has the largest gaps.
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
    ordered = [name for name in SIDES if name in sides]
    with bar("rounds", plan.rounds, progress) as shown:
        row, complete = measure({name: recipe_of(name) for name in ordered}, build, plan, shown)
    return record_of([row] if row else [], plan, complete)


def record_of(
    rows: Sequence[Mapping[str, Any]], plan: RoundPlan, complete: bool, *, case: str = CASE, **settings: Any
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
        build: see `compare`.
        plan: how much.
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
                    if why_not is not None and name == row.subject and name in row.sides:
                        reason = why_not(row.sides[name])
                        if reason:
                            return {"skipped": reason, "sides": {}, "tokens": 0}, True
                row.sides = {name: row.sides[name] for name in recipes if name in row.sides}
                row.run()
                for side in row.sides.values():
                    side.run_extras()
            except KeyboardInterrupt:
                complete = False
            finally:
                other_load = row.load.cores()
                for side in row.sides.values():
                    side.close()
        found = row.result(complete)
        return found and {**found, "other_load": other_load}, complete
    finally:
        row.sides.clear()
        gc.collect()
        attempt(_free_memory)


class _Row:
    """The sides of one row while they are measured, and what was found of them together."""

    def __init__(self, plan: RoundPlan, subject: str, shown: Any) -> None:
        self.plan, self.subject, self.shown = plan, subject, shown
        self.load = OtherLoad()
        self.sides: dict[str, Side] = {}
        self.failed: dict[str, str] = {}
        self._order: list[str] = []
        self._losses: list[dict[str, float]] = []
        self._rounds = 0
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
        side = self.sides.pop(name, None)
        if side is not None:
            side.close()
        del side
        _free_memory()

    def run(self) -> None:
        """Run the gate, the warm-up and the timed rounds; keep the order of the latter, and the load of others."""

        def begin() -> None:
            self.shown.set_postfix_str("timing")
            self._order.clear()
            self.load.restart()

        self.shown.set_postfix_str("gate")
        with without_dropout([side.trainer.model for side in self.sides.values()]) as self._dropout:
            self._turns(rounds=self.plan.gate_steps)
        self.shown.set_postfix_str("warm-up")
        self._turns(rounds=self.plan.pairs, warmup=self.plan.warmup, begin=begin)

    def _turns(self, *, rounds: int, warmup: int = 0, begin: Callable[[], None] = lambda: None) -> None:
        if self.sides and rounds:
            take_turns(
                {name: partial(self._step, name) for name in self.sides}, rounds=rounds, warmup=warmup,
                loud=(UserError,), begin=begin, dropped=self._drop, after_round=self._check,
            )  # fmt: skip

    def _step(self, name: str) -> StepFigures:
        figures = self.sides[name].step()  # times itself, on the device's clock, from inside of its training
        self._order.append(name)
        return figures

    def _check(self, steps: Mapping[str, StepFigures]) -> dict[str, str]:
        """Check the tokens of every round, and the losses of the gate's and, without dropout, the warm-up's.

        Returns:
            The sides other than the subject whose loss is another one, with the reason.
        """
        self.shown.update(1)
        self._rounds += 1
        names = [name for name in self.sides if name in steps]  # the reference first, whose turn it was first or not
        if len(names) < 2:
            return {}
        check_batches({name: steps[name].digest for name in names}, self._rounds)
        if self._rounds > self.plan.checked(self._dropout):
            return {}
        losses = {name: steps[name].loss for name in names}
        wrong: dict[str, str] = {}
        for name in names[1:]:
            try:
                check_loss(losses, self._rounds, self.sides[names[0]].dtype, [name])
            except UserError as error:
                if name == self.subject:
                    raise
                wrong[name] = str(error)
        self._losses.append({name: loss for name, loss in losses.items() if name not in wrong})
        return wrong

    def result(self, complete: bool) -> dict[str, Any] | None:
        """Return the row; None where an interrupt came before the first timed step."""
        good = {name: side for name, side in self.sides.items() if len(side.steps) > self.plan.untimed}
        if not good and complete:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.failed.items())
            raise UserError(f"no side could be measured: {reasons}")
        if not good:
            return None
        rounds = min(len(side.steps) for side in good.values())
        parts = {name: part_of(side, rounds) for name, side in good.items()}
        return {
            **assemble(parts, self.failed, self.subject),
            "isolation": INTERLEAVED,
            "gate": gate_of(self._losses, next(iter(good.values())).dtype, self._dropout) if self._losses else None,
            "order": self._order,
        }


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
