"""Settings of one quickstart run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_LENGTH = 1_024  # tokens of a packed row


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one run, from the command line."""

    folder: Path
    json_file: Path | None
    steps: int
    lora_steps: int
    compare_steps: int
    seed: int
    overwrite: bool

    @property
    def training(self) -> dict[str, Any]:
        """Return the arguments of the full fine-tune and of both sides of the comparison."""
        return {
            "packing": True,
            "packing_strategy": "bfd",
            "max_length": MAX_LENGTH,
            "per_device_train_batch_size": 2,
            "learning_rate": 3e-3,
            "lr_scheduler_type": "constant_with_warmup",
            "warmup_steps": 3,
            "seed": self.seed,
            # float32 on the CPU: bf16, TRL's default, is emulated by most CPUs and keeps three digits, too few to tell
            # rounding from a mistake when the losses are compared with stock.
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,  # memory is no concern at this size
            "save_strategy": "no",
            "report_to": "none",
        }
