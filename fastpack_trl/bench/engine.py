"""One engine for every comparison of trainings: a side trains to its end, is freed, then the next one trains.

```python
def train(side):  # returns a `SideResult`; or a process of its own does it: `fastpack_trl.bench.process.OwnProcess`
    return run_side(lambda: make_trainer(side), Watch(warmup=4, timed=8))


comparison = compare_sides({side: partial(train, side) for side in ("stock", "fastpack")}, subject="fastpack")
comparison["ratios"]["stock"]["median"]  # 1.31: fastpack is 1.31 times as fast
```

`fastpack_trl.bench.watch.Watch` is the callback that records a training. The losses of the first steps are compared
before any times are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from fastpack_trl.bench.gate import LOSS, LossParityError, check_losses, tolerance
from fastpack_trl.bench.watch import SideResult, Watch
from fastpack_trl.errors import UserError
from fastpack_trl.measure.device_memory import free_memory
from fastpack_trl.measure.failures import FAILURES, describe_failure
from fastpack_trl.measure.intervals import quartiles

GATE, ROUNDS = 2, 2


def turn_order(names: Sequence[str], index: int) -> list[str]:
    """Return the order of round `index`: every second runs backwards; of three or more sides each comes first in turn.

    ``a b``: a b, b a, a b, ... ``a b c``: a b c, c b a, b c a, a c b, c a b, b a c.
    """
    shift = index // 2 % len(names) if len(names) > 2 else 0
    turn = [*names[shift:], *names[:shift]]
    return turn if index % 2 == 0 else turn[::-1]


def run_side(
    build: Callable[[], Any],
    watch: Watch,
    *,
    around: Callable[[Any], AbstractContextManager[Any]] = contextlib.nullcontext,
    compares: str = LOSS,
    seed: int = 0,
) -> SideResult:
    """Build a trainer, train it to the end of `watch`, free it, and return what was measured.

    Args:
        around: a context of the training, given the trainer; a text that it yields is the ``path`` of the result.
        compares: what the gate compares, `LOSS` or `GRADIENT_NORM`.
        seed: of the random numbers before the trainer is built, and before it trains.
    """
    result = watch.result
    result.compares = compares
    try:
        set_seed(seed)
        trainer = build()
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        free_memory(torch.device(trainer.args.device).type)
        with around(trainer) as path:
            result.path = path if isinstance(path, str) else ""
            set_seed(seed)
            with watch.attached(trainer):
                trainer.train()
        if len(result.seconds) < watch.timed:
            raise UserError(
                f"training ended by itself after {len(result.losses)} steps: a callback or an empty data set stopped "
                "it; take that away for the measurement"
            )
        return result
    finally:
        trainer = watch.trainer = None
        free_memory("cuda" if torch.cuda.is_available() else "cpu")


def compare_sides(
    runs: Mapping[str, Callable[[], SideResult]],
    *,
    subject: str,
    rounds: int = ROUNDS,
    gate: int = GATE,
    progress: bool = True,
) -> dict[str, Any]:
    """Run each side to its end, then the next, `rounds` times in alternating order; compare losses, then times.

    Args:
        runs: by name, each trains its side and returns the result; the first one is the reference of the gate.
        subject: the side that the others are compared with.
        gate: first steps whose losses must agree; 0 for no gate.

    Returns:
        ``sides``: per side `side_figures`, or ``failed`` with the reason; ``ratios``: per other side its seconds per
        step / those of the subject (above 1 the subject is faster), over all steps and per round; ``gate``, the losses
        that agreed; ``loss_difference``, the largest relative one in later steps; ``order``; ``complete``, False after
        an interrupt.

    Raises:
        LossParityError: the subject has other losses than the reference, or got other tokens: nothing is compared.
        UserError: the reference or the subject cannot be trained, or a setting is wrong.
    """
    if rounds < 1 or gate < 0 or subject not in runs:
        raise UserError(f"rounds={rounds}, gate={gate}, subject={subject!r}: give rounds >= 1, gate >= 0 and a side")
    results: dict[str, list[SideResult]] = {name: [] for name in runs}
    failed: dict[str, str] = {}
    order: list[str] = []
    reference, complete = next(iter(runs)), True
    bar = tqdm(total=rounds * len(runs), unit="run", disable=None if progress else True, dynamic_ncols=True)
    with bar:
        try:
            for number in range(rounds):
                for name in turn_order(list(runs), number):
                    bar.set_description(f"{name}, round {number + 1} of {rounds}")
                    if name not in failed:
                        _run(runs[name], name, results, failed, {reference, subject})
                        order += [name] if name not in failed else []
                        _check(name, results, failed, reference, subject, gate)
                    bar.update()
        except KeyboardInterrupt:
            complete = False
    good = {name: done for name, done in results.items() if done and name not in failed}
    if not good and not complete:
        raise KeyboardInterrupt
    if not good:
        raise UserError("no side could be measured: " + "; ".join(f"{name}: {why}" for name, why in failed.items()))
    sides: dict[str, Any] = {name: side_figures(done) for name, done in good.items()}
    return {
        "subject": subject,
        "sides": {**sides, **{name: {"failed": reason} for name, reason in failed.items()}},
        "ratios": {name: _ratio(good[name], good[subject]) for name in good if name != subject and subject in good},
        "gate": gate_of(good, gate),
        "loss_difference": _largest_difference(good, gate),
        "order": order,
        "complete": complete,
    }


def _run(
    run: Callable[[], SideResult], name: str, results: dict[str, list[SideResult]], failed: dict[str, str],
    needed: set[str],
) -> None:  # fmt: skip
    try:
        results[name].append(run())
        return
    except UserError:
        raise
    except FAILURES as error:
        failed[name] = describe_failure(error)
        if name in needed and not isinstance(error, torch.OutOfMemoryError):
            raise UserError(f"{name} cannot be trained: {failed[name]}") from error
    free_memory("cuda" if torch.cuda.is_available() else "cpu")  # after the handler, which holds the tensors


def _check(
    name: str, results: Mapping[str, list[SideResult]], failed: dict[str, str], reference: str, subject: str, gate: int
) -> None:
    """Compare the losses of the newest result with the reference's first one; another side than the subject drops."""
    if not gate or name in failed or not results[reference]:
        return
    first, own = results[reference][0], results[name][-1]
    pairs = ((reference, first), (name, own))
    try:
        steps = {side: list(zip(found.digests, found.compared, strict=False))[:gate] for side, found in pairs}
        check_losses(steps, first.dtype, first.compares)
    except LossParityError as error:
        if name in (subject, reference):
            raise
        failed[name] = str(error)


