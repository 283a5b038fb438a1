"""The rounds of a comparison of trainers, and the fields of the configuration that it needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastpack_trl.errors import UserError
from fastpack_trl.measure.long_run import LONG_RUN

DEFAULT_PAIRS, WARMUP, GATE_STEPS = 9, 2, 2


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """Numbers of rounds, and what else decides how much is measured.

    Attributes:
        pairs: timed rounds, one optimizer step of each side; 6 or more give an interval of 95 %.
        warmup: rounds before, not timed.
        gate_steps: rounds before these, in which all sides must have the same loss; 0 for no gate.
        seed: of the random numbers before each side is built, and of its first step.
        profile: folder for a Chrome trace per side; None for none.
        peak_flops: of the device; None: what TRL knows.
    """

    pairs: int = DEFAULT_PAIRS
    warmup: int = WARMUP
    gate_steps: int = GATE_STEPS
    seed: int = 0
    profile: Path | None = None
    peak_flops: float | None = None

    @property
    def untimed(self) -> int:
        return self.gate_steps + self.warmup

    def checked(self, dropout: bool) -> int:
        """Return the rounds in which losses must agree: the gate's, and the warm-up's if there is no dropout."""
        return 0 if not self.gate_steps else self.gate_steps if dropout else self.untimed

    @property
    def rounds(self) -> int:
        return self.untimed + self.pairs

    @property
    def changes(self) -> dict[str, Any]:
        """Return the fields that a measurement needs: enough steps, nothing written, nothing reported."""
        return {
            # Two further ones: one under the profiler, one in which syncs are counted. None is the last of a run.
            "max_steps": max(LONG_RUN, self.rounds + 2),
            "report_to": "none",
            "save_strategy": "no",
            "eval_strategy": "no",
            "eval_on_start": False,
            "load_best_model_at_end": False,
            "push_to_hub": False,
            "disable_tqdm": True,
        }

    def check(self) -> None:
        """Raise `UserError` if there is nothing to measure."""
        if self.pairs < 1 or self.warmup < 0 or self.gate_steps < 0:
            raise UserError(
                f"pairs={self.pairs}, warmup={self.warmup}, gate_steps={self.gate_steps}: "
                "time at least one pair, after 0 or more rounds of each"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "pairs": self.pairs,
            "warmup_steps": self.warmup,
            "gate_steps": self.gate_steps,
            "interval": "order statistics of the median; `coverage` is the least probability that they cover it",
        }
