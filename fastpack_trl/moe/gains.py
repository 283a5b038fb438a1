"""Where `moe="auto"` takes our path, by what was measured: one table, which a later measurement changes."""

from __future__ import annotations

from typing import Literal

from torch import nn

from fastpack_trl.lora.experts import has_expert_lora
from fastpack_trl.moe.layout import experts_modules

Training = Literal["lora", "frozen", "full"]

LEAST_GAIN = 1.03
"""Stock's time over ours; below it stock stays."""

MEASURED: dict[tuple[str, Training], float] = {("cpu", "lora"): 1.16, ("cuda", "lora"): 2.37}
"""Per device type and what trains: the least ratio of stock's time to ours, forward and backward of whole decoders, of
all shapes and row lengths in ``bench/results/moe_*.json``.
"""


def what_trains(model: nn.Module) -> Training:
    """Of the experts: LoRA on their stacks, the stacks themselves, or nothing."""
    if has_expert_lora(model):
        return "lora"
    stacks = (parameter for module in experts_modules(model).values() for parameter in module.parameters())
    return "full" if any(parameter.requires_grad for parameter in stacks) else "frozen"


def measured(device_type: str, training: Training) -> tuple[bool, str]:
    """Whether ``auto`` takes our path, and what the report says of it.

    Without a measurement it does: the results are the same, less is kept for backward, and nothing that stock does is
    done twice. The report says so, so that whoever measures knows where.
    """
    gain = MEASURED.get((device_type, training))
    experts = "LoRA on experts" if training == "lora" else f"{training} experts"
    if gain is None:
        return True, f"{experts}: speed not measured on {device_type}, moe='off' is stock"
    if gain < LEAST_GAIN:
        return False, f"{experts}: {gain:.2f} times stock's speed on {device_type}, moe='on' takes it all the same"
    return True, f"{experts}: measured at least {gain:.2f} times stock's speed on {device_type}"
