"""`Watch`: the callback that records the steps of one training, and the `SideResult` that it fills."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from fastpack_trl.bench.gate import LOSS, without_dropout
from fastpack_trl.bench.profiles import profile_figures
from fastpack_trl.errors import UserError
from fastpack_trl.measure.host_syncs import HostSyncs, count_host_syncs
from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.model.facts import text_model
from fastpack_trl.packing.collator import unshared
from fastpack_trl.packing.packed_batch import PackedBatch

WARMUP, TIMED = 4, 8
LONGEST_WARMUP = 48
"""Steps after which the warm-up ends even if features of the run are still undecided."""


@dataclass(slots=True, kw_only=True)
class SideResult:
    """What one training has measured, as plain data: `asdict` writes it, ``SideResult(**values)`` reads it.

    Attributes:
        losses, grad_norms: of every step, from the first; a norm is None if the run does not clip.
        digests: of the tokens of each step in the gate; None if the batches hold no tokens.
        seconds: of each timed step.
        tokens: in all timed steps, without padding, as TRL counts them; None if it does not.
        first_step_seconds, warmup_seconds: from the start of `train()` to the end of the first step and of the warm-up.
        peak_gib, reserved_gib: most device memory that was allocated, and that torch held: the card must have the
            latter. None on the CPU.
        profile: launches, kernels, waits and busy seconds per step under the profiler; empty without one.
        host_syncs: operations in one step for which the host waits for the device; None if they were not counted.
        setting, path: what is trained, and what runs there, for people.
        report: features of a trainer of ours.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float | None] = field(default_factory=list)
    digests: list[int | None] = field(default_factory=list)
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
    dropout: bool = False
    compares: str = LOSS
    setting: str = ""
    path: str = ""
    report: dict[str, Any] | None = None

    @property
    def compared(self) -> list[float]:
        """Return the loss of each step, or the gradient norm in place of a loss that knows little of the model."""
        if self.compares == LOSS:
            return self.losses
        return [loss if norm is None else norm for loss, norm in zip(self.losses, self.grad_norms, strict=True)]


def has_settled(trainer: Any) -> bool:
    """Return whether no feature of a trainer of ours still waits for the steps in which it decides."""
    report = getattr(trainer, "fastpack_report", None)
    return report is None or not any("pending" in line.path for line in report)


