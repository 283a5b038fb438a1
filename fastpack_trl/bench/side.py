"""One side of a comparison of trainers: built, advanced step by step, and what it leaves as plain figures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from fastpack_trl.bench.baselines import SideRecipe
from fastpack_trl.bench.parity import GRADIENT_NORM
from fastpack_trl.bench.profiles import step_profile
from fastpack_trl.bench.step_watch import StepFigures, StepWatch
from fastpack_trl.bench.turns import Training
from fastpack_trl.errors import UserError
from fastpack_trl.measure.failures import attempt
from fastpack_trl.measure.flops import ModelFlops, model_flops
from fastpack_trl.measure.host_syncs import count_host_syncs
from fastpack_trl.measure.payback import LONG_RUN
from fastpack_trl.measure.timing import WallClock, clock_of
from fastpack_trl.measure.tokens import TokenCounter
from fastpack_trl.model.facts import text_model

DEFAULT_PAIRS, WARMUP, GATE_STEPS = 9, 2, 2
Build = Callable[..., Any]
"""``build(trainer_class, config_class, **changes)`` returns a new trainer; see `compare`."""


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """How much is measured.

    Attributes:
        pairs: timed rounds, one optimizer step of each side; 6 or more give an interval of 95 %.
        warmup: rounds before, not timed.
        gate_steps: rounds before these, in which all sides must have the same loss; 0 for no gate.
        seed: of the random numbers before each side is built, and of its first step.
        profile: folder for a Chrome trace per side; None for none.
        peak_flops: of the device; None: what TRL knows.
        host_clock: time what the host does; it waits for the device between two steps only.
    """

    pairs: int = DEFAULT_PAIRS
    warmup: int = WARMUP
    gate_steps: int = GATE_STEPS
    seed: int = 0
    profile: Path | None = None
    peak_flops: float | None = None
    host_clock: bool = False

    @property
    def untimed(self) -> int:
        return self.gate_steps + self.warmup

    @property
    def rounds(self) -> int:
        return self.untimed + self.pairs

    def checked(self, dropout: bool) -> int:
        """Return the rounds in which losses must agree: the gate's, and the warm-up's if there is no dropout."""
        return 0 if not self.gate_steps else self.gate_steps if dropout else self.untimed

    def check(self) -> None:
        """Raise `UserError` if there is nothing to measure."""
        if self.pairs < 1 or self.warmup < 0 or self.gate_steps < 0:
            raise UserError(
                f"pairs={self.pairs}, warmup={self.warmup}, gate_steps={self.gate_steps}: "
                "time at least one pair, after 0 or more rounds of each"
            )

    @property
    def changes(self) -> dict[str, Any]:
        """Return the fields that a measurement needs: enough steps, nothing written, nothing reported."""
        return {
            # Two further ones: one under the profiler, one in which syncs are counted. None is the last of a run.
            "max_steps": max(LONG_RUN, self.rounds + 2), "report_to": "none", "save_strategy": "no",
            "eval_strategy": "no", "eval_on_start": False, "load_best_model_at_end": False, "push_to_hub": False,
            "disable_tqdm": True,
        }  # fmt: skip


class SideMemory:
    """CUDA memory of one side of several that lie in one process and never run at the same time; nothing on the CPU.

    What others have allocated is taken off: `peak_bytes` is what this side would need alone, fragmentation aside.
    `reserved_bytes` is what a card must have for it: all that torch took of the device, for CUDA graphs and caches too.
    Beside other sides it may use theirs, so that it is exact in a process of its own only.
    """

    def __init__(self) -> None:
        self.own = dict.fromkeys(_HELD, 0)
        self.figures: dict[str, int] | None = None

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is allocated and freed inside as this side's."""
        if not torch.cuda.is_available():
            yield
            return
        torch.cuda.synchronize()
        others = {name: read() - self.own[name] for name, read in _HELD.items()}
        before = self.own["allocated"]
        torch.cuda.reset_peak_memory_stats()
        try:
            yield
        finally:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - others["allocated"]
            reserved = max(peak, torch.cuda.max_memory_reserved() - others["reserved"])
            self.own = {name: read() - others[name] for name, read in _HELD.items()}
            self.figures = {
                "peak_bytes": peak, "reserved_bytes": reserved, "before_bytes": before,
                "pinned_bytes": self.own["pinned"],
            }  # fmt: skip


_HELD: dict[str, Callable[[], int]] = {
    "allocated": lambda: torch.cuda.memory_allocated(),
    "reserved": lambda: torch.cuda.memory_reserved(),
    "pinned": lambda: int(torch.cuda.host_memory_stats().get("allocated_bytes.current") or 0),
}


