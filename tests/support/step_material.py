"""Runs whose host syncs are counted between two logs, without and with an accelerator."""

from __future__ import annotations

import contextlib
from typing import Any

from transformers import TrainerCallback

from fastpack_trl.testing import HostSyncs, count_host_syncs


class BetweenLogs(TrainerCallback):
    """Counts host syncs from the second step to the last one before the log, and the micro-batches in between."""

    def __init__(self, error: bool = False) -> None:
        self.stack = contextlib.ExitStack()
        self.syncs: HostSyncs | None = None
        self.error = error
        self.micro_batches = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.syncs = self.stack.enter_context(count_host_syncs(error=self.error))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.syncs is not None:
            self.micro_batches += args.gradient_accumulation_steps
        if state.global_step == args.max_steps - 1:
            self.stack.close()

    @property
    def per_micro_batch(self) -> float:
        assert self.micro_batches
        return self.syncs.total / self.micro_batches


# Nothing is logged but the end of the run, nothing is evaluated.
ONE_LOG = {"logging_steps": 100, "eval_strategy": "no", "max_steps": 4, "packing": True}
