"""One side of a comparison of trainers: built, advanced step by step, and what it leaves as plain figures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from fastpack_trl.bench.baselines import SideRecipe
from fastpack_trl.bench.plan import RoundPlan
from fastpack_trl.bench.step_profile import StepProfile
from fastpack_trl.bench.step_watch import StepFigures, StepWatch
from fastpack_trl.bench.turns import Training
from fastpack_trl.errors import UserError
from fastpack_trl.measure.failures import attempt
from fastpack_trl.measure.flops import ModelFlops, model_flops
from fastpack_trl.measure.host_syncs import count_host_syncs
from fastpack_trl.measure.timing import Clock, CudaClock, WallClock
from fastpack_trl.measure.tokens import TokenCounter
from fastpack_trl.model.facts import text_model

Build = Callable[..., Any]
"""``build(trainer_class, config_class, **changes)`` returns a new trainer; see `compare`."""


class SideMemory:
    """CUDA memory of one side of several that lie in one process and never run at the same time; nothing on the CPU.

    What others have allocated is taken off: `peak` is what this side would need alone, fragmentation aside. `reserved`
    is what a card must have for it: all that torch took of the device, for CUDA graphs and caches too. Beside other
    sides it may use theirs, so that it is exact in a process of its own only.
    """

    def __init__(self) -> None:
        self.resident = self.pinned = self._segments = 0
        self.peak: int | None = None
        self.reserved = 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is allocated and freed inside as this side's."""
        if not torch.cuda.is_available():
            yield
            return
        torch.cuda.synchronize()
        others = torch.cuda.memory_allocated() - self.resident
        others_pinned, others_segments = _pinned() - self.pinned, torch.cuda.memory_reserved() - self._segments
        torch.cuda.reset_peak_memory_stats()
        try:
            yield
        finally:
            torch.cuda.synchronize()
            self.peak = torch.cuda.max_memory_allocated() - others
            self.reserved = max(self.peak, torch.cuda.max_memory_reserved() - others_segments)
            self._segments = torch.cuda.memory_reserved() - others_segments
            self.resident = torch.cuda.memory_allocated() - others
            self.pinned = _pinned() - others_pinned


def _pinned() -> int:
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current") or 0)