def side_figures(results: Sequence[SideResult]) -> dict[str, Any]:
    """Return the figures of one side over its rounds: quartiles of steps, most memory; the rest of the first round."""
    rates = [result.tokens / sum(result.seconds) for result in results if result.tokens]
    figures = asdict(results[0]) | {
        "seconds": quartiles(_steps(results)),
        "tokens_per_second": median(rates) if rates else None,
    }
    for name in ("peak_gib", "reserved_gib"):
        figures[name] = max(getattr(result, name) or 0.0 for result in results) or None
    del figures["digests"]
    return figures


def gate_of(good: Mapping[str, Sequence[SideResult]], gate: int) -> dict[str, Any] | None:
    """Return what was compared before the times; None if nothing was."""
    if not gate or len(good) < 2:
        return None
    first = next(iter(good.values()))[0]
    return {
        "figure": first.compares,
        "dtype": first.dtype,
        "tolerance": tolerance(getattr(torch, first.dtype), first.compares),
        "steps": [{name: done[0].compared[step] for name, done in good.items()} for step in range(gate)],
        "dropout": "off in these steps" if first.dropout else "none",
    }


def _steps(results: Sequence[SideResult]) -> list[float]:
    return [step for result in results for step in result.seconds]


def _ratio(others: Sequence[SideResult], ours: Sequence[SideResult]) -> dict[str, Any]:
    by_round = [median(a.seconds) / median(b.seconds) for a, b in zip(others, ours, strict=False)]
    return {"median": median(_steps(others)) / median(_steps(ours)), "rounds": by_round}


def _largest_difference(good: Mapping[str, Sequence[SideResult]], gate: int) -> float:
    """Return the largest relative difference of any side's figures from the first one's, in steps after the gate."""
    first, *others = [results[0].compared[gate:] for results in good.values()]
    pairs = [pair for other in others for pair in zip(other, first, strict=False)]
    return max((abs(own - expected) / (abs(expected) or 1.0) for own, expected in pairs), default=0.0)
