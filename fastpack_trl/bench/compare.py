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

from fastpack_trl.bench.sides import COMPILED, OURS, SIDES, STOCK, Side, side_of
from fastpack_trl.bench.watch import GRADIENT_NORM, LOSS, SETTLING, TIMED, WARMUP, SideResult, Watch, run_side
from fastpack_trl.errors import UserError, did_you_mean
from fastpack_trl.measure.code_hash import code_hashes
from fastpack_trl.measure.device_memory import free_memory
from fastpack_trl.measure.failures import FAILURES, describe_failure
from fastpack_trl.measure.payback import LONG_RUN
from fastpack_trl.measure.record import date_now, machine, source, versions
from fastpack_trl.measure.tables import aligned

Build = Callable[..., Any]
"""``build(trainer_class, config_class, **changes)`` returns a new trainer; see `compare`."""
GATE, ROUNDS = 2, 2
FLOAT32_TOLERANCE = 1e-5
LONG = {"max_steps": LONG_RUN, "report_to": "none", "save_strategy": "no", "eval_strategy": "no", "disable_tqdm": True}
"""Fields of every side: the watch ends the run; nothing is written."""


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
        sides: two or more of ``stock``, ``stock_compiled``, ``fastpack`` and ``fastpack_plan`` (`side_of`).
        warmup: minimum number of steps before the timed ones; it lasts until all features of a side are decided.
        timed: steps of each side and round that are timed.
        rounds: how often each side trains.
        gate_steps: first steps in which losses must agree; 0 for no check.

    Returns:
        A record with versions, commit and machine, and one row, of `compare_sides`.

    Raises:
        UserError: unknown sides, steps that cannot be timed, or a `build` that does not do what it is asked for.
        LossParityError: a side computes other losses; a `UserError`.
    """
    for name in sides:
        if name not in SIDES:
            raise UserError(f"there is no side {name!r}{did_you_mean(name, SIDES)} (sides: {', '.join(SIDES)})")
    if not 1 < len(set(sides)) == len(sides):
        raise UserError(f"sides={list(sides)}: give two or more different ones of {', '.join(SIDES)}")
    steps: dict[str, Any] = {"warmup": max(warmup, gate_steps), "timed": timed, "gate": gate_steps, "seed": seed}
    runs = {name: partial(train_side, build, side_of(name), **steps) for name in SIDES if name in sides}
    with quiet():
        row = compare_sides(runs, rounds=rounds, gate=gate_steps, progress=progress)
    return record_of(row, steps | {"rounds": rounds})


def train_side(build: Build, side: Side, *, warmup: int, timed: int, gate: int, seed: int) -> SideResult:
    """Build the trainer of a side and train it under a `Watch`."""
    settling = SETTLING if torch.cuda.is_available() else 0
    watch = Watch(warmup=warmup, timed=timed, gate=gate, settling=settling, profiled=2, count_syncs=True)

    def checked() -> Any:
        requested = {**LONG, **side.changes}
        trainer = build(side.trainer_class, side.config_class, **requested)
        if not isinstance(trainer, side.trainer_class):
            wanted, got = side.trainer_class.__name__, type(trainer).__name__
            raise UserError(f"build returned a {got}: it must return a {wanted}, its first argument")
        for name in ("max_steps", *side.changes):
            value = getattr(trainer.args, name, None)
            if value != requested[name]:
                raise UserError(
                    f"build ignored {name}={requested[name]!r} (its trainer has {value!r}): make the configuration by "
                    "config_class(**(settings | changes))"
                )
        if trainer.args.world_size > 1 or trainer.args.n_gpu > 1:
            raise UserError("the comparison runs on one device and in one process: set CUDA_VISIBLE_DEVICES=0")
        watch.result.setting = setting_of(trainer)
        return trainer

    return run_side(checked, watch, around=side.around, compares=side.compares, seed=seed)


def setting_of(trainer: Any) -> str:
    """Return the run in a line, without names of paths: ``qwen3, 4 layers of 192, LoRA, checkpointing, ...``."""
    args, model = trainer.args, trainer.model
    config = model.config.get_text_config()
    parts = [
        f"{config.model_type}, {config.num_hidden_layers} layers of {config.hidden_size}",
        "4-bit" if getattr(model, "is_loaded_in_4bit", False) else "",
        "LoRA" if getattr(model, "peft_config", None) else "",
        "checkpointing" if args.gradient_checkpointing else "no checkpointing",
        f"{args.per_device_train_batch_size} x {args.gradient_accumulation_steps} rows per step",
        f"max_length {args.max_length}" if getattr(args, "max_length", None) else "",
    ]
    return ", ".join(filter(None, parts))


def compare_sides(
    runs: Mapping[str, Callable[[], SideResult]], *, rounds: int = ROUNDS, gate: int = GATE, progress: bool = True
) -> dict[str, Any]:
    """Run each side to its end, then the next, `rounds` times in alternating order; compare losses, then times.

    Args:
        runs: by name, each trains its side and returns the result. The first one is the reference of the gate;
            ``fastpack``, or the last one, is the subject that the others are compared with.
        gate: first steps whose losses must agree; 0 for no gate.

    Returns:
        ``sides``: per side the figures, or ``failed`` with the reason; ``ratios``: per other side its seconds per step
        / those of the subject (above 1 the subject is faster), over all steps and per round; ``gate``, the losses that
        agreed; ``loss_difference``, the largest relative one in later steps; ``order``; ``complete``, False after an
        interrupt.

    Raises:
        LossParityError: a side has other losses than the reference: nothing is compared.
        UserError: a side cannot be trained, for another reason than its memory. ``stock_compiled`` is only left out.
    """
    if rounds < 1 or gate < 0:
        raise UserError(f"rounds={rounds}, gate_steps={gate}: give rounds >= 1 and gate_steps >= 0")
    reference, subject = next(iter(runs)), OURS if OURS in runs else list(runs)[-1]
    results: dict[str, list[SideResult]] = {name: [] for name in runs}
    failed, order, is_complete = dict[str, str](), list[str](), True
    turns = [name for number in range(rounds) for name in [*runs][:: -1 if number % 2 else 1]]
    with tqdm(turns, unit="run", disable=None if progress else True, dynamic_ncols=True) as bar:
        try:
            for name in bar:
                bar.set_description(name)
                if name in failed:
                    continue
                try:
                    results[name].append(runs[name]())
                    order.append(name)
                    if results[reference]:
                        check_losses(reference, results[reference][0], name, results[name][-1], gate)
                except FAILURES as error:
                    failed[name] = describe_failure(error)
                    if name != COMPILED and not isinstance(error, torch.OutOfMemoryError):
                        if isinstance(error, UserError):
                            raise
                        raise UserError(f"{name} cannot be trained: {failed[name]}") from error
                free_memory("cuda" if torch.cuda.is_available() else "cpu")  # after the handler, which holds tensors
        except KeyboardInterrupt:
            is_complete = False
    good = {name: done for name, done in results.items() if done and name not in failed}
    if not good:
        if not is_complete:
            raise KeyboardInterrupt
        raise UserError("no side could be measured: " + "; ".join(f"{name}: {why}" for name, why in failed.items()))
    first, *others = [done[0] for done in good.values()]
    later = [pair for other in others for pair in zip(other.compared[gate:], first.compared[gate:], strict=False)]
    return {
        "subject": subject,
        "sides": {
            **{name: _side_figures(done) for name, done in good.items()},
            **{name: {"failed": reason} for name, reason in failed.items()},
        },
        "ratios": {name: _ratio(good[name], good[subject]) for name in good if name != subject and subject in good},
        "gate": _gate_of(good, gate) if gate and others else None,
        "loss_difference": max((abs(own - value) / (abs(value) or 1.0) for own, value in later), default=0.0),
        "order": order,
        "complete": is_complete,
    }


def check_losses(reference: str, first: SideResult, name: str, own: SideResult, gate: int) -> None:
    """Check that a side computes the losses of the reference in the steps of the gate.

    Raises:
        LossParityError: a loss is further apart than `tolerance`, or not finite. It names both and the step.
    """
    allowed = tolerance(first.dtype, first.compares)
    for step, (expected, value) in enumerate(zip(first.compared[:gate], own.compared[:gate], strict=True), 1):
        difference = abs(value - expected) / (abs(expected) or 1.0)
        if not difference <= allowed:  # a NaN is over every bound
            raise LossParityError(
                f"the {first.compares} of step {step} is {value!r} with {name} and {expected!r} with {reference}: "
                f"{difference:.1e} apart, allowed are {allowed:.0e} in {first.dtype}; no times are compared. All sides "
                "must get the same data in the same order; `fastpack-trl verify --model ... --attn off` tells whether "
                "TRL keeps this model's documents apart; without the gate (gate_steps=0) the differences are recorded"
            )


def _side_figures(results: Sequence[SideResult]) -> dict[str, Any]:
    """Return the figures of one side over its rounds: quartiles of steps, most memory; the rest of the first round."""
    rates = [result.tokens / sum(result.seconds) for result in results if result.tokens]
    return asdict(results[0]) | {
        "seconds": quartiles(_seconds(results)),
        "tokens_per_second": median(rates) if rates else None,
        "peak_gib": max(result.peak_gib or 0.0 for result in results) or None,
        "reserved_gib": max(result.reserved_gib or 0.0 for result in results) or None,
    }


def _seconds(results: Sequence[SideResult]) -> list[float]:
    return [step for result in results for step in result.seconds]


def quartiles(values: Sequence[float]) -> dict[str, Any]:
    """Return median and quartiles as plain data: ``{"median": 2, "q1": 1.5, "q3": 2.5, "values": [1, 2, 3]}``."""
    q1, middle, q3 = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": middle, "q1": q1, "q3": q3, "values": list(values)}


def _ratio(others: Sequence[SideResult], ours: Sequence[SideResult]) -> dict[str, Any]:
    by_round = [median(a.seconds) / median(b.seconds) for a, b in zip(others, ours, strict=False)]
    return {"median": median(_seconds(others)) / median(_seconds(ours)), "rounds": by_round}


def _gate_of(good: Mapping[str, Sequence[SideResult]], gate: int) -> dict[str, Any]:
    """Return the losses that had to agree before times were compared."""
    first = next(iter(good.values()))[0]
    return {
        "figure": first.compares,
        "dtype": first.dtype,
        "tolerance": tolerance(first.dtype, first.compares),
        "steps": [{name: done[0].compared[step] for name, done in good.items()} for step in range(gate)],
    }


def record_of(row: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of `compare_sides` as a record with versions, commit and machine."""
    device = next((side["device"] for side in row["sides"].values() if "device" in side), "cpu")
    about = {"case": "config", "complete": row["complete"], "date": date_now(), "settings": dict(settings)}
    code = {"seed": settings["seed"], "versions": versions(), "source": source(), "code": code_hashes()}
    place = {**machine(device), "threads": torch.get_num_threads()}
    return about | code | {"machine": place, "rows": [dict(row)]}


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
    figures = "completions and rewards are made up; gradient norms" if is_learner else "losses"
    agree = f"agree within {gate['tolerance']:.0e} ({gate['dtype']}) in the first {len(gate['steps'])} steps"
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
