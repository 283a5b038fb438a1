"""TRL vs. fastpack on a training run of the user's own: `compare`, for scripts and notebooks.

```python
def build(trainer_class, config_class, **changes):
    args = config_class(**(settings | changes))
    return trainer_class(model="Qwen/Qwen3-0.6B", args=args, train_dataset=dataset)


record = compare(build)
print(table(record))
```

Each side trains to its end and is freed, then the next one trains. The losses of the first steps are compared before
the times.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from statistics import median, quantiles
from typing import Any

import datasets
import torch
from tqdm.auto import tqdm

from fastpack_trl.bench.sides import COMPILED, OURS, SIDES, STOCK, Build, train_side
from fastpack_trl.bench.watch import GRADIENT_NORM, LOSS, TIMED, WARMUP, SideResult
from fastpack_trl.errors import UserError, check_name, describe
from fastpack_trl.measure.code_hash import code_hashes
from fastpack_trl.measure.device_memory import free_memory
from fastpack_trl.measure.record import date_now, machine, source, versions
from fastpack_trl.measure.tables import aligned

GATE, ROUNDS = 2, 2
FLOAT32_TOLERANCE = 1e-5


class LossParityError(UserError):
    """The sides of a comparison do not compute the same: a time would compare different work."""


def tolerance(dtype: str, figure: str = LOSS) -> float:
    """Return the largest relative difference of two losses that counts as rounding; of two gradient norms ten times it.

    1e-5 in fp32 and fp64, where sums in another order differ by a few units of 6e-8 that the optimizer carries on. In
    bf16 and fp16 the spacing of numbers, `torch.finfo(dtype).eps` (0.8 % and 0.1 %): each operation rounds to half of
    it. Gradient norms are rounded in the forward pass and in the backward pass through all layers.
    """
    of_loss = float(torch.finfo(getattr(torch, dtype)).eps) if dtype in ("bfloat16", "float16") else FLOAT32_TOLERANCE
    return of_loss if figure == LOSS else 10 * of_loss


def compare(
    build: Build, *, sides: Sequence[str] = (STOCK, OURS), warmup: int = WARMUP, timed: int = TIMED,
    rounds: int = ROUNDS, gate_steps: int = GATE, seed: int = 0, progress: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Train each side to its end, then the next one, in alternating rounds; compare losses, then times and memory.

    Every side starts from the same weights, data and random numbers. In the first steps, with dropout off, all must
    compute the same losses.

    Args:
        build: ``build(trainer_class, config_class, **changes)`` returns a new `trainer_class` whose configuration is
            ``config_class(**(settings | changes))``, with a model that no other trainer has.
        sides: two or more of ``stock``, ``stock_compiled``, ``fastpack`` and ``fastpack_plan`` (`train_side`).
        warmup: minimum number of steps before the timed ones; it lasts until all features of a side are decided.
        timed: steps of each side and round that are timed.
        rounds: training runs per side.
        gate_steps: first steps in which losses must agree; 0 for no check.

    Returns:
        A record with versions, commit and machine, and one row, of `compare_sides`.

    Raises:
        UserError: unknown sides, a number of steps that is too small, or a `build` that ignores its arguments.
        LossParityError: a side computes different losses (a subclass of `UserError`).
    """
    for name in sides:
        check_name("side", name, SIDES, "sides")
    if not 1 < len(set(sides)) == len(sides):
        raise UserError(f"sides={list(sides)}: give two or more different ones of {', '.join(SIDES)}")
    if min(rounds, timed) < 1 or min(warmup, gate_steps) < 0:
        given = f"rounds={rounds}, timed={timed}, warmup={warmup}, gate_steps={gate_steps}"
        raise UserError(f"{given}: rounds and timed must be >= 1, warmup and gate_steps >= 0")
    steps: dict[str, Any] = {"warmup": max(warmup, gate_steps), "timed": timed, "gate": gate_steps, "seed": seed}
    runs = {name: partial(train_side, build, name, **steps) for name in SIDES if name in sides}
    with quiet():
        row = compare_sides(runs, rounds=rounds, gate=gate_steps, progress=progress)
    return record_of(row, steps | {"rounds": rounds})


