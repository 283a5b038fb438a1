"""A few steps of a long run: what pays back in a long run is on in them, whatever they cost at its start."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

LONG_RUN = 10_000
"""``max_steps`` of a run that is measured: `measure.payback` weighs start-up costs against the steps that are left."""


class EndsAfter(TrainerCallback):
    """Ends a run of `LONG_RUN` steps after the first ones.

    Args:
        steps: optimizer steps that run.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop at the step."""
        if state.global_step >= self.steps:
            control.should_training_stop = True
