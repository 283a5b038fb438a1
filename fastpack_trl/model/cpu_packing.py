"""4-bit weights on a CPU: bitsandbytes packs them, in an evaluation, in a layout whose product has no backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from fastpack_trl.model.patches import attribute_set

_PACKS = "support_avx512bf16_for_cpu"


@contextmanager
def not_packed_on_cpu(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Keep the layout of 4-bit weights while a trainer runs (bitsandbytes 0.50, `Linear4bit.forward`).

    The layout stays when training goes on, and gradients end at each such product without a word.

    Raises:
        ValueError: `training`, and weights were packed before. What unpacks them rounds their scales.
    """
    layers: list[Any] = [module for module in model.modules() if getattr(module, _PACKS, False)]
    states = [getattr(layer.weight, "quant_state", None) for layer in layers]
    packed = sum(bool(getattr(state, "packing_format_for_cpu", False)) for state in states)
    if training and packed:
        raise ValueError(
            f"an evaluation on the CPU has packed the 4-bit weights of {packed} layers for inference, where they have "
            "no backward: load the model again, and call it outside of the trainer only with inputs that need gradients"
        )
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(attribute_set(layer, _PACKS, False))
        yield