class Watch(TrainerCallback):
    """Record the steps of one training, and end it after the timed ones.

    ```python
    watch = Watch(warmup=6, timed=12)
    with watch.attached(trainer):  # its max_steps is that of a long run
        trainer.train()
    watch.result.seconds
    ```

    Args:
        warmup: least number of steps before the timed ones; the attribute ``result.warmup_steps`` has the actual one.
        timed: number of timed steps; the device is synchronized at the end of each.
        gate: first steps of the warm-up in which dropout is off and tokens are hashed, for the comparison of losses.
        settled: given the trainer, returns whether the warm-up may end.
        settling: steps of the warm-up after that: graphs are recorded for rows of other lengths.
        longest_warmup: steps after which the warm-up ends in any case.
        profiled: steps under torch.profiler after the timed ones, on a GPU or if there is a `trace`.
        trace: file for a Chrome trace of them.
        count_syncs: count the host syncs of one more step.
        on_step: called at the end of each step, for a progress bar.
    """

    def __init__(
        self, *, warmup: int = WARMUP, timed: int = TIMED, gate: int = 0,
        settled: Callable[[Any], bool] = has_settled, settling: int = 0, longest_warmup: int = LONGEST_WARMUP,
        profiled: int = 0, trace: str | Path | None = None, count_syncs: bool = False,
        on_step: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        if timed < 1 or warmup < 0 or not 0 <= gate <= warmup:
            raise UserError(
                f"warmup={warmup}, timed={timed}, gate={gate}: give timed >= 1, and warmup >= gate >= 0 (the gate's "
                "steps are the first of the warm-up)"
            )
        self.result = SideResult()
        self._warmup, self.timed, self._gate = warmup, timed, gate
        self._settled, self._settling, self._longest = settled, settling, max(longest_warmup, warmup)
        self._profiled = profiled if torch.cuda.is_available() or trace else 0
        self._trace, self._count_syncs, self._on_step = trace, count_syncs, on_step
        self._settled_at: int | None = None
        self._loss: float | Tensor = 0.0
        self._norm: Any = None
        self._digest: Tensor | None = None
        self._begin = self._mark = 0.0
        self._tokens = 0
        self._steps = 0
        self._is_warm = False
        self._syncs: HostSyncs | None = None
        self._first_steps = ExitStack()  # what holds in the steps of the gate only
        self._extra = ExitStack()  # a profiler, or the counter of host syncs

    @contextlib.contextmanager
    def attached(self, trainer: Any) -> Iterator[None]:
        """Watch `trainer` inside; restore it on exit."""
        training_step, accelerator = trainer.training_step, trainer.accelerator
        clip = accelerator.clip_grad_norm_

        def watched_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
            if self._steps < self._gate and (found := digest_of(inputs, pad)) is not None:
                self._digest = found if self._digest is None else self._digest + found
            loss: Tensor = training_step(model, inputs, *args, **kwargs)
            self._loss = self._loss + loss.detach()  # not kept as it is: a captured step writes to the same tensor
            return loss

        def watched_clip(*args: Any, **kwargs: Any) -> Any:
            self._norm = clip(*args, **kwargs)
            return self._norm

        self.trainer, args = trainer, trainer.args
        pad = getattr(trainer.processing_class, "pad_token_id", None)
        weights = str(text_model(trainer.model).dtype).removeprefix("torch.")
        self.result.dtype = "bfloat16" if args.bf16 else "float16" if args.fp16 else weights
        self.result.device = torch.device(args.device).type
        trainer.add_callback(self)
        with (
            patch_attribute(trainer, "training_step", watched_step),
            patch_attribute(accelerator, "clip_grad_norm_", watched_clip),
            self._first_steps,
            self._extra,
        ):
            if self._gate:
                self.result.dropout = self._first_steps.enter_context(without_dropout([trainer.model]))
            self._synchronize()
            if self.result.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            self._begin = self._mark = time.perf_counter()
            try:
                yield
            finally:
                trainer.remove_callback(self)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the step; end the warm-up, the timed steps, or the training."""
        if self._syncs is not None:
            self._extra.close()  # what is read below is not the step's
            self.result.host_syncs = self._syncs.total
        self._synchronize()
        now, result = time.perf_counter(), self.result
        self._steps += 1
        result.losses.append(float(self._loss))
        result.grad_norms.append(None if self._norm is None else float(self._norm))
        if self._steps <= self._gate:
            result.digests.append(None if self._digest is None else int(self._digest))
        if self._steps == self._gate:
            self._first_steps.close()
        self._loss, self._norm, self._digest = 0.0, None, None
        if self._steps == 1:
            result.first_step_seconds = now - self._begin
        if not self._is_warm:
            self._leave_warmup(now)
        elif len(result.seconds) < self.timed:
            result.seconds.append(now - self._mark)
            if len(result.seconds) == self.timed:
                self._end_timed()
        if self._is_warm and len(result.seconds) == self.timed:
            self._run_extras(control)
        self._on_step()
        self._mark = time.perf_counter()

    def _leave_warmup(self, now: float) -> None:
        if self._settled_at is None and self._settled(self.trainer):
            self._settled_at = self._steps
        settled = self._settled_at is not None and self._steps >= self._settled_at + self._settling
        if self._steps >= self._warmup and (settled or self._steps >= self._longest):
            self._is_warm = True
            self.result.warmup_steps, self.result.warmup_seconds = self._steps, now - self._begin
            self._tokens = self._count_tokens()

    def _end_timed(self) -> None:
        result = self.result
        result.tokens = (self._count_tokens() - self._tokens) or None
        if result.device == "cuda":
            result.peak_gib = torch.cuda.max_memory_allocated() / 2**30
            result.reserved_gib = torch.cuda.max_memory_reserved() / 2**30
        report = getattr(self.trainer, "fastpack_report", None)
        if report is not None:
            result.report = report.to_dict()
            result.path = ", ".join(f"{line.feature} {line.path}" for line in report if line.status == "on")

    def _run_extras(self, control: Any) -> None:
        """Begin or end what comes after the timed steps, then the training; called at the end of each of them."""
        done = self._steps - self.result.warmup_steps - self.timed
        if done == 0 and self._profiled:
            profiler = torch.profiler.profile(activities=list(torch.profiler.supported_activities()))
            self._extra.enter_context(profiler)
            self._extra.callback(self._synchronize)
            self._profiler = profiler
        if done == self._profiled:
            self._extra.close()
            if self._profiled:
                self.result.profile = profile_figures(self._profiler.events() or (), self._profiled)
                if self._trace is not None:
                    self._profiler.export_chrome_trace(str(self._trace))
            if self._count_syncs:
                control.should_log = False  # of this step: a log reads the device
                self._syncs = self._extra.enter_context(count_host_syncs(device=self.result.device))
        if done == self._profiled + self._count_syncs:
            control.should_training_stop = True

    def _count_tokens(self) -> int:
        return int(getattr(self.trainer, "_total_train_tokens", 0) or self.trainer.state.num_input_tokens_seen)

    def _synchronize(self) -> None:
        if self.result.device == "cuda":
            torch.cuda.synchronize()


def digest_of(inputs: Any, pad_token_id: int | None) -> Tensor | None:
    """Return a hash of the tokens of a batch, on its device; None for a batch without tokens.

    Their order, padding and shared prefixes make no difference: a packed row and padded examples have the same.
    """
    if not isinstance(inputs, Mapping) or not isinstance(inputs.get("input_ids"), Tensor):
        return None
    inputs = unshared(inputs)
    ids, mask, batch = inputs["input_ids"], inputs.get("attention_mask"), inputs.get("packed_batch")
    if isinstance(batch, PackedBatch):
        ids = ids.flatten()[: batch.total_tokens - batch.num_padding]
    elif isinstance(mask, Tensor) and mask.shape == ids.shape:
        ids = torch.where(mask.bool(), ids, -1)
    if pad_token_id is not None:
        ids = torch.where(ids == pad_token_id, -1, ids)
    return ((ids.long() + 1) ** 2).sum()
