"""The table of measurements by which `moe="auto"` takes our path or stock's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from fastpack_trl.moe.layout import experts_modules
from fastpack_trl.moe.lora import has_expert_lora

Training = Literal["lora", "frozen", "full"]

LEAST_GAIN = 1.03
"""Stock's time over ours; below it stock stays."""


@dataclass(frozen=True, slots=True)
class Gain:
    """One measurement: ``Gain(1.06, "qwen3_moe-small at 512")``.

    Attributes:
        least: stock's time over ours, forward and backward of whole decoders: the lowest end of an interval.
        rows: shapes and tokens per row.
    """

    least: float
    rows: str


MEASURED: dict[tuple[str, Training], Gain] = {
    ("cpu", "lora"): Gain(1.21, "gpt_oss-small and qwen3_moe-small at 512 and 2,048 tokens"),
    ("cuda", "lora"): Gain(2.11, "gpt-oss-20b at 2,048 tokens"),
}
"""Per device type and what trains, from the decoder rows of ``benchmarks/results/moe_*.json``."""


def what_trains(model: nn.Module) -> Training:
    """Return what is trained of the experts: LoRA on their stacks, the stacks themselves, or nothing."""
    if has_expert_lora(model):
        return "lora"
    stacks = (parameter for module in experts_modules(model).values() for parameter in module.parameters())
    return "full" if any(parameter.requires_grad for parameter in stacks) else "frozen"


def measured(device_type: str, training: Training) -> tuple[bool, str]:
    """Return whether ``auto`` takes our path, and what the report says of it.

    Without a measurement it does: results are the same and less is kept for backward. The report says so.
    """
    gain = MEASURED.get((device_type, training))
    experts = "LoRA on experts" if training == "lora" else f"{training} experts"
    if gain is None:
        return True, f"{experts}: speed not measured on {device_type}, moe='off' is stock"
    found = f"{experts}: measured {gain.least:.2f} times stock's speed or more on {device_type} ({gain.rows})"
    return (True, found) if gain.least >= LEAST_GAIN else (False, f"{found}; moe='on' takes it all the same")
