"""One measured training: ``run_side(make_trainer, Watch(warmup=6, timed=12))`` returns a `SideResult`."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType
from transformers import TrainerCallback, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from fastpack_trl.errors import UserError
from fastpack_trl.measure.device_memory import free_memory
from fastpack_trl.measure.host_syncs import count_host_syncs
from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.model.facts import text_model

WARMUP, TIMED = 4, 8
SETTLING = 10
"""Steps of the warm-up on CUDA after features are decided: graphs are weighed, and recorded for rows of each length."""
LONGEST_WARMUP = 48
"""Steps after which the warm-up ends even if features of the run are still undecided."""
LOSS, GRADIENT_NORM = "loss", "gradient norm"
"""The figure that is compared; the second if the loss says little about the model."""
_DROPOUT_FIELDS = ("attention_dropout", "attn_dropout")
_LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphL")


@dataclass(slots=True, kw_only=True)
class SideResult:
    """The figures of one training, as plain data: `asdict` writes them, ``SideResult(**values)`` reads them.

    Attributes:
        losses, grad_norms: of every step, from the first; a norm is None if the run does not clip.
        seconds: of each timed step, without its log.
        tokens: in all timed steps, without padding, as TRL logs them; None if it does not.
        first_step_seconds, warmup_seconds: from the start of `train()` to the end of the first step and of the warm-up.
        peak_gib, reserved_gib: peak device memory that was allocated, and that torch held: the card must have the
            latter. None on the CPU.
        profile: median launches and busy seconds of steps under the profiler (a new bucket makes many launches).
        host_syncs: operations in one step for which the host waits for the device; None if they were not counted.
        compares: the figure that the gate compares, `LOSS` or `GRADIENT_NORM`.
        setting, path: the model and data, and the implementations that ran, for people.
        report: features of a trainer of ours.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float | None] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens: int | None = None
    warmup_steps: int = 0
    first_step_seconds: float = 0.0
    warmup_seconds: float = 0.0
    peak_gib: float | None = None
    reserved_gib: float | None = None
    profile: dict[str, float] = field(default_factory=dict)
    host_syncs: int | None = None
    device: str = "cpu"
    dtype: str = "float32"
    compares: str = LOSS
    setting: str = ""
    path: str = ""
    report: dict[str, Any] | None = None

    @property
    def compared(self) -> list[float]:
        """Return the loss of each step, or the gradient norm if the loss says little about the model."""
        if self.compares == LOSS:
            return self.losses
        return [loss if norm is None else norm for loss, norm in zip(self.losses, self.grad_norms, strict=True)]


