"""Runs whose host syncs are counted between two logs, without and with an accelerator."""

from __future__ import annotations

import contextlib
from typing import Any

from transformers import TrainerCallback

from fastpack_trl.testing import HostSyncs, count_host_syncs


class BetweenLogs(TrainerCallback):
    """Counts in every step from the second on, but from the end of one that logs, evaluates or saves to the next.

    `how` are arguments of `count_host_syncs`.
    """

    def __init__(self, **how: Any) -> None:
        self.how, self.stack, self.active = how, contextlib.ExitStack(), False
        self.found: list[HostSyncs] = []
        self.steps = self.micro_batches = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step and not self.active:
            self.found.append(self.stack.enter_context(count_host_syncs(**self.how)))
            self.active = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += self.active
        self.micro_batches += self.active * args.gradient_accumulation_steps
        if control.should_log or control.should_evaluate or control.should_save or control.should_training_stop:
            self.on_train_end()

    def on_train_end(self, *_: Any, **kwargs: Any) -> None:
        self.stack.close()
        self.active = False

    @property
    def syncs(self) -> str:
        return "\n".join(str(found) for found in self.found if found.total)

    @property
    def per_micro_batch(self) -> float:
        return sum(found.total for found in self.found) / self.micro_batches


# Nothing is logged but the end of the run, nothing is evaluated.
ONE_LOG = {"logging_steps": 100, "eval_strategy": "no", "max_steps": 4, "packing": True}
