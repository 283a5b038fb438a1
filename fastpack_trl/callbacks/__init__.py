"""Callbacks for `FastSFTTrainer` and for the stock `SFTTrainer`."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from fastpack_trl.measure.flops import ModelFlops, model_flops
from fastpack_trl.measure.tokens import TokenCounter, TokenSums
from fastpack_trl.model.changes import callers
from fastpack_trl.model.facts import text_model
from fastpack_trl.model.upstream import NEEDS, CallbackHandler, missing_reason, resolve
from fastpack_trl.packing.dataset import DatasetFacts
from fastpack_trl.run import Run

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Totals:
    """Sums over a window or a session; times in seconds."""

    tokens: TokenSums = field(default_factory=TokenSums)
    seconds: float = 0.0
    data_wait: float = 0.0
    steps: int = 0

    def add(self, other: _Totals) -> None:
        self.tokens.add(other.tokens)
        self.seconds += other.seconds
        self.data_wait += other.data_wait
        self.steps += other.steps


class ThroughputCallback(TrainerCallback):
    """Throughput, utilisation and memory in the training log, for `FastSFTTrainer` and the stock `SFTTrainer`.

    ``SFTTrainer(..., callbacks=[ThroughputCallback()])``. The figures are added to the trainer's own log call, so that
    every `report_to` target and ``trainer.state.log_history`` get them; no key or value of stock changes. Each
    covers the steps since the last log; with ``session/`` before its name, the steps of this call of `train`, a
    resumed one from where it resumed. The last log of a run (`train_runtime`) has the session's.

    All figures are of *this* device: of the process that logs, divided by its devices under `DataParallel`.

    - ``tokens/capacity_per_s``: positions handed to the model, padding included, per second.
    - ``tokens/nonpad_per_s``: of these, tokens of documents (see `TokenSums.nonpad` for what stock does not tell).
    - ``tokens/loss_per_s``: of these, tokens that the loss counts. Left out where the model gets no labels.
    - ``mfu``: per cent of the device's peak, as TRL's own: operations that the mathematics needs for the tokens of the
      documents (`StepFlops.model`), without padding, recompute and logits of tokens that the loss does not count.
      `ModelFlops` says what is not exact.
    - ``hfu``: per cent, with padding, the recompute of checkpointed layers and of the chunked loss
      (`StepFlops.hardware`); attention is counted within documents, whatever the kernel computes.
    - ``step_time_ms``: per optimizer step, `data_wait_ms` included.
    - ``data_wait_ms``: per optimizer step, from the end of a step to the begin of the next: what stock fetches and
      copies for it.
    - ``memory/peak_gib``: peak of memory allocated on the device since the process started or its statistics were
      reset. ``memory/reserved_gib``: peak of what torch held of it, CUDA graphs and caches included: what a card must
      have. ``memory/pinned_gib``: page-locked host memory held by torch now. CUDA only.
    - ``packing/fill``: share of rows x `max_length` that holds tokens; ``packing/truncated_tokens``: tokens that
      `max_length` cut off. Both of the whole training set, known with `FastSFTTrainer` where it prepared the set.

    Time in evaluation, prediction and saving is not counted. The session starts with its first step, after
    the workers of the loader and the batches that a resumed run skips. Nothing is read from the device between two
    logs: token counts come from shapes and from the batch's `PackedBatch`, else from sums that stay on the device
    until the trainer has read its loss. A CUDA device may still work on the last step when an evaluation or a save
    starts: what is left of it is then not counted.

    Args:
        peak_flops: operations per second of one device at the run's precision, for `mfu` and `hfu`; default:
            `trl.trainer.utils.get_peak_flops`. Where it knows none (a CPU, fp32), both are left out, which is said
            once.

    Raises:
        ValueError: `peak_flops` is not positive.
    """

    def __init__(self, peak_flops: float | None = None) -> None:
        if peak_flops is not None and not peak_flops > 0:
            raise ValueError(f"peak_flops={peak_flops} is not positive: give FLOP/s of one device, e.g. 989e12")
        self.peak_flops = peak_flops
        self._said: set[str] = set()
        self._handler: CallbackHandler | None = None
        self._place: int | None = None
        self._hook: Any = None
        self._counter: TokenCounter | None = None
        self._started = False
        self._mark: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Read the model's shapes; start a session."""
        self._restore()  # what an exception in an earlier run left behind
        self._handler, facts = self._find_trainer()
        if self._handler is None:
            self._say(state, "ThroughputCallback: no callback handler calls it; reporters before it miss its figures")
        self._facts = facts
        self._device = args.device
        self._devices = max(1, args.n_gpu)
        self._flops = self._read_flops(model, state)
        self._peak = self._find_peak(args, model, state) if self._flops is not None else None
        self._counter = TokenCounter(self._flops.windows if self._flops is not None else ())
        if args.torch_compile:
            # The compiled graph of the whole model would have the hook of one batch baked in.
            self._counter = None
            self._say(state, "tokens/*, mfu, hfu: left out (torch_compile=True hides the batches from hooks)")
        self._session, self._window = _Totals(), _Totals()
        self._mark = None
        self._started = True
        self._looks = 2

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Take the time: the batches of the step are there."""
        if not self._started:  # added while training runs
            self.on_train_begin(args, state, control, model)
        self._restore()
        now = time.perf_counter()
        if self._mark is not None:
            self._window.data_wait += now - self._mark
            self._window.seconds += now - self._mark
        self._mark = now
        self._watch(model)

    def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Look at the next micro-batch of the same step."""
        if self._mark is not None:
            self._watch(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Count the step; it may be logged next."""
        if self._mark is None:
            return  # added in the middle of this step
        self._count_time()
        if self._looks and self._flops is not None:  # which layers recompute is settled after two steps
            self._looks -= 1
            self._flops = self._read_flops(model, state)
            self._skip_time()
        self._window.steps += 1
        self._go_first()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add the figures to a log of training; others pass."""
        last = logs is not None and "train_runtime" in logs
        if logs is None or self._mark is None or not (last or "loss" in logs):
            return
        # The trainer has just read its loss: the device is done with these steps.
        if not last:
            self._count_time()
        if self._counter is not None:
            self._window.tokens = self._counter.take()
            if self._window.tokens.loss is None:
                self._say(state, "tokens/loss_per_s: left out (the model is called without labels)")
        window, self._window = self._window, _Totals()
        self._session.add(window)
        figures = {} if last else self._figures(window) | self._state_figures()
        figures |= {f"session/{name}": value for name, value in self._figures(self._session).items()}
        figures = {name: value for name, value in figures.items() if name not in logs}
        logs.update(figures)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(figures)  # written before callbacks are called

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave out the time since the last step: it was not training."""
        self._skip_time()

    on_predict = on_save = on_evaluate

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the trainer as it was."""
        self._restore()
        self._handler = self._counter = self._mark = None
        self._started = False

    def _count_time(self) -> None:
        now = time.perf_counter()
        assert self._mark is not None, "a step ended that never began"
        self._window.seconds += now - self._mark
        self._mark = now

    def _skip_time(self) -> None:
        if self._mark is not None:
            self._mark = time.perf_counter()

    def _watch(self, model: nn.Module) -> None:
        """Look at the next batch, by a hook for one forward: none is left in evaluation or after an exception."""
        self._unwatch()
        counter = self._counter
        if counter is None:
            return

        def count(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if getattr(kwargs.get("packed_batch"), "is_static", False):
                return  # the row that was copied into it is shown next (`capture.graphs`)
            if self._devices == 1:  # `DataParallel` copies the hook into a replica per device
                self._unwatch()
            with torch.no_grad():
                counter.count({**kwargs, "input_ids": args[0]} if args else kwargs)

        count.sees_plain_rows = True  # type: ignore[attr-defined]  # called for each row of a captured step
        self._hook = model.register_forward_pre_hook(count, with_kwargs=True)

    def _unwatch(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _go_first(self) -> None:
        """Stand before the reporters while a log may come: they are callbacks too, and stand before the user's."""
        if self._handler is not None and self._place is None and self in self._handler.callbacks:
            self._place = self._handler.callbacks.index(self)
            self._move_to(0)

    def _move_to(self, place: int) -> None:
        assert self._handler is not None
        others = [other for other in self._handler.callbacks if other is not self]
        # A new list: the handler walks the old one right now.
        self._handler.callbacks = [*others[:place], self, *others[place:]]

    def _restore(self) -> None:
        self._unwatch()
        place, self._place = self._place, None
        if self._handler is not None and place is not None and self in self._handler.callbacks:
            self._move_to(place)

    def _find_trainer(self) -> tuple[CallbackHandler | None, DatasetFacts | None]:
        """Find the handler that calls this callback, and the facts that `FastSFTTrainer` has of its data."""
        owners = list(callers())
        handlers = (owner for owner in owners if isinstance(owner, CallbackHandler) and self in owner.callbacks)
        trainer = next((owner for owner in owners if isinstance(owner, Trainer)), None)
        run = None if trainer is None else vars(trainer).get("fastpack_run")
        return next(handlers, None), run.facts if isinstance(run, Run) else None

    def _read_flops(self, model: nn.Module, state: Any) -> ModelFlops | None:
        try:
            flops = model_flops(model)
        except ValueError as error:
            self._say(state, f"mfu, hfu: left out ({error})")
            return None
        for name in flops.inexact:
            self._say(state, f"mfu, hfu: not exact ({name})")
        return flops

    def _find_peak(self, args: Any, model: nn.Module, state: Any) -> float | None:
        if self.peak_flops is not None:
            return self.peak_flops
        dtype = "bfloat16" if args.bf16 else "float16" if args.fp16 else str(text_model(model).dtype)[len("torch.") :]
        kind = self._device.type
        name = torch.cuda.get_device_name(self._device) if kind == "cuda" else kind
        missing = missing_reason("mfu")
        peak: float | None = None if missing else resolve(*NEEDS["mfu"])(name, dtype)
        if peak is None:
            why = missing or f"no peak is known for {name} in {dtype}"
            self._say(state, f"mfu, hfu: left out ({why}; ThroughputCallback(peak_flops=...) sets it)")
        return peak

    def _say(self, state: Any, message: str) -> None:
        if message not in self._said and state.is_world_process_zero:
            logger.warning(message)
        self._said.add(message)

    def _figures(self, totals: _Totals) -> dict[str, float]:
        if not totals.steps or not totals.seconds:
            return {}
        tokens, seconds = totals.tokens, totals.seconds
        figures = {
            "step_time_ms": 1e3 * seconds / totals.steps,
            "data_wait_ms": 1e3 * totals.data_wait / totals.steps,
        }
        if self._counter is None:
            return figures
        for name in ("capacity", "nonpad", "loss"):
            if (count := getattr(tokens, name)) is not None:
                figures[f"tokens/{name}_per_s"] = count / seconds / self._devices
        if self._flops is None or self._peak is None:
            return figures
        # A position without a loss needs no logits: both trainers have the same figure for the same data.
        # What several documents share is needed once.
        positions = tokens.scored if tokens.loss is None else min(tokens.loss, tokens.scored)
        needed = self._flops.count(tokens.nonpad - tokens.spared, tokens.pairs, positions)
        twice = tokens.scored - tokens.scored_once
        done = self._flops.count(tokens.capacity, tokens.pairs, tokens.scored, twice=twice)
        share = 100 / (seconds * self._peak * self._devices)
        return figures | {"mfu": needed.model * share, "hfu": done.hardware * share}

    def _state_figures(self) -> dict[str, float]:
        figures: dict[str, float | None] = {}
        if self._device.type == "cuda":
            pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current")
            figures["memory/peak_gib"] = torch.cuda.max_memory_allocated(self._device) / 2**30
            figures["memory/reserved_gib"] = torch.cuda.max_memory_reserved(self._device) / 2**30
            figures["memory/pinned_gib"] = None if pinned is None else pinned / 2**30
        if self._facts is not None:
            figures["packing/truncated_tokens"] = self._facts.truncated_tokens
            figures["packing/fill"] = self._facts.fill
        return {name: value for name, value in figures.items() if value is not None}
