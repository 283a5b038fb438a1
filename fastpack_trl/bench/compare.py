"""TRL vs. fastpack on a training run of the user's own: `compare`, for scripts and notebooks.

```python
def build(trainer_class, config_class, **changes):
    args = config_class(**(settings | changes))
    return trainer_class(model="Qwen/Qwen3-0.6B", args=args, train_dataset=dataset)


record = compare(build)
print(table(record))
```
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch

from fastpack_trl.bench.engine import GATE, ROUNDS, compare_sides, run_side
from fastpack_trl.bench.gate import GRADIENT_NORM
from fastpack_trl.bench.sides import OURS, SIDES, STOCK, Side, side_of
from fastpack_trl.bench.watch import TIMED, WARMUP, SideResult, Watch
from fastpack_trl.errors import UserError, did_you_mean
from fastpack_trl.measure.code_hash import code_hashes
from fastpack_trl.measure.payback import LONG_RUN
from fastpack_trl.measure.record import date_now, machine, source, versions
from fastpack_trl.measure.tables import aligned

Build = Callable[..., Any]
"""``build(trainer_class, config_class, **changes)`` returns a new trainer; see `compare`."""
SETTLING = 6
"""Steps of the warm-up after all features are decided, on CUDA: graphs are recorded for rows of other lengths."""
LONG = {"max_steps": LONG_RUN, "report_to": "none", "save_strategy": "no", "eval_strategy": "no", "disable_tqdm": True}
"""Fields of every side: the watch ends the run; nothing is written."""


def compare(
    build: Build,
    *,
    sides: Sequence[str] = (STOCK, OURS),
    warmup: int = WARMUP,
    timed: int = TIMED,
    rounds: int = ROUNDS,
    gate_steps: int = GATE,
    seed: int = 0,
    progress: bool = True,
) -> dict[str, Any]:
    """Train each side to its end, then the next one, in alternating rounds; compare losses, then times and memory.

    Every side starts from the same weights, data and random numbers. In the first steps, with dropout off, all must
    compute the same losses.

    Args:
        build: ``build(trainer_class, config_class, **changes)`` returns a new `trainer_class` whose configuration is
            ``config_class(**(settings | changes))``, with a model that no other trainer has.
        sides: two or more of ``stock``, ``stock_compiled``, ``rebuild``, ``fastpack`` and ``fastpack_plan``
            (`side_of`).
        warmup: least number of steps before the timed ones; it lasts until all features of a side have settled.
        timed: steps of each side and round that are timed.
        rounds: how often each side trains.
        gate_steps: first steps in which losses must agree; 0 for no check.

    Returns:
        A record with versions, commit and machine, and one row, of `compare_sides`.

    Raises:
        UserError: unknown sides, steps that cannot be timed, or a `build` that does not do what it is asked for.
        LossParityError: a side computes other losses; a `UserError`.
    """
    if len(set(sides)) < 2 or len(set(sides)) != len(sides):
        raise UserError(f"sides={list(sides)}: give two or more different ones of {', '.join(SIDES)}")
    for name in sides:
        if name not in SIDES:
            raise UserError(f"there is no side {name!r}{did_you_mean(name, SIDES)} (sides: {', '.join(SIDES)})")
    steps: dict[str, Any] = {"warmup": max(warmup, gate_steps), "timed": timed, "gate": gate_steps, "seed": seed}
    runs = {name: partial(train_side, build, side_of(name), **steps) for name in SIDES if name in sides}
    with quiet():
        row = compare_sides(runs, subject=subject_of(sides), rounds=rounds, gate=gate_steps, progress=progress)
    return record_of(row, steps | {"rounds": rounds})


def subject_of(sides: Sequence[str]) -> str:
    """Return the side that the others are compared with: ``fastpack``, or the last one."""
    return OURS if OURS in sides else sides[-1]


def train_side(
    build: Build, side: Side, *, warmup: int, timed: int, gate: int, seed: int, trace: str | Path | None = None
) -> SideResult:
    """Build the trainer of a side and train it under a `Watch`."""
    watch = Watch(
        warmup=warmup, timed=timed, gate=gate, settling=SETTLING if torch.cuda.is_available() else 0, profiled=2,
        trace=trace, count_syncs=True,
    )  # fmt: skip

    def built() -> Any:
        asked = {**LONG, **side.changes}
        trainer = build(side.trainer_class, side.config_class, **asked)
        if not isinstance(trainer, side.trainer_class):
            wanted, got = side.trainer_class.__name__, type(trainer).__name__
            raise UserError(f"build returned a {got}: it must return a {wanted}, its first argument")
        for name in ("max_steps", *side.changes):
            value = getattr(trainer.args, name, None)
            if value != asked[name]:
                raise UserError(
                    f"build ignored {name}={asked[name]!r} (its trainer has {value!r}): make the configuration by "
                    "config_class(**(settings | changes))"
                )
        if trainer.args.world_size > 1 or trainer.args.n_gpu > 1:
            raise UserError("the comparison runs on one device and in one process: set CUDA_VISIBLE_DEVICES=0")
        watch.result.setting = setting_of(trainer)
        return trainer

    return run_side(built, watch, around=side.around, compares=side.compares, seed=seed)


def setting_of(trainer: Any) -> str:
    """Return the run in a line, without names of paths: ``qwen3, 4 layers of 192, LoRA r=16, checkpointing, ...``."""
    args, model = trainer.args, trainer.model
    config = model.config.get_text_config()
    lora = next(iter((getattr(model, "peft_config", None) or {}).values()), None)
    parts = [
        f"{config.model_type}, {config.num_hidden_layers} layers of {config.hidden_size}",
        "4-bit" if getattr(model, "is_loaded_in_4bit", False) else "",
        "" if lora is None else f"{str(getattr(lora.peft_type, 'value', lora.peft_type)).replace('LORA', 'LoRA')}",
        "checkpointing" if args.gradient_checkpointing else "no checkpointing",
        f"{args.per_device_train_batch_size} x {args.gradient_accumulation_steps} rows per step",
        f"max_length {args.max_length}" if getattr(args, "max_length", None) else "",
    ]
    return ", ".join(filter(None, parts))


def record_of(row: Mapping[str, Any], settings: Mapping[str, Any], case: str = "config") -> dict[str, Any]:
    """Return a row of `compare_sides` as a record with versions, commit and machine."""
    device = next((side["device"] for side in row["sides"].values() if "device" in side), "cpu")
    return {
        "case": case,
        "complete": row["complete"],
        "date": date_now(),
        "settings": dict(settings),
        "seed": settings["seed"],
        "versions": versions(),
        "source": source(),
        "code": code_hashes(),
        "machine": {**machine(device), "threads": torch.get_num_threads()},
        "rows": [dict(row)],
    }


def table(record: Mapping[str, Any]) -> str:
    """Return the record of `compare` for people: whether losses agree, then time, tokens, memory of each side."""
    (row,) = record["rows"]
    sides = {name: side for name, side in row["sides"].items() if "failed" not in side}
    first = next(iter(sides.values()))
    cells = [["side", "step ms", "quartiles", "speed", "tokens/s", "GiB", "idle", "launches", "host syncs"]]
    for name, side in sides.items():
        seconds, profile, rate = side["seconds"], side["profile"], side["tokens_per_second"]
        busy = profile.get("busy_seconds")
        cells.append([
            name,
            f"{seconds['median'] * 1e3:,.1f}",
            f"{seconds['q1'] * 1e3:,.1f} to {seconds['q3'] * 1e3:,.1f}",
            f"{first['seconds']['median'] / seconds['median']:.2f}x",
            f"{rate:,.0f}" if rate else "-",
            f"{side['reserved_gib']:.2f}" if side["reserved_gib"] else "-",
            f"{max(0.0, 1 - busy / seconds['median']):.0%}" if busy else "-",
            f"{profile['launches']:,.0f}" if busy else "-",
            "-" if side["host_syncs"] is None else str(side["host_syncs"]),
        ])  # fmt: skip
    out = [] if row["complete"] else ["INCOMPLETE: interrupted"]
    out += [first["setting"], losses_line(row), *aligned(cells)]
    out += [f"{name}: {side['path']}" for name, side in sides.items() if side["path"]]
    return "\n".join([*out, *(f"{n}: {side['failed']}" for n, side in row["sides"].items() if "failed" in side)])


def losses_line(row: Mapping[str, Any]) -> str:
    """Return whether the losses of all sides agree, for people."""
    gate, later = row["gate"], f"largest difference in later steps {row['loss_difference']:.1e}"
    if gate is None:
        return f"losses were not compared; {later}"
    learner = gate["figure"] == GRADIENT_NORM
    figures = "completions and rewards are made up; gradient norms" if learner else "losses"
    return (
        f"{figures} agree within {gate['tolerance']:.0e} ({gate['dtype']}) in the first {len(gate['steps'])} steps; "
        f"{later}"
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Show no banner, log or bar of the sides beside the one bar over all of them."""
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