@dataclass(kw_only=True, eq=False)
class Watch(TrainerCallback):
    """Record the steps of one training from its log, and stop it after the timed ones."""

    warmup: int = WARMUP
    """Minimum number of steps before the timed ones."""
    timed: int = TIMED
    """Number of timed steps; the device is synchronized at the end of each."""
    gate: int = 0
    """First steps of the warm-up, with dropout off, whose losses are compared."""
    settling: int = 0
    """Steps of the warm-up after the features of a trainer of ours are decided."""
    longest_warmup: int = LONGEST_WARMUP
    """Steps after which the warm-up ends in any case."""
    profiled: int = 0
    """Steps under torch.profiler after the timed ones, on a GPU or if there are `kernels`."""
    kernels: str = ""
    """File for the profiler's table of the kernels of the last of them."""
    count_syncs: bool = False
    """Count the host syncs of one more step."""
    result: SideResult = field(init=False, default_factory=SideResult)

    def start(self, trainer: Any) -> Generator[None, Mapping[str, Any]]:
        """Begin to watch a trainer that is about to train; return what to close after it, which restores dropout."""
        args, result = trainer.args, self.result
        weights = str(text_model(trainer.model).dtype).removeprefix("torch.")
        result.dtype = "bfloat16" if args.bf16 else "float16" if args.fp16 else weights
        result.device = torch.device(args.device).type
        trainer.add_callback(self)
        self._synchronize()
        if result.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._start, self._tokens, self._is_logged = time.perf_counter(), 0, True
        self._steps = self._script(trainer)
        next(self._steps)
        return self._steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the time of the step, before its log."""
        self._synchronize()
        self._end = time.perf_counter()
        control.should_log = self._is_logged
        if not self._is_logged:
            self._go_on(control, {})

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Record the step; stop the training after the last one."""
        if self._is_logged and "loss" in logs:
            self._go_on(control, logs)

    def _go_on(self, control: Any, logs: Mapping[str, Any]) -> None:
        try:
            self._steps.send(logs)
        except StopIteration:
            control.should_training_stop = True

    def _script(self, trainer: Any) -> Generator[None, Mapping[str, Any]]:
        """Go through all steps in order: each ``yield`` waits for the log of one, or for its end if it has none."""
        result, unsettled = self.result, self.settling + 1
        with ExitStack() as gate:
            if self.gate:
                gate.enter_context(without_dropout(trainer.model))
            while (done := len(result.losses)) < self.warmup or (unsettled > 0 and done < self.longest_warmup):
                yield from self._step()
                if len(result.losses) == self.gate:
                    gate.close()
                # Features of a trainer of ours may still wait for their first steps.
                unsettled -= not hasattr(trainer, "fastpack_run") or trainer.fastpack_run.is_warmed_up
        result.warmup_steps, result.warmup_seconds = len(result.losses), self._end - self._start
        tokens = self._tokens
        for _ in range(self.timed):
            result.seconds.append((yield from self._step()))
        result.tokens = (self._tokens - tokens) or None
        if result.device == "cuda":
            result.peak_gib = torch.cuda.max_memory_allocated() / 2**30
            result.reserved_gib = torch.cuda.max_memory_reserved() / 2**30
        report = getattr(trainer, "fastpack_report", None)
        if report is not None:
            result.report = report.to_dict()
            result.path = ", ".join(f"{line.feature} {line.path}" for line in report if line.status == "on")
        self._is_logged = False  # a log reads the device, and launches kernels
        if self.profiled and (result.device == "cuda" or self.kernels):
            figures: list[dict[str, float]] = []
            for _ in range(self.profiled):
                with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profiler:
                    yield
                figures.append(profile_figures(profiler.events() or ()))
            result.profile = {name: median(each[name] for each in figures) for name in figures[0]}
            if self.kernels:
                order = f"self_{'cuda' if result.device == 'cuda' else 'cpu'}_time_total"
                table = profiler.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=90)
                Path(self.kernels).write_text(table, encoding="utf-8")
        if self.count_syncs:
            with count_host_syncs(device=result.device) as syncs:
                yield
            result.host_syncs = syncs.total

    def _step(self) -> Generator[None, Mapping[str, Any], float]:
        """Wait for the log of a step, record it, and return its seconds."""
        begin, result = time.perf_counter(), self.result
        logs = yield
        loss, norm = float(logs["loss"]), logs.get("grad_norm")
        # `logging_nan_inf_filter` logs another loss in place of NaN; in fp16 the scaler skips such a step.
        is_lost = norm is not None and math.isnan(norm) and result.dtype != "float16"
        result.losses.append(math.nan if is_lost else loss)
        result.grad_norms.append(norm)
        self._tokens = int(logs.get("num_tokens", self._tokens))  # GRPO logs it only with new completions
        if len(result.losses) == 1:
            result.first_step_seconds = self._end - self._start
        return self._end - begin

    def _synchronize(self) -> None:
        if self.result.device == "cuda":
            torch.cuda.synchronize()


def run_side(
    build: Callable[[], Any], watch: Watch, *, around: Callable[[Any], Any] = contextlib.nullcontext, seed: int = 0
) -> SideResult:
    """Build a trainer, train it to the end of `watch`, free it, and return the figures.

    `around` is a context of the training, given the trainer; a text that it yields is the ``path`` of the result.
    """
    result = watch.result
    try:
        set_seed(seed)
        trainer = build()
        for callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(callback)
        free_memory()
        with around(trainer) as path, contextlib.closing(watch.start(trainer)):
            result.path = path if isinstance(path, str) else ""
            set_seed(seed)
            trainer.train()
        if len(result.seconds) < watch.timed:
            cause = "a callback or an empty data set stopped it; remove the cause before measuring"
            raise UserError(f"training stopped early, after {len(result.losses)} steps: {cause}")
        return result
    finally:
        trainer = None
        free_memory()


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Disable dropout inside: sides draw different random numbers, so their losses would differ."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            for name in ("p",) if isinstance(module, nn.modules.dropout._DropoutNd) else _DROPOUT_FIELDS:
                value = getattr(module, name, None)
                if isinstance(value, float) and value > 0:
                    stack.enter_context(patch_attribute(module, name, 0.0))
        yield


def profile_figures(events: Iterable[Any]) -> dict[str, float]:
    """Return launches, busy seconds of the device, and exposed ones of these: it only exchanges with other devices."""
    launches, spans, own = 0, list[tuple[float, float]](), list[tuple[float, float]]()
    for event in events:
        if event.device_type == DeviceType.CPU:
            launches += event.name.startswith(_LAUNCHES)
        elif event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            spans.append((event.time_range.start, event.time_range.end))
            own += [] if event.name.startswith("nccl") else spans[-1:]
    busy = covered(spans)
    return {"launches": launches, "busy_seconds": busy / 1e6, "exposed_seconds": (busy - covered(own)) / 1e6}


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals: ``(0, 2), (1, 3), (5, 6)`` -> 4. Streams overlap."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