def compare_sides(
    runs: Mapping[str, Callable[[], SideResult]], *, rounds: int = ROUNDS, gate: int = GATE, progress: bool = True
) -> dict[str, Any]:
    """Run each side to its end, then the next, in alternating rounds; compare losses, those of the first side first.

    Returns:
        ``sides``: per side the figures, or ``failed`` with the reason; ``gate``: which figures agreed, and how closely;
        ``loss_difference``, the largest relative one in later steps; ``complete``, False after an interrupt.

    Raises:
        LossParityError: a side has other losses than the reference: nothing is compared.
        UserError: a side cannot be trained, for another reason than its memory. ``stock_compiled`` is only left out.
    """
    results: dict[str, list[SideResult]] = {name: [] for name in runs}
    reference, failed, is_complete = next(iter(runs)), dict[str, str](), True
    turns = [name for number in range(rounds) for name in [*runs][:: -1 if number % 2 else 1]]
    with tqdm(turns, unit="run", disable=None if progress else True, dynamic_ncols=True) as bar:
        try:
            for name in bar:
                bar.set_description(name)
                if name in failed:
                    continue
                try:
                    results[name].append(runs[name]())
                    if results[reference]:
                        check_losses(reference, results[reference][0], name, results[name][-1], gate)
                except Exception as error:
                    failed[name] = f"{type(error).__name__}: {describe(error)}"
                    if name != COMPILED and not isinstance(error, torch.OutOfMemoryError):
                        if isinstance(error, UserError):
                            raise
                        raise UserError(f"{name} cannot be trained: {failed[name]}") from error
                free_memory()  # after the handler, which holds tensors
        except KeyboardInterrupt:
            is_complete = False
    good = {name: done for name, done in results.items() if done and name not in failed}
    if not good:
        if not is_complete:
            raise KeyboardInterrupt
        raise UserError("no side could be measured: " + "; ".join(f"{name}: {why}" for name, why in failed.items()))
    first, *others = [done[0] for done in good.values()]
    later = [pair for other in others for pair in zip(other.compared[gate:], first.compared[gate:], strict=False)]
    allowed = tolerance(first.dtype, first.compares)
    gated = {"figure": first.compares, "dtype": first.dtype, "tolerance": allowed, "steps": gate}
    figures = {name: _side_figures(done) for name, done in good.items()}
    return {
        "sides": figures | {name: {"failed": reason} for name, reason in failed.items()},
        "gate": gated if gate and others else None,
        "loss_difference": max((abs(own - value) / (abs(value) or 1.0) for own, value in later), default=0.0),
        "complete": is_complete,
    }


def check_losses(reference: str, first: SideResult, name: str, own: SideResult, gate: int) -> None:
    """Raise `LossParityError` for a loss of the gate's steps that is further apart than `tolerance`, or not finite."""
    allowed = tolerance(first.dtype, first.compares)
    for step, (expected, value) in enumerate(zip(first.compared[:gate], own.compared[:gate], strict=True), 1):
        difference = abs(value - expected) / (abs(expected) or 1.0)
        if not difference <= allowed:  # a NaN is over every bound
            raise LossParityError(
                f"the {first.compares} of step {step} is {value!r} with {name} but {expected!r} with {reference}: "
                f"they differ by {difference:.1e}, more than {allowed:.0e} ({first.dtype}), so no times are "
                "compared. All sides must get the same data in the same order; `fastpack-trl verify --model ... "
                "--attn off` tells whether TRL keeps this model's documents apart; without the gate (gate_steps=0) the "
                "differences are recorded"
            )


