"""Callbacks for the trainers of this package and for TRL's own."""

from __future__ import annotations

import logging
import time
from itertools import islice
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from fastpack_trl.measure.flops import ModelFlops, attention_pairs, model_flops
from fastpack_trl.model.changes import callers
from fastpack_trl.model.facts import text_model
from fastpack_trl.model.upstream import NEEDS, CallbackHandler, missing_reason, resolve
from fastpack_trl.run import Run

logger = logging.getLogger(__name__)
_SAMPLE = 1_000
"""Rows of the data set whose lengths are read for the attention's part of MFU."""


class MeasuredRate(TrainerCallback):
    """Steps, seconds and tokens between the logs of training, without the time of evaluation and saving.

    Nothing is read from the device: a log has the counts already.

    Attributes:
        steps, seconds, tokens: since the log before. Tokens are those of all processes, as TRL's ``num_tokens`` counts
            them; None if it does not, or if the count before is unknown.
    """

    def __init__(self) -> None:
        self.steps, self.seconds = 0, 0.0
        self.tokens: float | None = None
        self._total_tokens = self._total_seconds = 0.0  # excludes the first log, which includes start-up
        self._since: float | None = None
        self._has_trained = False

    @property
    def per_second(self) -> float | None:
        """Return the tokens per second after the first log; None before the second."""
        return self._total_tokens / self._total_seconds if self._total_seconds else None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start counting."""
        self._step, self._is_first = state.global_step, True
        # A resumed or second run may continue its count: the first log shows it.
        self._counted: float | None = None if state.global_step or self._has_trained else 0.0
        self._has_trained = True
        self._since = self._event = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the time, because an evaluation or a save may follow."""
        self._event = time.perf_counter()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Exclude the time since the last step or log, which was not training."""
        now = time.perf_counter()
        if self._since is not None:
            self._since += now - self._event
        self._event = now

    on_predict = on_save = on_evaluate

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Update the counts since the previous training log."""
        if logs is None or "loss" not in logs or self._since is None:
            return
        now = time.perf_counter()  # the trainer has just read its loss: the device is done with these steps
        counted = float(logs["num_tokens"]) if "num_tokens" in logs else None
        self.seconds, self.steps = now - self._since, state.global_step - self._step
        self.tokens = None if counted is None or self._counted is None else counted - self._counted
        if self.tokens is not None and not self._is_first:
            self._total_tokens += self.tokens
            self._total_seconds += self.seconds
        self._step, self._since, self._event, self._counted = state.global_step, now, now, counted
        self._is_first = False

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop counting."""
        self._since = None


class ThroughputCallback(MeasuredRate):
    """Throughput, utilization and memory in the training log, for the trainers of this package and TRL's own.

    ``SFTTrainer(..., callbacks=[ThroughputCallback()])``. The figures are added to the trainer's own log call, so that
    every `report_to` target and ``trainer.state.log_history`` get them; no key or value of TRL changes. Each covers
    the steps since the last log, without evaluation and saving; the first one includes the start-up of the run.

    - ``tokens_per_second``: of all processes, as TRL's ``num_tokens`` counts them.
    - ``step_time_ms``: per optimizer step.
    - ``mfu``: per cent of the peak of one device: operations that these tokens need (`ModelFlops`), without padding and
      recomputation. Attention is counted within documents by the lengths in the data set, and left out if it has none.
    - ``memory/peak_gib``, ``memory/reserved_gib``: peak memory that was allocated on the device, and that torch held of
      it, CUDA graphs and caches included: the card must have the latter. CUDA only.
    - ``packing/fill``: share of rows x `max_length` that holds tokens; ``packing/truncated_tokens``: tokens that
      `max_length` cut off. Both of the whole training set, if `FastSFTTrainer` prepared it.

    Args:
        peak_flops: operations per second of one device at the run's precision, for `mfu`; default:
            `trl.trainer.utils.get_peak_flops`. If it knows none (a CPU, fp32), `mfu` is left out with one warning.

    Raises:
        ValueError: `peak_flops` is not positive.
    """

    def __init__(self, peak_flops: float | None = None) -> None:
        if peak_flops is not None and not peak_flops > 0:
            raise ValueError(f"peak_flops={peak_flops} is not positive: give FLOP/s of one device, e.g. 989e12")
        super().__init__()
        self.peak_flops = peak_flops
        self._said: set[str] = set()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Read model and data; move this callback before the reporting ones, so that they log its figures."""
        super().on_train_begin(args, state, control)
        owners = list(callers())
        for handler in owners:
            if isinstance(handler, CallbackHandler) and self in handler.callbacks:
                # A new list, because the handler is iterating over the old one.
                handler.callbacks = [self, *(other for other in handler.callbacks if other is not self)]
        trainer = next((owner for owner in owners if isinstance(owner, Trainer)), None)
        run = None if trainer is None else vars(trainer).get("fastpack_run")
        self._facts = run.facts if isinstance(run, Run) else None
        self._flops: ModelFlops | None = None
        try:
            self._flops = model_flops(model)
        except ValueError as error:
            self._say(state, f"mfu: left out ({error})")
        self._peak = self._find_peak(args, model, state) if self._flops else None
        self._pairs = self._read_pairs(trainer, state) if self._peak else {}
        self._devices = max(1, args.n_gpu) * args.world_size
        self._cuda = args.device if args.device.type == "cuda" else None

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Start with this step if the callback was added during training."""
        if self._since is None:
            self.on_train_begin(args, state, control, model, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add the figures to a training log; ignore other logs."""
        if logs is None or "loss" not in logs or self._since is None:
            return
        super().on_log(args, state, control, logs)
        figures: dict[str, float] = {}
        if self.steps > 0 and self.seconds > 0:
            figures["step_time_ms"] = 1e3 * self.seconds / self.steps
            if (tokens := self.tokens) is not None:
                figures["tokens_per_second"] = tokens / self.seconds
                if self._flops is not None and self._peak:
                    needed = self._flops.count(tokens, {window: tokens * mean for window, mean in self._pairs.items()})
                    figures["mfu"] = 100 * needed / (self.seconds * self._peak * self._devices)
        if self._cuda is not None:
            figures["memory/peak_gib"] = torch.cuda.max_memory_allocated(self._cuda) / 2**30
            figures["memory/reserved_gib"] = torch.cuda.max_memory_reserved(self._cuda) / 2**30
        if self._facts is not None and self._facts.fill is not None:
            figures["packing/truncated_tokens"] = self._facts.truncated_tokens
            figures["packing/fill"] = self._facts.fill
        figures = {name: value for name, value in figures.items() if name not in logs}
        logs.update(figures)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(figures)  # written before callbacks are called

    def _read_pairs(self, trainer: Any, state: Any) -> dict[int | None, float]:
        """Return query-key pairs per token and window, by the lengths of the first rows of the data set."""
        dataset: Any = getattr(trainer, "train_dataset", None)
        columns = getattr(dataset, "column_names", None) or []
        readable = ("seq_lengths", "input_ids") if getattr(trainer, "padding_free", True) else ("input_ids",)
        column = next((name for name in readable if name in columns), "")
        lengths: list[int] = []
        for row in islice(dataset if column else (), _SAMPLE):
            lengths += map(int, row[column]) if column == "seq_lengths" else [len(row[column])]
        if not lengths:
            self._say(state, "mfu: without attention (the data set has no lengths of documents)")
            return {}
        assert self._flops is not None
        return {window: attention_pairs(lengths, window) / sum(lengths) for window in self._flops.pairs}

    def _find_peak(self, args: Any, model: nn.Module, state: Any) -> float | None:
        if self.peak_flops is not None:
            return self.peak_flops
        dtype = "bfloat16" if args.bf16 else "float16" if args.fp16 else str(text_model(model).dtype)[len("torch.") :]
        name = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else args.device.type
        missing = missing_reason("mfu")
        peak: float | None = None if missing else resolve(*NEEDS["mfu"])(name, dtype)
        if peak is None:
            why = missing or f"no peak is known for {name} in {dtype}"
            self._say(state, f"mfu: left out ({why}; ThroughputCallback(peak_flops=...) sets it)")
        return peak

    def _say(self, state: Any, message: str) -> None:
        if message not in self._said and state.is_world_process_zero:
            logger.warning(message)
        self._said.add(message)
