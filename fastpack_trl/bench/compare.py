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

import contextlib
import gc
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from trl.trainer.utils import get_peak_flops

from fastpack_trl.bench.baselines import OURS, SIDES, STOCK, SidePlan, plan_of
from fastpack_trl.bench.compare_tables import table
from fastpack_trl.bench.own_row import loss_difference, ratios, setting_of, shared_facts, side_row
from fastpack_trl.bench.own_side import Build, Side
from fastpack_trl.bench.parity import check_batches, check_loss, tolerance, without_dropout
from fastpack_trl.bench.record import OtherLoad, make_record
from fastpack_trl.bench.rounds import FAILURES, attempt, describe_failure, free_memory, turn_order
from fastpack_trl.bench.steps import quiet
from fastpack_trl.errors import UserError, did_you_mean

__all__ = ["CASE", "DEFAULT_PAIRS", "Plan", "compare", "measure", "table"]

CASE = "config"
DEFAULT_PAIRS, WARMUP, GATE_STEPS = 9, 2, 2
INTERLEAVED = "one process, one optimizer step of each side in turn, the order swapped from round to round"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        pairs: timed rounds, one optimizer step of each side; 6 or more give an interval of 95 %.
        warmup: rounds before, not timed.
        gate_steps: rounds before these, in which all sides must have the same loss; 0 for no gate.
        seed: of the random numbers before each side is built, and of its first step.
        profile: folder for a Chrome trace per side; None for none.
        peak_flops: of the device; None: what TRL knows.
    """

    pairs: int = DEFAULT_PAIRS
    warmup: int = WARMUP
    gate_steps: int = GATE_STEPS
    seed: int = 0
    profile: Path | None = None
    peak_flops: float | None = None

    @property
    def untimed(self) -> int:
        return self.gate_steps + self.warmup

    @property
    def rounds(self) -> int:
        return self.untimed + self.pairs

    @property
    def changes(self) -> dict[str, Any]:
        """Fields of the configuration that a measurement needs: enough steps, nothing written, nothing reported."""
        return {
            "max_steps": self.rounds + 2,  # one under the profiler, one in which syncs are counted
            "report_to": "none",
            "save_strategy": "no",
            "eval_strategy": "no",
            "eval_on_start": False,
            "load_best_model_at_end": False,
            "push_to_hub": False,
            "disable_tqdm": True,
        }

    def check(self) -> None:
        """Raises: UserError, where there is nothing to measure."""
        if self.pairs < 1 or self.warmup < 0 or self.gate_steps < 0:
            raise UserError(
                f"pairs={self.pairs}, warmup={self.warmup}, gate_steps={self.gate_steps}: "
                "time at least one pair, after 0 or more rounds of each"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "pairs": self.pairs,
            "warmup_steps": self.warmup,
            "gate_steps": self.gate_steps,
            "interval": "order statistics of the median; `coverage` is the least probability that they cover it",
        }


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
    with the batch size and the accumulation of the configuration. All sides are in memory together. First comes the
    gate: in `gate_steps` steps (with dropout off) they must be given the same tokens and compute the same loss.

    Args:
        build: ``build(trainer_class, config_class, **changes)`` returns a new `trainer_class` whose configuration is
            ``config_class(**(settings | changes))``, with a model that no other trainer has.
        pairs: timed steps of each side; 6 or more give an interval of 95 %.
        warmup: steps of each side before, not timed.
        gate_steps: steps of each side before these, for the gate; 0 for no gate.
        seed: of the random numbers when a side is built, and at its first step.
        sides: two or more of ``stock``, ``tuned``, ``rebuild``, ``fastpack`` and ``fastpack_plan`` (`plan_of`).
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
    plan = Plan(pairs, warmup, gate_steps, seed, None if profile is None else Path(profile), peak_flops)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if len(set(sides)) < 2 or len(set(sides)) != len(sides):
        raise UserError(f"sides={list(sides)}: give two or more different ones of {', '.join(SIDES)}")
    for name in sides:
        if name not in SIDES:
            raise UserError(f"there is no side {name!r}{did_you_mean(name, SIDES)} (sides: {', '.join(SIDES)})")
    ordered = [name for name in SIDES if name in sides]
    with _bar(plan.rounds, progress) as bar:
        row, complete = measure({name: plan_of(name, device) for name in ordered}, build, plan, bar)
    return record_of([row] if row else [], plan, complete)


def record_of(rows: Sequence[Mapping[str, Any]], plan: Plan, complete: bool, **settings: Any) -> dict[str, Any]:
    """The rows of one call as a record."""
    return make_record(
        case=CASE,
        settings={**plan.to_dict(), **settings},
        rows=rows,
        complete=complete,
        device=rows[0]["device"] if rows else "cpu",
        threads=torch.get_num_threads(),
        seed=plan.seed,
    )


@contextlib.contextmanager
def _bar(total: int, progress: bool) -> Iterator[Any]:
    with tqdm(total=total, unit="round", disable=None if progress else True, dynamic_ncols=True) as bar:
        yield bar


@dataclass(slots=True)
class _Measurement:
    """The state of one row while it is measured."""

    plan: Plan
    subject: str
    sides: dict[str, Side] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    gate: dict[str, Any] | None = None

    def fail(self, name: str, reason: str) -> None:
        self.failed[name] = reason
        side = self.sides.pop(name, None)
        if side is not None:
            side.close()
        del side
        free_memory("cuda" if torch.cuda.is_available() else "cpu")

    def build(self, name: str, make: Callable[[], Side]) -> None:
        """Make a side and let it begin; out of memory it is one that failed, as is a baseline that cannot run here."""
        try:
            self.sides[name] = side = make()
            first = next(iter(self.sides.values()))
            check_same_weights(first, side)
            side.begin(self.plan.seed)
            return
        except UserError:
            raise
        except FAILURES as error:
            reason = describe_failure(error)
            if not isinstance(error, torch.OutOfMemoryError) and name in (STOCK, self.subject):
                raise UserError(f"{name} cannot be trained: {reason}") from error
        if "OutOfMemory" in reason and len(self.sides) > 1:
            reason += "; all sides are in memory together: measure in one process each (--isolate)"
        self.fail(name, reason)

    def round(self, index: int) -> None:
        """One step of each side."""
        for name in turn_order(list(self.sides), index):
            try:
                self.sides[name].step()
            except UserError:
                raise
            except FAILURES as error:
                reason = describe_failure(error)
            else:
                self.order.append(name)
                continue
            self.fail(name, reason)

    def check(self, index: int) -> None:
        """The same tokens in every round; the same losses in those of the gate."""
        if len(self.sides) < 2:
            return
        last = {name: side.steps[-1] for name, side in self.sides.items()}
        check_batches({name: step.digest for name, step in last.items()}, index + 1)
        if index >= self.plan.gate_steps:
            return
        losses = {name: step.loss for name, step in last.items()}
        dtype = next(iter(self.sides.values())).dtype
        for name in list(losses)[1:]:
            try:
                check_loss(losses, index + 1, dtype, [name])
            except UserError as error:
                if name == self.subject:
                    raise
                self.fail(name, str(error))
        self.gate = self.gate or {
            "dtype": str(dtype).removeprefix("torch."),
            "tolerance": tolerance(dtype),
            "steps": [],
        }
        self.gate["steps"].append({name: loss for name, loss in losses.items() if name in self.sides})


def check_same_weights(first: Side, second: Side) -> None:
    """What is trained starts equal on both sides, and is not one and the same.

    Raises:
        UserError: it is not so.
    """
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


def measure(
    plans: Mapping[str, SidePlan], build: Build, plan: Plan, bar: Any, *, subject: str | None = None
) -> tuple[dict[str, Any] | None, bool]:
    """One row: all sides of `plans` in turn.

    Args:
        plans: by name, the reference of the gate first.
        build: see `compare`.
        plan: how much.
        bar: updated once per round.
        subject: whom the ratios are over; default: `OURS`, else the last.

    Returns:
        The row, None where nothing was timed, and whether it is complete.

    Raises:
        UserError: see `compare`.
    """
    plan.check()
    subject = subject or (OURS if OURS in plans else list(plans)[-1])
    state = _Measurement(plan, subject)
    complete = True
    load = OtherLoad()
    with quiet(), contextlib.redirect_stdout(io.StringIO()):  # banners and logs
        try:
            for name, side_plan in plans.items():
                bar.set_postfix_str(f"loading {name}")
                state.build(name, partial(Side, name, side_plan, build, plan.changes, plan.seed))
            load = _rounds(state, bar)
            for side in state.sides.values():
                _extras(side, plan)
        except KeyboardInterrupt:
            complete = False
        finally:
            other_load = load.cores()
            for side in state.sides.values():
                side.close()
    try:
        return _row(state, complete, other_load), complete
    finally:
        state.sides.clear()
        gc.collect()
        attempt(partial(free_memory, "cuda" if torch.cuda.is_available() else "cpu"))


def _rounds(state: _Measurement, bar: Any) -> OtherLoad:
    plan = state.plan
    load = OtherLoad()
    with without_dropout([side.trainer.model for side in state.sides.values()]) as dropped:
        for index in range(plan.gate_steps):
            _one_round(state, index, bar, "gate")
    if state.gate is not None:
        state.gate["dropout"] = "off in these steps" if dropped else "none"
    for index in range(plan.gate_steps, plan.rounds):
        if index == plan.untimed:
            load, state.order = OtherLoad(), []
        _one_round(state, index, bar, "timing" if index >= plan.untimed else "warm-up")
    return load


def _one_round(state: _Measurement, index: int, bar: Any, what: str) -> None:
    if not state.sides:
        return
    bar.set_postfix_str(what)
    state.round(index)
    state.check(index)
    bar.update(1)


def _extras(side: Side, plan: Plan) -> None:
    """Steps that are not timed: under the profiler, and with syncs counted. What fails is a note, the times stand."""
    trace = None if plan.profile is None else plan.profile / f"{side.name}.json"
    for what, call in (("profile", partial(side.profile, trace)), ("host syncs", side.count_syncs)):
        _, failure = attempt(call)
        if failure is not None:
            side.extras["notes"].append(f"{what}: {failure}")
            return  # its training has ended


def _row(state: _Measurement, complete: bool, other_load: float | None) -> dict[str, Any] | None:
    plan = state.plan
    good = {name: side for name, side in state.sides.items() if len(side.steps) > plan.untimed}
    if not good:
        if complete:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in state.failed.items())
            raise UserError(f"no side could be measured: {reasons}")
        return None
    rounds = min(len(side.steps) for side in good.values())
    timed = slice(plan.untimed, rounds)
    first = next(iter(good.values()))
    results = {name: side.result() for name, side in good.items()}
    peak = plan.peak_flops or device_peak(first.device, first.dtype)
    figures = {name: side_row(results[name], timed, good[name].flops, peak) for name in good}
    setting = setting_of(first.trainer, first.dtype)
    return {
        **setting,
        **shared_facts(results[first.name]["steps"][timed]),
        "device": first.device.type,
        "isolation": INTERLEAVED,
        "subject": state.subject,
        "peak_flops": peak,
        "gate": state.gate,
        "sides": {**figures, **{name: {"failed": reason} for name, reason in state.failed.items()}},
        "ratios": ratios({name: side["seconds"]["values"] for name, side in figures.items()}, state.subject),
        "loss_difference": loss_difference({name: side["losses"] for name, side in figures.items()}),
        "order": state.order,
        "other_load": other_load,
    }


def device_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """Operations per second that TRL knows of a device; None for a CPU, fp32, or another."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    peak: float | None = get_peak_flops(name, str(dtype).removeprefix("torch."))
    return peak