class Side:
    """A trainer of a `SideRecipe`.

    Args:
        name: of the side.
        plan: what it is.
        build: makes the trainer.
        changes: fields that the comparison needs; the plan's own override them.
        seed: set before it is built.

    Raises:
        UserError: `build` returned something else than it was asked for.
    """

    def __init__(self, name: str, plan: SideRecipe, build: Build, changes: Mapping[str, Any], seed: int) -> None:
        from transformers import set_seed

        self.name, self.plan = name, plan
        self.memory = SideMemory()
        self.steps: list[StepFigures] = []
        self.paths: list[str] = []
        self.extras: dict[str, Any] = {"profile": None, "host_syncs": None, "notes": []}
        self._memory: list[dict[str, int]] = []
        self._marks: list[tuple[float, int]] = []
        asked = {**changes, **plan.changes}
        set_seed(seed)
        with self.memory.counted():
            self.trainer = build(plan.trainer_class, plan.config_class, **asked)
        _check_built(name, plan, self.trainer, asked)
        for callback in (PrinterCallback, ProgressCallback):  # one bar for all sides
            self.trainer.remove_callback(callback)
        self.device = torch.device(self.trainer.args.device)
        self.clock: Clock = CudaClock(self.device) if self.device.type == "cuda" else WallClock()
        self.watch = StepWatch(self.clock)
        self.training = Training(self.trainer, self._around)
        self.flops: ModelFlops | None = None
        self._counter = TokenCounter(())
        args, multiple = self.trainer.args, getattr(self.trainer.args, "pad_to_multiple_of", None)
        self._pad = getattr(self.trainer.processing_class, "pad_token_id", None) if multiple else None
        if args.world_size > 1 or args.n_gpu > 1:
            raise UserError("the comparison runs on one device and in one process: set CUDA_VISIBLE_DEVICES=0")

    @contextlib.contextmanager
    def _around(self, trainer: Any) -> Iterator[None]:
        with self.plan.around(trainer) as path, self.watch.installed(trainer):
            self.paths = [path]
            yield

    def begin(self, seed: int) -> None:
        """Train up to the first step: what is planned, proven and compiled there is not timed."""
        with self.memory.counted():
            self.training.begin()
        self.training.seed(seed)
        self._read_flops()
        self._counter = TokenCounter(self.flops.windows if self.flops is not None else ())

    def _read_flops(self) -> None:
        with contextlib.suppress(ValueError):  # no transformers model: no MFU
            self.flops = model_flops(self.trainer.model)

    def step(self) -> StepFigures:
        """Run one optimizer step, watched."""
        before = self.memory.resident
        with self.memory.counted():
            self.training.advance(self.watch.around_step())
        figures = self.watch.settle(self._counter, self._pad)
        self.steps.append(figures)
        if len(self.steps) <= 2:  # in the first step layers may be checkpointed for once
            self._read_flops()
        if self.memory.peak is not None and self.device.type == "cuda":
            peaks = {"peak_bytes": self.memory.peak, "reserved_bytes": self.memory.reserved}
            self._memory.append({**peaks, "before_bytes": before, "pinned_bytes": self.memory.pinned})
            others = torch.cuda.memory_allocated() - self.memory.resident
            self._marks = [(at, allocated - others) for at, allocated in figures.memory]
        return figures

    def extras_of(self, plan: RoundPlan) -> None:
        """Run untimed steps: one profiled, one with syncs counted. What fails is a note, the times stand."""
        trace = None if plan.profile is None else plan.profile / f"{self.name}.json"
        for what, call in (("profile", partial(self.profile, trace)), ("host syncs", self.count_syncs)):
            _, failure = attempt(call)
            if failure is not None:
                self.extras["notes"].append(f"{what}: {failure}")
                return  # its training has ended

    def profile(self, trace: Path | None) -> None:
        """Run one more step under the profiler; on the CPU only if a trace is asked for."""
        if trace is None and self.device.type != "cuda":
            return
        profiler = StepProfile(self.watch, self.device.type)
        self.training.advance(profiler.around())
        figures = self.watch.settle(self._counter, self._pad)
        self.extras["profile"] = profiler.figures(figures.micro_batches)
        if trace is not None:
            profiler.write_trace(trace)
            self.extras["profile"]["trace"] = trace.name

    def count_syncs(self) -> None:
        """Count the operations for which the host waits in one more step; the step before is not logged.

        A step lasts from the end of one to the end of the next, so that the log of the one before falls into it. It
        reads what was kept since the log before it, once, however many steps that were.
        """
        with contextlib.ExitStack() as stack:

            @contextlib.contextmanager
            def inside() -> Iterator[None]:
                self.trainer.control.should_log = False
                with count_host_syncs(device=self.device) as self._syncs, self.watch.around_step():
                    yield

            self.training.advance(inside())
            stack.callback(self.watch.settle, self._counter, self._pad)
            micro_batches = max(1, len(self.watch.step.batches))
        self.extras["host_syncs"] = {
            "per_micro_step": self._syncs.total / micro_batches,
            "per_step": self._syncs.total,
            "backend": self._syncs.backend,
        }

    def close(self) -> None:
        """End the training and let go of the trainer's model."""
        self.training.close()

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype in which the run computes: of the autocast, else of the weights."""
        args = self.trainer.args
        if args.bf16 or args.fp16:
            return torch.bfloat16 if args.bf16 else torch.float16
        dtype: torch.dtype = text_model(self.trainer.model).dtype
        return dtype

    def result(self) -> dict[str, Any]:
        """Return everything that was measured, as plain data: what `compare` makes a row of."""
        report = self.trainer.fastpack_report if self.plan.report else None
        path = ", ".join(self.paths)
        if report is not None:
            path = ", ".join(f"{line.feature} {line.path}" for line in report if line.status == "on") or "all off"
        return {
            "path": path,
            "report": None if report is None else report.to_dict(),
            "checkpointing": _checkpointing(self.trainer, report),
            "steps": [step.to_dict() for step in self.steps],
            "memory": self._memory,
            "memory_marks": [list(mark) for mark in self._marks],
            **self.extras,
        }


def _check_built(name: str, plan: SideRecipe, trainer: Any, asked: Mapping[str, Any]) -> None:
    if not isinstance(trainer, plan.trainer_class):
        wanted, found = plan.trainer_class.__name__, type(trainer).__name__
        raise UserError(f"build returned a {found} for {name}: it must return a {wanted}, its first argument")
    for field in ("max_steps", *plan.changes):
        value = getattr(trainer.args, field, None)
        if value != asked[field]:
            raise UserError(
                f"build ignored {field}={asked[field]!r} (its trainer has {value!r}): make the configuration by "
                "config_class(**(settings | changes))"
            )


def _checkpointing(trainer: Any, report: Any) -> str:
    """Return what is recomputed: ``every layer``, ``none``, or the plan."""
    args = trainer.args
    if report is not None and "activation_memory" in report and report["activation_memory"].status == "on":
        return f"planned: {report['activation_memory'].path}"
    text = "every layer" if args.gradient_checkpointing else "none"
    return f"{text}, activations offloaded" if getattr(args, "activation_offloading", False) else text
