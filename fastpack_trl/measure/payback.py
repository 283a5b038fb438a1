"""The rule for a cost at the start of a run: it is paid only if the remaining steps pay it back."""

from __future__ import annotations

import math
from typing import NamedTuple

LONG_RUN = 10_000
"""``max_steps`` of a measured run: features that pay back in a long run are on."""


class StartUpCost(NamedTuple):
    """Something done once that makes each later step shorter: ``StartUpCost(seconds=0.4, saving=0.055)``."""

    seconds: float
    """Cost, once."""
    saving: float
    """Seconds per step, measured or the most that is possible."""

    @property
    def steps(self) -> float:
        """Steps after which it is paid back; infinite if nothing is saved."""
        return self.seconds / self.saving if self.saving > 0 else math.inf

    def pays(self, steps_left: float) -> bool:
        """Return whether the run is shorter with it."""
        return self.steps < steps_left


class StepsLeft(NamedTuple):
    """Remaining work of a run: ``StepsLeft(steps=50, rows=8)``."""

    steps: int
    """Optimizer steps."""
    rows: int
    """Rows per step: its micro-batches, fewer if these are merged."""