class Side:
    """A trainer of a `SideRecipe`; `build` is asked for the changes of the plan, and for those of the recipe over them.

    Raises:
        UserError: `build` returned something else than it was asked for.
    """

    def __init__(self, name: str, recipe: SideRecipe, build: Build, plan: RoundPlan) -> None:
        self.name, self.recipe, self.plan = name, recipe, plan
        self.memory = SideMemory()
        self.steps: list[StepFigures] = []
        self.path = ""
        self.extras: dict[str, Any] = {"profile": None, "host_syncs": None, "notes": []}
        asked = {**plan.changes, **recipe.changes}
        set_seed(plan.seed)
        with self.memory.counted():
            self.trainer = build(recipe.trainer_class, recipe.config_class, **asked)
        self._check_built(asked)
        for callback in (PrinterCallback, ProgressCallback):  # one bar for all sides
            self.trainer.remove_callback(callback)
        args = self.trainer.args
        self.device = torch.device(args.device)
        padded = getattr(args, "pad_to_multiple_of", None)
        pad_token_id = getattr(self.trainer.processing_class, "pad_token_id", None) if padded else None
        clock = WallClock() if plan.host_clock else clock_of(self.device.type, self.device)
        self.watch = StepWatch(clock, pad_token_id)
        self.training = Training(self.trainer, self._around)
        self.flops: ModelFlops | None = None
        if args.world_size > 1 or args.n_gpu > 1:
            raise UserError("the comparison runs on one device and in one process: set CUDA_VISIBLE_DEVICES=0")

    def _check_built(self, asked: Mapping[str, Any]) -> None:
        if not isinstance(self.trainer, self.recipe.trainer_class):
            wanted, found = self.recipe.trainer_class.__name__, type(self.trainer).__name__
            raise UserError(f"build returned a {found} for {self.name}: it must return a {wanted}, its first argument")
        for field in ("max_steps", *self.recipe.changes):
            value = getattr(self.trainer.args, field, None)
            if value != asked[field]:
                raise UserError(
                    f"build ignored {field}={asked[field]!r} (its trainer has {value!r}): make the configuration by "
                    "config_class(**(settings | changes))"
                )

    @contextlib.contextmanager
    def _around(self, trainer: Any) -> Iterator[None]:
        with self.recipe.around(trainer) as self.path, self.watch.installed(trainer):
            yield

    def begin(self) -> None:
        """Train up to the first step: what is planned, proven and compiled there is not timed."""
        with self.memory.counted():
            self.training.begin()
        self.training.seed(self.plan.seed)
        self._read_flops()
        self.watch.counter = TokenCounter(self.flops.windows if self.flops is not None else ())

    def _read_flops(self) -> None:
        with contextlib.suppress(ValueError):  # no transformers model: no MFU
            self.flops = model_flops(self.trainer.model)

    def step(self) -> StepFigures:
        """Run one optimizer step, watched."""
        with self.memory.counted():
            self.training.advance(self.watch.around_step())
        self.steps.append(self.watch.settle(self.memory.figures if self.device.type == "cuda" else None))
        if len(self.steps) <= 2:  # in the first step layers may be checkpointed for once
            self._read_flops()
        return self.steps[-1]

    def run_extras(self) -> None:
        """Run untimed steps: one profiled, one with syncs counted. What fails is a note, the times stand."""
        for what, call in (("profile", self._profile), ("host syncs", self._count_syncs)):
            _, failure = attempt(call)
            if failure is not None:
                self.extras["notes"].append(f"{what}: {failure}")
                return  # its training has ended

    def _profile(self) -> None:
        """Run one more step under the profiler; on the CPU only if a trace is asked for."""
        folder = self.plan.profile
        if folder is None and self.device.type != "cuda":
            return
        profiler = torch.profiler.profile(activities=list(torch.profiler.supported_activities()))
        self.training.advance(self.watch.around_step(profiler))
        found = self.extras["profile"] = step_profile(profiler, self.device.type, self.watch.settle().micro_batches)
        if folder is not None:
            found["trace"] = f"{self.name}.json"
            profiler.export_chrome_trace(str(folder / found["trace"]))  # for chrome://tracing, https://ui.perfetto.dev

    def _count_syncs(self) -> None:
        """Count the operations for which the host waits in one more step; the step before is not logged.

        A step lasts from the end of one to the end of the next, so that the log of the one before falls into it. It
        reads what was kept since the log before it, once, however many steps that were.
        """

        @contextlib.contextmanager
        def inside() -> Iterator[None]:
            self.trainer.control.should_log = False
            with count_host_syncs(device=self.device) as self._syncs, self.watch.around_step():
                yield

        self.training.advance(inside())
        micro_batches = max(1, self.watch.settle().micro_batches)
        self.extras["host_syncs"] = {
            "per_micro_step": self._syncs.total / micro_batches,
            "per_step": self._syncs.total,
            "backend": self._syncs.backend,
        }

    def close(self) -> None:
        """End the training."""
        self.training.close()

    def compared(self, step: StepFigures) -> tuple[str, float]:
        """Return what the gate compares of a step: its tokens' digest, and its loss or gradient norm."""
        norm = step.gradient_norm if self.recipe.compares == GRADIENT_NORM else None
        return step.digest, step.loss if norm is None else norm  # without clipping there is none

    @property
    def dtype(self) -> str:
        """Return the dtype in which the run computes, as torch calls it: of the autocast, else of the weights."""
        args = self.trainer.args
        weights = str(text_model(self.trainer.model).dtype).removeprefix("torch.")
        return "bfloat16" if args.bf16 else "float16" if args.fp16 else weights
