"""The rule for start-up costs: a cost is accepted only if the remaining steps pay it back."""

from __future__ import annotations

import math
from typing import NamedTuple

LONG_RUN = 10_000
"""``max_steps`` of a measured run, so that features that pay back in a long run are on."""


class StartUpCost(NamedTuple):
    """A one-time cost that makes each later step shorter: ``StartUpCost(seconds=0.4, saving=0.055)``."""

    seconds: float
    """One-time cost."""
    saving: float
    """Saving per step, measured or an upper bound."""

    @property
    def steps(self) -> float:
        """Return the number of steps that pay it back; infinite if nothing is saved."""
        return self.seconds / self.saving if self.saving > 0 else math.inf

    def pays(self, steps_left: float) -> bool:
        """Return whether it shortens the run."""
        return self.steps < steps_left