def _side_figures(results: Sequence[SideResult]) -> dict[str, Any]:
    """Return the figures of one side over its rounds: quartiles of steps, most memory; the rest of the first round."""
    rates = [result.tokens / sum(result.seconds) for result in results if result.tokens]
    return asdict(results[0]) | {
        "seconds": quartiles([step for result in results for step in result.seconds]),
        "tokens_per_second": median(rates) if rates else None,
        "peak_gib": max(result.peak_gib or 0.0 for result in results) or None,
        "reserved_gib": max(result.reserved_gib or 0.0 for result in results) or None,
    }


def quartiles(values: Sequence[float]) -> dict[str, Any]:
    """Return median and quartiles as plain data: ``{"median": 2, "q1": 1.5, "q3": 2.5, "values": [1, 2, 3]}``."""
    q1, middle, q3 = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": middle, "q1": q1, "q3": q3, "values": list(values)}


def record_of(row: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of `compare_sides` as a record with versions, commit and machine."""
    device = next((side["device"] for side in row["sides"].values() if "device" in side), "cpu")
    return {
        "complete": row["complete"], "date": date_now(), "settings": dict(settings), "versions": versions(),
        "source": source(), "code": code_hashes(), "machine": {**machine(device), "threads": torch.get_num_threads()},
        "rows": [dict(row)],
    }  # fmt: skip


def table(record: Mapping[str, Any]) -> str:
    """Return the record of `compare` for people: whether losses agree, then time, tokens, memory of each side."""
    (row,) = record["rows"]
    sides = {name: side for name, side in row["sides"].items() if "failed" not in side}
    first = next(iter(sides.values()))
    cells = [["side", "step ms", "quartiles", "speed", "tokens/s", "GiB", "idle", "launches", "host syncs"]]
    for name, side in sides.items():
        step, low, high = (side["seconds"][key] for key in ("median", "q1", "q3"))
        rate, memory, busy = side["tokens_per_second"], side["reserved_gib"], side["profile"].get("busy_seconds")
        times = [f"{step * 1e3:,.1f}", f"{low * 1e3:,.1f} to {high * 1e3:,.1f}"]
        speed = [f"{first['seconds']['median'] / step:.2f}x", f"{rate:,.0f}" if rate else "-"]
        idle = [f"{max(0.0, 1 - busy / step):.0%}", f"{side['profile']['launches']:,.0f}"] if busy else ["-", "-"]
        syncs = "-" if side["host_syncs"] is None else str(side["host_syncs"])
        cells.append([name, *times, *speed, f"{memory:.2f}" if memory else "-", *idle, syncs])
    lines = [first["setting"], losses_line(row), *aligned(cells)]
    lines += [f"{name}: {side['path']}" for name, side in sides.items() if side["path"]]
    lines += [f"{name}: {side['failed']}" for name, side in row["sides"].items() if "failed" in side]
    return "\n".join(lines if row["complete"] else ["INCOMPLETE: interrupted", *lines])


def losses_line(row: Mapping[str, Any]) -> str:
    """Return whether the losses of all sides agree, for people."""
    gate, later = row["gate"], f"largest difference in later steps {row['loss_difference']:.1e}"
    if gate is None:
        return f"losses were not compared; {later}"
    is_learner = gate["figure"] == GRADIENT_NORM
    figures = "random completions and rewards; gradient norms" if is_learner else "losses"
    agree = f"agree within {gate['tolerance']:.0e} ({gate['dtype']}) in the first {gate['steps']} steps"
    return f"{figures} {agree}; {later}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Show no banner, log or bar of the sides: one bar goes over all of them."""
    bars, level = datasets.are_progress_bars_disabled(), logging.root.manager.disable
    datasets.disable_progress_bars()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore", FutureWarning)  # TRL's own defaults use deprecated names
            yield
    finally:
        logging.disable(level)
        if not bars:
            datasets.enable_progress_bars()
